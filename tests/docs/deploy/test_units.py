"""Tests of the systemd units: the paths, addresses and flags in them fit together."""

import re
import shlex
from pathlib import Path

import pytest

from kvboost_edge.server.flags import parse_flags

FOLDER = Path(__file__).parents[3] / "docs" / "deploy"
UNITS = sorted(path.name for path in FOLDER.glob("*.service"))


def settings(name):
    """Return the values of each setting of a unit, without comments."""
    return settings_of((FOLDER / name).read_text(encoding="utf-8"))


def settings_of(text):
    found = {}
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
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


def parsed(command, credentials):
    """Return the server's options, as it reads them from an ExecStart line."""
    program, *flags = shlex.split(command.replace("%d", str(credentials)))
    assert program == "/opt/kvboost-edge/bin/kvboost-server"
    return parse_flags(flags, "server")


def test_stopping_the_unit_signals_the_server_only():
    """Ray's processes would end at SIGTERM too, and the server would wait a minute for them."""
    unit = settings("kvboost-edge.service")
    assert (unit["KillSignal"], unit["KillMode"]) == (["SIGTERM"], ["mixed"])


def test_the_drop_in_for_a_team_completes_the_unit(tmp_path):
    page = FOLDER.parent / "how-to" / "serve-a-team.md"
    [block] = re.findall(r"^ *```ini\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.M | re.S)
    drop_in = settings_of(re.sub(r"^ {4}", "", block, flags=re.MULTILINE))
    unit = settings("kvboost-edge.service")
    for line in unit["LoadCredential"] + drop_in["LoadCredential"]:
        name, _, source = line.partition(":")
        assert source.startswith("/etc/kvboost-edge/")
        (tmp_path / name).write_text(name[0] * 48)
    # The empty line removes the command of the unit.
    empty, command = drop_in["ExecStart"]
    assert empty == ""
    before, after = parsed(unit["ExecStart"][0], tmp_path), parsed(command, tmp_path)
    assert after.model == before.model
    assert after.settings.api_keys == before.settings.api_keys
    assert (len(before.settings.admin_api_keys), len(after.settings.admin_api_keys)) == (0, 1)
    assert "llm.example.org" in after.settings.allowed_hosts
