"""Tests of the release report: its failures, missing tools, and its rows."""

import json
import re
import sys
from pathlib import Path

import pytest

from release import check as checks
from release.check import (
    ADVISORIES,
    CHECKS,
    Check,
    Unreachable,
    command,
    run_check,
    unavailable_tools,
)

ROOT = Path(__file__).parents[2]
THERE_PATH = sys.executable
THERE = Path(sys.executable).name
MISSING = "no-such-tool-anywhere"


def row(*tools, problems=()):
    return Check("a row", tools, lambda: list(problems))


def test_a_check_without_problems_passes():
    outcome = run_check(row(THERE), {})
    assert (outcome.state, outcome.lines, outcome.is_good) == ("passed", (), True)


def test_problems_fail_a_check_and_are_shown():
    outcome = run_check(row(THERE, problems=["a", "b"]), {})
    assert (outcome.state, outcome.lines, outcome.is_good) == ("failed", ("a", "b"), False)


def test_a_missing_tool_is_named_and_fails():
    outcome = run_check(row(THERE, MISSING), {})
    assert (outcome.state, outcome.is_good) == ("missing", False)
    [line] = outcome.lines
    assert line.startswith(f"{MISSING} is missing: install ")
    assert line.endswith("or list it in release/unavailable.toml")


def test_a_missing_tool_that_is_listed_is_reported_with_its_reason():
    outcome = run_check(row(MISSING), {MISSING: "no package has it"})
    assert (outcome.state, outcome.is_good) == ("unavailable", True)
    assert outcome.lines == (f"{MISSING}: no package has it",)


def test_one_listed_tool_excuses_no_other():
    assert run_check(row(MISSING, f"{MISSING}-2"), {MISSING: "a reason"}).state == "missing"


@pytest.mark.parametrize(("listed", "state"), [({}, "missing"), ({"a": "why"}, "unavailable")])
def test_a_service_that_cannot_be_reached_is_treated_like_a_missing_tool(listed, state):
    def run():
        raise Unreachable("a")

    outcome = run_check(Check("a row", (), run), listed)
    assert outcome.state == state
    assert outcome.lines == ("a: why" if listed else "a cannot be reached",)


AUDITED = {"name": "a", "version": "1", "vulns": []}
FOUND = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3", "4"]}]}
SKIPPED = {"name": "c", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("found", "state", "lines"),
    [
        ([AUDITED], "passed", ()),
        ([AUDITED, FOUND], "failed", ("b 2: CVE-1, fixed in 3, 4",)),
        ([AUDITED, SKIPPED], "failed", ("c could not be audited",)),
        ([SKIPPED], "missing", ("advisories cannot be reached",)),
    ],
)
def test_advisories_and_unaudited_packages_fail(tmp_path, monkeypatch, found, state, lines):
    program = tmp_path / "audit.py"
    program.write_text(f"print({json.dumps({'dependencies': found})!r})")
    monkeypatch.setattr(checks, "tool_path", lambda name: THERE_PATH)
    run = checks.subprocess.run
    monkeypatch.setattr(
        checks.subprocess, "run", lambda words, **more: run([words[0], str(program)], **more)
    )
    outcome = run_check(Check("a row", (), checks._audit), {})
    assert (outcome.state, outcome.lines) == (state, lines)


def test_a_listed_tool_that_is_installed_is_used():
    assert run_check(row(THERE, problems=["a"]), {THERE: "a reason"}).state == "failed"


@pytest.mark.parametrize(("code", "state"), [(0, "passed"), (3, "failed")])
def test_a_command_is_judged_by_its_exit_code(code, state):
    script = f"print('what it says'); raise SystemExit({code})"
    outcome = run_check(command("a row", THERE, "-c", script), {})
    assert outcome.state == state
    if code:
        assert outcome.lines[0].startswith("exit code 3: ")
        assert outcome.lines[-1] == "what it says"


def test_built_files_are_filled_in(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "DIST", tmp_path)
    show = command("a row", THERE, "-c", "import sys; sys.exit(' '.join(sys.argv[1:]))", "{wheel}")
    assert run_check(show, {}).lines == ("dist/*.whl does not exist: the build failed",)
    (tmp_path / "kvboost_edge-1-py3-none-any.whl").touch()
    assert run_check(show, {}).lines[-1] == str(tmp_path / "kvboost_edge-1-py3-none-any.whl")


def test_the_report_has_a_line_for_each_check_and_fails_if_one_does(monkeypatch, capsys):
    rows = (row(THERE), row(MISSING), row(THERE, problems=["why"]))
    monkeypatch.setattr(checks, "CHECKS", rows)
    assert checks.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [
        "passed",
        "missing",
        "failed",
    ]
    monkeypatch.setattr(checks, "CHECKS", rows[:1])
    assert checks.main([]) == 0


def test_one_check_can_be_run_alone(monkeypatch, capsys):
    rows = tuple(Check(name, (), list) for name in ("first", "second"))
    monkeypatch.setattr(checks, "CHECKS", rows)
    assert checks.main(["--only", "second"]) == 0
    assert capsys.readouterr().out.split() == ["passed", "second"]
    with pytest.raises(SystemExit):
        checks.main(["--only", "third"])
    assert "the names are first, second" in capsys.readouterr().err


def test_rows_have_names_of_their_own():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)


def test_only_tools_of_rows_are_listed_as_unavailable_and_each_has_a_reason():
    listed = unavailable_tools()
    assert set(listed) <= {ADVISORIES, *(tool for check in CHECKS for tool in check.tools)}
    assert all(len(reason.split()) >= 4 for reason in listed.values())


def test_the_tools_from_the_package_index_are_pinned():
    lines = (ROOT / "release" / "requirements.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert pinned
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", line) for line in pinned), pinned
