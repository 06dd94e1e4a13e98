"""Tests of `kvboost-edge cache` on prepared directories: contents, damage, and pruning, which keeps
open caches.
"""

import os
import time

import pytest

from helpers.tiers.disk_cases import (
    OTHER_SPACE,
    SPACE,
    chain,
    opened,
    read,
    segments,
    space_dir,
    write,
)
from kvboost_edge.cli.app import run
from kvboost_edge.tiers.disk.session_records import Session, SessionStore


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Cache directory of the package with two spaces, the first of them least recently used, and a
    file of packed weights.
    """
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    with opened(
        tmp_path / "blocks", SPACE, description={"model": "alpha-7b", "kv_format": "int8"}
    ) as tier:
        write(tier, chain(20))
    with opened(
        tmp_path / "blocks", OTHER_SPACE, description={"model": "beta-1b", "kv_format": "float16"}
    ) as tier:
        write(tier, chain(40))
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "0123-int4.kvpack").write_bytes(bytes(5000))
    return tmp_path


@pytest.fixture
def answer(answered):
    """Function `answer(*argv, code=0)` that returns the output of `cache`, with its rows by name."""

    def call(*argv, code=0):
        found = answered("cache", *argv, code=code)
        return {**found, "rows": {row["name"]: row for row in found["rows"]}}

    return call


def bytes_of(home, space):
    return sum(path.stat().st_size for path in segments(home / "blocks", space))


def test_list_and_status_report_the_cache(home, answer, printed):
    found = answer("list")
    assert list(found["rows"]) == ["alpha-7b int8", "beta-1b float16", "0123-int4"]
    row = found["rows"]["alpha-7b int8"]
    assert row["bytes"] == bytes_of(home, SPACE) > 0
    assert (row["kind"], row["in_use"], row["days"]) == ("blocks", False, 0.0)
    assert row["description"] == {"model": "alpha-7b", "kv_format": "int8"}
    assert row["model"] == ""
    assert found["bytes"] == bytes_of(home, SPACE) + bytes_of(home, OTHER_SPACE) + 5000
    assert list(answer("list", "BETA")["rows"]) == ["beta-1b float16"]
    text = printed("cache", "status").out
    assert "in 2 KV caches" in text
    assert str(home / "blocks") in text
    out = printed("cache", "list").out
    assert "alpha-7b int8" in out
    assert all(
        name in out for name in ("what", "model", "fingerprint, format", "size", "days", "state")
    )


@pytest.mark.parametrize("columns", [80, 200])
def test_the_list_starts_with_the_total_and_is_sorted_by_size(home, printed, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    fingerprint = "c7fd70cdccd7178367ba699b4f5a754cf290e9ea"
    sizes = {"int8": 3_000_000, "int4-asym": 9_000_000, "bf16": 6_000_000}
    for weights, size in sizes.items():
        (home / "packed" / f"{fingerprint}-{weights}.kvpack").write_bytes(bytes(size))
    lines = printed("cache", "list", fingerprint).out.splitlines()
    assert lines[1].startswith("18.0 MB in 3 files of packed weights")
    rows = [line for line in lines if "c7fd70cd " in line]
    assert [line.split("c7fd70cd ")[1].split()[:2] for line in rows] == [
        ["int4-asym", "9.0"],
        ["bf16", "6.0"],
        ["int8", "3.0"],
    ]
    assert all(len(line) <= columns for line in rows)


def test_named_sessions_are_listed_and_removed(home, answer, printed):
    store = SessionStore(home / "blocks")
    for tenant, name, model in (("one", "travel", "alpha-7b"), ("two", "plans\x1b[1m", "beta-1b")):
        session = Session.of(name, model, [1, 2, 3], {}, block_size=16, block_bytes=100)
        store.put(tenant, None, session)
    damaged = next(home.glob("blocks/sessions/*")) / f"{'0' * 64}.session"
    damaged.write_bytes(b"KVBOOST-SESSION 1 damaged")
    (home / "blocks" / "sessions" / "notes.txt").write_text("of somebody else")
    rows = answer("list")["rows"]
    assert {name: row["model"] for name, row in rows.items() if row["kind"] == "session"} == {
        "travel": "alpha-7b",
        "plans?[1m": "beta-1b",
        "0" * 16: "",
    }
    assert "in 3 named sessions" in printed("cache", "status").out
    assert list(answer("clear", "alpha-7b", "--dry-run")["rows"]) == ["alpha-7b int8", "travel"]
    assert store.find("one", None, "travel") is not None
    os.utime(damaged, (0, 0))
    assert list(answer("prune", "--older-than", "1")["rows"]) == ["0" * 16]
    assert all(row["removed"] for row in answer("clear", "--yes")["rows"].values())
    assert store.usage("one") == store.usage("two") == (0, 0)
    assert [path.name for path in (home / "blocks" / "sessions").iterdir()] == ["notes.txt"]


def test_prune_removes_expired_sessions(home, answer):
    store = SessionStore(home / "blocks")
    for name, ttl in (("lasting", 7200), ("ended", 60)):
        session = Session.of(
            name, "alpha-7b", [1], {}, block_size=16, block_bytes=1, ttl=ttl, now=time.time() - 3600
        )
        store.put("one", None, session)
    assert list(answer("prune", "--dry-run")["rows"]) == ["ended"]
    assert list(answer("prune")["rows"]) == ["ended"]
    assert [row for row in answer("list")["rows"] if row in ("ended", "lasting")] == ["lasting"]
    assert store.find("one", None, "lasting") is not None


def test_open_caches_are_reported_and_kept(home, answer):
    with opened(home / "blocks", SPACE) as tier:
        assert answer("list")["rows"]["alpha-7b int8"]["in_use"]
        found = answer("clear", "--yes")["rows"]
        assert not found["alpha-7b int8"]["removed"]
        assert found["beta-1b float16"]["removed"]
        assert answer("verify")["rows"]["alpha-7b int8"]["blocks"] == 20
        assert read(tier, chain(20)) == 20
        assert write(tier, chain(22)) == 22
    assert not space_dir(home / "blocks", OTHER_SPACE).exists()
    assert not (home / "packed" / "0123-int4.kvpack").exists()
    with opened(home / "blocks", SPACE) as tier:
        assert read(tier, chain(22)) == 22


def test_verify_counts_damaged_blocks_and_fails(home, answer, printed):
    found = answer("verify")["rows"]
    assert {name: (row["blocks"], row["damaged"]) for name, row in found.items()} == {
        "alpha-7b int8": (20, 0),
        "beta-1b float16": (40, 0),
    }
    path = segments(home / "blocks", SPACE)[0]
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    row = answer("verify", code=1)["rows"]["alpha-7b int8"]
    assert (row["blocks"], row["damaged"]) == (19, 1)
    assert "1 damaged" in printed("cache", "verify", code=1).out


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_clear_without_a_terminal_needs_yes(home, answer, printed, extra):
    before = sorted(path for path in home.rglob("*"))
    said = printed("cache", "clear", *extra, code=2).err
    assert "--yes" in said
    assert "MB" in said
    assert sorted(path for path in home.rglob("*")) == before
    printed("cache", "clear", *extra, "--yes")
    assert answer("list")["rows"] == {}
    printed("cache", "clear", *extra)


def test_a_dry_run_removes_nothing(home, answer, printed):
    before = sorted(home.rglob("*"))
    for action in (["clear"], ["prune", "--max-disk-bytes", "0"]):
        assert len(answer(*action, "--dry-run")["rows"]) == (3 if action == ["clear"] else 2)
        assert "would be removed" in printed("cache", *action, "--dry-run").out
    assert {path for path in sorted(home.rglob("*")) if path not in before} == set()
    assert all(path.exists() for path in before)


def test_prune_removes_the_least_recently_used_blocks(home, answer):
    cap = str(bytes_of(home, OTHER_SPACE))
    assert list(answer("prune", "--max-disk-bytes", cap)["rows"]) == ["alpha-7b int8"]
    assert list(answer("list")["rows"]) == ["beta-1b float16", "0123-int4"]
    assert answer("prune", "--max-disk-bytes", cap)["rows"] == {}
    assert answer("prune")["rows"] == {}


def test_prune_removes_entries_unused_for_a_number_of_days(home, answer):
    long_ago = 1_000_000_000
    for path in (
        *space_dir(home / "blocks", SPACE).iterdir(),
        home / "packed" / "0123-int4.kvpack",
    ):
        os.utime(path, (long_ago, long_ago))
    assert list(answer("prune", "--older-than", "30")["rows"]) == ["alpha-7b int8", "0123-int4"]
    assert list(answer("list")["rows"]) == ["beta-1b float16"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["list", "--dry-run"], "--dry-run"),
        (["clear", "--max-disk-bytes", "5"], "--max-disk-bytes"),
        (["verify", "--older-than", "5"], "--older-than"),
        (["prune", "--older-than", "-1"], "--older-than"),
    ],
)
def test_options_of_other_actions_are_refused_by_name(home, printed, argv, named):
    assert named in printed("cache", *argv, code=2).err


def test_a_word_without_matches_is_named(home, printed):
    for action, empty in (("list", "Nothing is cached"), ("prune", "Nothing to remove")):
        assert f"{empty} under a name with 'zzz'." in printed("cache", action, "zzz").out


def test_an_invalid_size_is_refused_with_examples(home, printed):
    err = " ".join(printed("cache", "prune", "--max-disk-bytes", "much", code=2).err.split())
    assert "'much' is not a size in bytes, such as 500M, 1GB, 8GiB or 1e9" in err
    assert "Value error" not in err


def test_another_or_missing_directory(home, answer, printed):
    assert answer("list", "--disk-cache-dir", home / "nothing")["bytes"] == 5000
    printed("cache", "list", "--disk-cache-dir", home / "packed" / "0123-int4.kvpack")
    assert run(["cache", "sweep"]) != 0


@pytest.mark.parametrize(("clock", "gone"), [(-86_400, []), (366 * 86_400, ["beta-1b float16"])])
def test_clock_jumps_give_no_negative_ages_and_keep_open_caches(
    home, answer, monkeypatch, clock, gone
):
    """The clock goes back a day or forward a year. An open cache stays, and no age is negative."""
    (home / "packed" / "0123-int4.kvpack").unlink()
    now = time.time()
    with opened(home / "blocks", SPACE) as tier:
        monkeypatch.setattr(time, "time", lambda: now + clock)
        assert all(row["days"] >= 0 for row in answer("list")["rows"].values())
        rows = answer("prune", "--older-than", "30")["rows"]
        assert [name for name, row in rows.items() if row["removed"]] == gone
        assert read(tier, chain(20)) == 20
        assert write(tier, chain(25)) == 25
        for path in space_dir(home / "blocks", SPACE).iterdir():
            os.utime(path, (1e11, 1e11))  # the year 5138
        assert answer("list")["rows"]["alpha-7b int8"]["days"] == 0
        assert run(["cache", "list"]) == 0
    with opened(home / "blocks", SPACE) as tier:
        assert read(tier, chain(25)) == 25
