"""Where files lie: tests beside their rooms, folders that stay readable, no circle of imports, nothing run twice."""

from __future__ import annotations

import graphlib
import re
import subprocess
import tomllib
from pathlib import Path

import grimp
import pytest
from _pytest.mark.expression import Expression

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvboost_edge"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MOST_LINES = 400
MOST_FILES = 14
# Folders of tests that have no room of that name.
NO_ROOMS = {
    "arm64": "the same tests on emulated processors",
    "benchmarks": "of benchmarks/, which is beside the package",
    "cuda_ext": "of cuda_ext/, a package of its own beside this one",
    "server/http/page": "of server/http/static/, which holds no Python",
}
# Rooms that may hold more files than others.
FLAT = {"engine": "its files have no order among them that a folder could name"}


def test_tests_lie_where_their_rooms_do():
    folders = {path.parent.relative_to(ROOT / "tests").as_posix() for path in TESTS} - {"."}
    without = {folder for folder in folders if not (PACKAGE / folder).is_dir()}
    assert without == set(NO_ROOMS)


def test_no_file_is_long():
    lengths = {path.relative_to(ROOT): len(path.read_bytes().splitlines()) for path in (*MODULES, *TESTS)}
    assert not {str(path): length for path, length in lengths.items() if length > MOST_LINES}


def test_no_file_repeats_the_name_of_its_folder():
    assert not [str(path.relative_to(ROOT)) for path in MODULES if path.stem.startswith(f"{path.parent.name}_")]


def test_no_folder_is_full():
    folders = sorted({path.parent for path in MODULES})
    named = {folder: [path for path in folder.glob("*.py") if not path.stem.startswith("__")] for folder in folders}
    full = {folder.relative_to(PACKAGE).as_posix() for folder, files in named.items() if len(files) > MOST_FILES}
    assert full == set(FLAT)


def circle(package: str) -> list[str]:
    """Modules of the package that import each other in a circle, the first one again at the end; [] if there is none.
    Imports inside functions and under TYPE_CHECKING count like any other."""
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_imports_form_a_circle():
    found = circle("kvboost_edge")
    assert not found, " imports ".join(found)


@pytest.mark.parametrize(
    "back",
    ["from {0} import a", "def late():\n    import {0}.a", "import typing\nif typing.TYPE_CHECKING:\n    import {0}.a"],
    ids=["plain", "in a function", "for types"],
)
def test_a_circle_is_found_wherever_an_import_stands(back, tmp_path, monkeypatch, request):
    name = re.sub(r"\W", "_", request.node.name)
    (tmp_path / name).mkdir()
    files = {"__init__": "", "a": f"import {name}.b\n", "b": f"import {name}.c\n", "c": back.format(name) + "\n"}
    for stem, text in files.items():
        (tmp_path / name / f"{stem}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert set(circle(name)) == {f"{name}.{stem}" for stem in "abc"}
    (tmp_path / name / "c.py").write_text("")
    assert circle(name) == []


def selections(*goals: str) -> dict[tuple[str, ...], list[str]]:
    """Of the pytest calls that make would do: thread setting and paths -> the expressions that choose by marker."""
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", *goals]
    plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    found: dict[tuple[str, ...], list[str]] = {}
    for line in plan.splitlines():
        before, called, arguments = line.partition("-m pytest ")
        if called:
            paths = re.findall(r"(?<= )tests/\S+", arguments)
            chosen = re.findall(r'-m (?:"([^"]*)"|(\w+))', arguments)
            key = ("one thread" if "KVBOOST_EDGE_TEST_ONE_THREAD=1" in before else "all threads", *paths)
            found.setdefault(key, []).extend(quoted or word for quoted, word in chosen or [("", "")])
            assert not re.search(r"(^| )(-k|--ignore|--deselect)", arguments), line
    return found


def test_make_test_runs_every_test_once():
    """With all threads the whole suite, with one the rooms that compute; of both each test in exactly one call."""
    found = selections("test")
    assert [key[0] for key in found] == ["all threads", "one thread"]
    assert [len(key) > 1 for key in found] == [False, True]
    for expressions in found.values():
        for marks in ({"alone"}, set()):
            takes = [Expression.compile(text).evaluate(marks.__contains__) for text in expressions]
            assert sum(takes) == 1, expressions
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert settings["testpaths"] == ["tests"]
    assert not [option for option in settings["addopts"] if option.startswith(("-k", "-m", "--ignore", "--deselect"))]
