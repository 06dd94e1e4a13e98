"""Faults in the tiers below the pool."""

from __future__ import annotations

from faults.fault import fault

FAULTS = (
    fault(
        "a sealed value is believed without its MAC",
        "tiers/redis/values.py",
        " or not hmac.compare_digest(self._mac(view[:end]), view[end:])",
        "",
        "tests/tiers/redis/test_values.py",
    ),
    fault(
        "a value of another block is opened",
        "tiers/redis/values.py",
        " or header.address != address",
        "",
        "tests/tiers/redis/test_values.py",
    ),
)
