"""Tests of the systemd units: the paths, addresses and flags in them fit together."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "docs" / "deploy"
UNITS = sorted(path.name for path in FOLDER.glob("*.service"))


def settings(name):
    """Return the values of each setting of a unit, without comments."""
    found = {}
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("name", UNITS)
def test_the_unit_waits_for_mounts_at_the_private_cache_only(name):
    """With a dynamic user, the public path is a link, and a mount there keeps the unit down."""
    found = settings(name)
    assert found["DynamicUser"] == ["yes"]
    [cache] = found["CacheDirectory"]
    awaited = {path for line in found.get("RequiresMountsFor", []) for path in line.split()}
    assert f"/var/cache/{cache}" not in awaited
    assert {path for path in awaited if path.startswith("/var/cache/")} <= {
        f"/var/cache/private/{cache}"
    }
