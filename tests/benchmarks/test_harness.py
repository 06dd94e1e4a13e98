"""Tests of the benchmark harness: order of rounds, separate warm-up, the table and the JSON line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness


def test_contenders_alternate_and_the_warm_up_is_not_counted():
    calls = []
    works = {name: lambda name=name: calls.append(name) for name in ("ours", "theirs")}
    seconds = harness.alternate(works, rounds=3, warmups=2)
    assert calls == ["ours", "theirs"] * 5
    assert {name: len(times) for name, times in seconds.items()} == {"ours": 3, "theirs": 3}


def test_report_ends_with_one_json_line_and_writes_it(tmp_path, capsys):
    out = tmp_path / "results" / "x.json"
    options = harness.parser("x").parse_args(["--quick", "--out", str(out)])
    harness.report(
        "bench_x", [{"name": "a", "ms": 1.5}, {"name": "bc", "ms": None}], options=options, depth=3
    )
    lines = capsys.readouterr().out.splitlines()
    last = json.loads(lines[-1])
    assert last == json.loads(out.read_text(encoding="utf-8"))
    assert (last["benchmark"], last["quick"], last["depth"]) == ("bench_x", True, 3)
    assert last["rows"] == [{"name": "a", "ms": 1.5}, {"name": "bc", "ms": None}]
    assert lines[-5:-1] == ["name     ms", "----  -----", "a     1.500", "bc        -"]


def test_machine_card_names_what_figures_depend_on():
    card = harness.machine_card()
    assert card["threads"] >= 1
    assert card["packages"]["numpy"]
    assert {"cpu", "isa", "memory_gb", "date", "commit", "load_at_start"} <= set(card)


def test_the_printed_threads_are_those_of_the_run(capsys):
    parser = harness.parser("x")
    harness.add_threads(parser)
    for given in ([], ["--threads", "5"]):
        harness.report("bench_x", [{"ms": 1.5}], options=parser.parse_args(given))
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if " GB · load " in line]
    assert ["2 threads" in line for line in shown] == [True, False]
    assert ["5 threads" in line for line in shown] == [False, True]
    assert harness.threads_of({"threads": 3}, None) == 3


def test_a_commit_whose_code_has_changed_is_marked(tmp_path):
    def git(*arguments):
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *own, *arguments], check=True)

    code = tmp_path / "kvboost_edge" / "a.py"
    results = tmp_path / "benchmarks" / "results" / "a.json"
    for path in (code, results):
        path.parent.mkdir(parents=True)
        path.write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "A commit")
    commit = harness._commit(tmp_path)
    results.write_text("2")
    assert harness._commit(tmp_path) == commit
    assert "dirty" not in commit
    code.write_text("2")
    assert harness._commit(tmp_path) == f"{commit}-dirty"


def test_load_is_that_of_the_start(monkeypatch):
    before = harness.machine_card()["load_at_start"]
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 99.0, 99.0))
    assert harness.machine_card()["load_at_start"] == before != 99.0


def test_json_has_the_options_without_paths(capsys):
    parser = harness.parser("x")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--files", nargs="+")
    parser.add_argument("--features")
    given = ["--quick", "--model", "m", "--files", "a", "/b", "--features", "+avx2,+fma"]
    harness.report(
        "bench_x", [{"ms": 1.5}], options=parser.parse_args(given), shown=[{"ms": "1.5 (1-2)"}]
    )
    lines = capsys.readouterr().out.splitlines()
    last = json.loads(lines[-1])
    assert last["options"] == {"quick": True, "out": None, "features": "+avx2,+fma"}
    assert (last["rows"], lines[-2]) == ([{"ms": 1.5}], "1.5 (1-2)")


def test_the_first_byte_of_a_command_that_succeeds_is_timed():
    assert 0 < harness.seconds_to_first_byte([sys.executable, "-c", "print('A')"]) < 60
    for code in ("pass", "print('A'); raise SystemExit(3)"):
        with pytest.raises(RuntimeError, match=r"ended with [03]$"):
            harness.seconds_to_first_byte([sys.executable, "-c", code])
