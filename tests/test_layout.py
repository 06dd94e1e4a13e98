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

from conftest import takes_all_threads

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
# Packages of what tests share.
SHARED = ("helpers", "faults")
# Rooms that may hold more files than others.
FLAT = {"engine": "its files have no order among them that a folder could name"}


def test_tests_lie_where_their_rooms_do():
    folders = {path.parent.relative_to(ROOT / "tests").as_posix() for path in TESTS} - {"."}
    folders = {folder for folder in folders if folder.partition("/")[0] not in SHARED}
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


def calls_of(*goals: str) -> dict[str, list[tuple[str, set[str]]]]:
    """The pytest calls that make would do, by how many threads: what chooses by marker, and the paths, none for all."""
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", *goals]
    plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    found: dict[str, list[tuple[str, set[str]]]] = {}
    for line in plan.splitlines():
        before, called, arguments = line.partition("-m pytest ")
        if called:
            [(quoted, word)] = re.findall(r'-m (?:"([^"]*)"|(\w+))', arguments) or [("", "")]
            threads = "one thread" if "KVBOOST_EDGE_TEST_ONE_THREAD=1" in before else "all threads"
            found.setdefault(threads, []).append((quoted or word, set(re.findall(r"(?<= )tests/\S+", arguments))))
            assert not re.search(r"(^| )(-k|--ignore|--deselect)", arguments), line
    return found


def files_of_tests() -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in TESTS if path.name.startswith("test_")}


def below(files: set[str], paths: set[str]) -> set[str]:
    """Files that pytest reads when it is given these paths."""
    return {file for file in files if not paths or any(Path(file).is_relative_to(path) for path in paths)}


def marked(name: str) -> set[str]:
    """Files of tests that use the marker."""
    return {file for file in files_of_tests() if re.search(rf"\.{name}\b", (ROOT / file).read_text(encoding="utf-8"))}


def test_make_test_runs_every_test_once():
    """With all threads the whole suite, with one what takes as many as there are; of both each test in one call."""
    found = calls_of("test")
    assert sorted(found) == ["all threads", "one thread"]
    for calls in found.values():
        taking = {
            mark: [paths for text, paths in calls if Expression.compile(text).evaluate({mark}.__contains__)]
            for mark in ("", "alone", "cluster")
        }
        [whole] = taking.pop("")
        for mark, paths in taking.items():
            assert len(paths) <= 1, f"several calls run what is marked {mark}"
            taken = below(marked(mark), paths[0]) if paths else set()
            assert taken == below(marked(mark), whole), f"not all that is marked {mark} is run"
        assert taking["alone"]
    everything, once_more = (
        next(paths for text, paths in found[threads] if "not" in text) for threads in ("all threads", "one thread")
    )
    assert not everything
    rooms = ("backends", "kernels", "runners")
    computing = below(files_of_tests(), {f"tests/{room}" for room in rooms})
    assert {file for file in computing if takes_all_threads(ROOT / file)} == below(computing, once_more)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert settings["testpaths"] == ["tests"]
    assert not [option for option in settings["addopts"] if option.startswith(("-k", "-m", "--ignore", "--deselect"))]
