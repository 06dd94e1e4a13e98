"""Tests of the repository's layout: tests mirror the package, imports have no cycles, and every
test belongs to exactly one set.
"""

import ast
import functools
import graphlib
import itertools
import re
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import grimp
import pytest
from _pytest.mark.expression import Expression

from conftest import sampled, takes_all_threads
from helpers.long_files import LONG

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvboost_edge"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Test folders without a folder of the same name in the package or next to it.
NO_ROOMS = {
    "arm64": "the same tests on emulated processors",
    "github": "of .github/, whose name no Python package can have",
    "server/http/page": "of server/http/static/, which holds no Python",
}
# Packages shared by the tests.
SHARED = ("helpers", "faults")
# Compatibility APIs, and the class names that other projects fix and that we also use.
COMPATIBILITY = ("compat/", "server/api/compat/")
FIXED_NAMES = {
    "StreamOptions": "OpenAI's Responses API",
    "Tool": "Anthropic's Messages API",
}


def test_folders_mirror_the_package():
    folders = {path.parent.relative_to(ROOT / "tests").as_posix() for path in TESTS} - {"."}
    folders = {folder for folder in folders if folder.partition("/")[0] not in SHARED}
    without = {
        folder
        for folder in folders
        if not (PACKAGE / folder).is_dir() and not (ROOT / folder).is_dir()
    }
    assert without == set(NO_ROOMS)


def test_no_file_repeats_the_name_of_its_folder():
    assert not [
        str(path.relative_to(ROOT))
        for path in MODULES
        if path.stem.startswith(f"{path.parent.name}_")
    ]


def test_each_package_has_one_job_that_no_other_has():
    """A package states its job in its first line and contains more than one module."""
    packages = {
        path.parent: path.read_text(encoding="utf-8") for path in MODULES if path.stem == "__init__"
    }
    jobs = {}
    for package, text in packages.items():
        job = (ast.get_docstring(ast.parse(text)) or "").split(".")[0]
        assert job, f"{package.relative_to(ROOT)} does not state its job"
        jobs.setdefault(job, []).append(package)
        assert sum(path.is_relative_to(package) for path in MODULES) > 2, package
    assert {job: found for job, found in jobs.items() if len(found) > 1} == {}


def public_classes():
    """Return a map from the name of each public top-level class to the modules that define it."""
    found = {}
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^class ([^\W_]\w*)", text, flags=re.MULTILINE):
            found.setdefault(name, []).append(path.relative_to(PACKAGE).as_posix())
    return found


def test_no_two_public_classes_share_a_name():
    """The compatibility APIs may share names with each other. They share a name with our own
    classes only if another project fixes it.
    """
    shared = {}
    for name, modules in public_classes().items():
        ours = [module for module in modules if not module.startswith(COMPATIBILITY)]
        if len(ours) > 1 or (ours and len(modules) > 1 and name not in FIXED_NAMES):
            shared[name] = modules
    assert shared == {}


def circle(package):
    """Return an import cycle of the package, with the first module repeated at the end, or [].

    Imports inside functions and under TYPE_CHECKING count like any other import.
    """
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {
        module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)
    }
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_imports_are_cyclic():
    found = circle("kvboost_edge")
    assert not found, " imports ".join(found)


@pytest.mark.parametrize(
    "back",
    [
        "from {0} import a",
        "def late():\n    import {0}.a",
        "import typing\nif typing.TYPE_CHECKING:\n    import {0}.a",
    ],
    ids=["plain", "in a function", "for types"],
)
def test_an_import_cycle_is_detected(back, tmp_path, monkeypatch, request):
    name = re.sub(r"\W", "_", request.node.name)
    (tmp_path / name).mkdir()
    files = {
        "__init__": "",
        "a": f"import {name}.b\n",
        "b": f"import {name}.c\n",
        "c": back.format(name) + "\n",
    }
    for stem, text in files.items():
        (tmp_path / name / f"{stem}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert set(circle(name)) == {f"{name}.{stem}" for stem in "abc"}
    (tmp_path / name / "c.py").write_text("")
    assert circle(name) == []


# The table of public names is the only module that may name modules of a higher layer. KVBoost's
# modules look names up in it.
TABLE = "kvboost_edge"
ASKING = {
    f"kvboost_edge.{name}" for name in ("batch", "chunk_registry", "compat", "engine", "models")
}


def rooms_by_row():
    """Return the row of each folder in the contract "Rooms import downward only"; 0 is the top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [contract] = [
        contract
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract.get("containers") == ["kvboost_edge"]
    ]
    return {
        room.strip(): row
        for row, rooms in enumerate(contract["layers"])
        for room in rooms.split("|")
    }


def modules_named_in(text):
    """Return the modules of the package that a source file names in strings.

    These are whole strings such as "kvboost_edge.errors" or "kvboost_edge.errors:ConfigError", and
    arguments of import_module.
    """
    found = set()
    if not re.search(r"import_module|[\"']kvboost_edge", text):
        return found  # without the cost of parsing
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {part.value for part in node.args if isinstance(part, ast.Constant)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {name for name in [node.value] if name.startswith("kvboost_edge.")}
    names = {name.partition(":")[0] for name in found if re.fullmatch(r"[\w.]+(:\w+)?", name)}
    return {name for name in names if name == TABLE or name.startswith("kvboost_edge.")}


def upward_text_imports(sources):
    """Return (module, named module) for each name of a module that is not in a lower layer."""
    rows = rooms_by_row()
    found = set()
    for module, text in sources.items():
        if module == TABLE:
            continue
        room = module.split(".")[1]
        for name in modules_named_in(text):
            other = name.partition(".")[2].partition(".")[0]
            if other != room and rows.get(other, -1) <= rows[room]:
                found.add((module, name))
    return found


def test_imports_by_name_follow_the_layers():
    """Modules that are loaded by name follow the layer contract. The table of public names is the
    only exception.
    """
    sources = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): (
            path.read_text(encoding="utf-8")
        )
        for path in MODULES
    }
    assert upward_text_imports(sources) == {(module, TABLE) for module in ASKING}


@pytest.mark.parametrize(
    "text",
    [
        'import_module("kvboost_edge")',
        'TABLE = {"a": "kvboost_edge.engine.engine"}',
        'importlib.import_module("kvboost_edge.text.tokenizer")',
        'f("kvboost_edge.server.app:make")',
    ],
)
def test_an_upward_import_by_name_is_detected(text):
    assert upward_text_imports({"kvboost_edge.models.locate": text})
    assert not upward_text_imports({"kvboost_edge.models.locate": '"kvboost_edge.errors"'})
    assert not upward_text_imports({"kvboost_edge.models.locate": '"kvboost_edge is a package"'})


SELECTIONS = {
    "make test": (),
    "make test, alone": ("alone",),
    "make test-all only": ("full",),
    "make test-all only, alone": ("full", "alone"),
    "clusters": ("cluster",),
    "clusters of the full matrices": ("cluster", "full"),
}


def calls_of(goal):
    """Return the pytest calls of a make target, grouped by number of threads.

    Each call is a pair of the marker expression and the paths; an empty set of paths means all
    tests.
    """
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", goal]
    plan = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    found = {}
    for line in plan.splitlines():
        before, called, arguments = line.partition("-m pytest ")
        if called:
            [expression] = re.findall(r'-m "([^"]*)"', arguments)
            threads = "one thread" if "KVBOOST_EDGE_TEST_ONE_THREAD=1" in before else "all threads"
            paths = set(re.findall(r"(?<= )tests/\S+", arguments))
            found.setdefault(threads, []).append((expression, paths))
            assert not re.search(r"(^| )(-k|--ignore|--deselect)", arguments), line
    return found


def files_of_tests():
    return {path.relative_to(ROOT).as_posix() for path in TESTS if path.name.startswith("test_")}


def below(files, paths):
    """Return the files that pytest collects from these paths."""
    return {
        file
        for file in files
        if not paths or any(Path(file).is_relative_to(path) for path in paths)
    }


def marked(names):
    """Return the files that use all of the markers. `full` is ignored, since a conftest may set it
    in any file.
    """
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in files_of_tests()}
    needed = [name for name in names if name != "full"]
    return {
        file
        for file, text in texts.items()
        if all(re.search(rf"mark\.{name}\b", text) for name in needed)
    }


def test_make_test_runs_every_test_once():
    """`make test` runs the first of two sets of cases and `make test-all` runs both. Neither runs a
    case twice.
    """
    first = calls_of("test")
    both = calls_of("test-all")
    assert sorted(first) == ["all threads"]
    assert sorted(both) == ["all threads", "one thread"]
    for target, calls in (("test", first["all threads"]), ("test-all", both["all threads"])):
        for name, marks in SELECTIONS.items():
            taking = [
                paths
                for text, paths in calls
                if Expression.compile(text).evaluate(marks.__contains__)
            ]
            is_wanted = target == "test-all" or not {"full", "cluster"} & set(marks)
            assert len(taking) == int(is_wanted), f"make {target} runs {name} {len(taking)} times"
            for paths in taking:
                assert below(marked(marks), paths) == marked(marks), (
                    f"make {target} leaves out a part of {name}"
                )


@pytest.mark.parametrize("failing", [set(), {"first"}, {"second"}, {"first", "second"}])
def test_make_test_runs_its_second_call_after_a_failure(failing, tmp_path):
    """Both calls run, and make fails if either of them does."""
    calls = {
        name: f"touch {tmp_path}/{name}; {'false' if name in failing else 'true'}"
        for name in ("first", "second")
    }
    made = subprocess.run(
        [
            *("make", "--silent", "--old-file=setup", "test"),
            *(f"SIDE_BY_SIDE={calls['first']}", f"PYTEST={calls['second']}"),
        ],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert {path.name for path in tmp_path.iterdir()} == set(calls)
    assert bool(made.returncode) == bool(failing), made.stderr


def test_thread_dependent_tests_run_again_with_one_thread():
    calls = calls_of("test-all")["one thread"]
    [once_more] = [
        paths for text, paths in calls if Expression.compile(text).evaluate(("full",).__contains__)
    ]
    computing = below(
        files_of_tests(), {f"tests/{room}" for room in ("backends", "kernels", "runners")}
    )
    assert {file for file in computing if takes_all_threads(ROOT / file)} == below(
        computing, once_more
    )


def test_pytest_settings_deselect_nothing():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "pytest"
    ]["ini_options"]
    assert settings["testpaths"] == ["tests"]
    assert not [
        option
        for option in settings["addopts"]
        if option.startswith(("-k", "-m", "--ignore", "--deselect"))
    ]


def cases_of(*axes):
    """Return the cases of a product of parameters, as pytest collects them."""
    return [
        SimpleNamespace(callspec=SimpleNamespace(params=dict(enumerate(values))))
        for values in itertools.product(*axes)
    ]


def test_a_sample_has_every_third_case_and_each_value_of_a_product():
    rows = cases_of(range(9))
    assert sampled(rows, 3) == rows[::3]
    assert sampled(rows, 3, 1) == rows[1::3]
    table = cases_of("abcdef", "xyz")  # the last axis has as many values as the step
    kept = [case.callspec.params for case in sampled(table, 3)]
    assert {values[0] for values in kept} == set("abcdef")
    assert {values[1] for values in kept} == set("xyz")
    assert len(kept) == 8


def test_files_that_start_first_exist():
    assert len(set(LONG)) == len(LONG)
    assert [name for name in LONG if not (ROOT / name).is_file()] == []


@functools.cache
def packages_at_head(path):
    """Return the packages that a test file imports before it runs, also through helpers."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
        for name in names:
            helper = (ROOT / "tests" / name.replace(".", "/")).with_suffix(".py")
            is_helper = name.startswith("helpers.") and helper.is_file()
            found |= packages_at_head(helper) if is_helper else {name.partition(".")[0]}
    return found


def lines_of_list(name):
    """Return the lines of a list for emulated processors that name tests, as (option, file, test)."""
    lines = (ROOT / "tests" / "arm64" / name).read_text(encoding="utf-8").splitlines()
    parts = [line.rpartition("=" if line.startswith("--") else "\0")[::2] for line in lines]
    return [
        (option, ROOT / path.partition("::")[0], path.partition("::")[2].partition("[")[0])
        for option, path in parts
        if path.startswith("tests/")
    ]


@pytest.mark.parametrize("name", ["tests.txt", "i8mm.txt"])
def test_lists_for_emulated_processors_name_existing_tests(name):
    for _, path, test in lines_of_list(name):
        assert path.exists(), path
        assert f"def {test}" in path.read_text("utf-8") if test else True, test


def test_deselected_tests_for_emulated_processors_would_run():
    """The marker expression of the list leaves out tests that are marked full."""
    deselected = [one for one in lines_of_list("tests.txt") if one[0] == "--deselect"]
    assert deselected
    for _, path, test in deselected:
        marked_full = rf"@pytest\.mark\.full\n(@.*\n)*def {test}\("
        assert not re.search(marked_full, path.read_text("utf-8")), test


@pytest.mark.parametrize("name", ["tests.txt", "i8mm.txt"])
def test_tests_for_emulated_processors_import_no_torch(name):
    """PyTorch is not installed there, so a file that imports it at its head ends the collection."""
    lines = lines_of_list(name)
    ignored = {path for option, path, _ in lines if option == "--ignore"}
    files = {
        file
        for option, path, _ in lines
        if not option
        for file in ([path] if path.is_file() else path.rglob("test_*.py"))
    }
    assert len(files) > 5
    for file in sorted(files - ignored):
        assert not {"torch", "transformers"} & packages_at_head(file), file
