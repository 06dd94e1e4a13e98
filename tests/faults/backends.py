"""Faults in the backends."""

from __future__ import annotations

from faults.fault import fault
from faults.suites import GEMMA4_ROWS

_CONTRACT = ("tests/backends",)

FAULTS = (
    fault(
        "torch: causal mask off by one",
        "backends/torch/masked_attention.py",
        "(keys <= queries)",
        "(keys <= queries + 1)",
        *_CONTRACT,
    ),
    fault(
        "torch: window off by one",
        "backends/torch/masked_attention.py",
        "(keys > queries - window)",
        "(keys >= queries - window)",
        *_CONTRACT,
    ),
    fault(
        "rows that go on alone see one token less",
        "backends/cpu.py",
        "- behind + counts)",
        "- behind + counts - 1)",
        *GEMMA4_ROWS,
    ),
    fault(
        "rows that go on alone are one sequence",
        "backends/cpu.py",
        "(np.diff(rows, prepend=-2) != 1) | ",
        "",
        *GEMMA4_ROWS,
    ),
)
