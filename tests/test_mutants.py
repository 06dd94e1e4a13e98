"""Tests of the mutation gate (`make mutants`): every fault can be planted, and verdicts are right."""

import importlib
import re

import pytest

import mutants
from faults import FAULTS, Fault
from mutants import ROOT, is_of, planted, targets_of, try_all


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_can_be_planted(fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    broken = planted(text, fault)
    assert broken != text
    if fault.file.endswith(".py"):
        compile(broken, fault.file, "exec")
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), test
        if name:
            function = f"def {name.partition('[')[0]}("
            assert function in (ROOT / file).read_text(encoding="utf-8"), test


def test_faults_name_existing_rows_of_the_invariance_table():
    table = (ROOT / "tests" / "engine" / "invariance_pairs.csv").read_text(encoding="utf-8")
    rows = {line.replace(",", " ") for line in table.splitlines()[1:]}
    named = {test for fault in FAULTS for test in fault.tests if "test_invariance.py" in test}
    assert named
    assert {test.partition("[")[2].rstrip("]") for test in named} <= rows


def test_names_of_faults_are_unique_and_short():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 300
    assert [name for name in names if len(name) >= 72] == []


def test_faults_of_every_module_are_planted():
    names = [file.stem for file in (ROOT / "tests" / "faults").glob("*.py")]
    modules = [importlib.import_module(f"faults.{name}") for name in names if name != "__init__"]
    held = [fault for module in modules for fault in getattr(module, "FAULTS", ())]
    assert sorted(fault.name for fault in held) == sorted(fault.name for fault in FAULTS)


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "Makefile"])
def test_documented_number_of_faults_is_about_right(name):
    (documented,) = re.findall(r"about (\d+) faults", (ROOT / name).read_text(encoding="utf-8"))
    assert abs(int(documented) - len(FAULTS)) <= len(FAULTS) // 10


def test_planting_refuses_a_missing_or_ambiguous_text():
    fault = Fault("x", "file", (("a", "b"),), ())
    for text in ("", "aa"):
        with pytest.raises(ValueError, match="not once"):
            planted(text, fault)


def test_a_case_belongs_only_to_tests_that_contain_it():
    case = "tests/a/test_b.py::test_c[d]"
    of = ("tests/a", "tests/a/test_b.py", "tests/a/test_b.py::test_c", case)
    other = ("tests/a/test_b", "tests/a/test_b.py::test_", "tests/b", f"{case[:-2]}e]")
    assert all(is_of(case, test) for test in of)
    assert not any(is_of(case, test) for test in other)


@pytest.fixture
def few_plugins(monkeypatch):
    """Pytest started without most plugins, which takes a fifth of the time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")


def test_targets_of_a_test_follow_its_markers(tmp_path, monkeypatch, few_plugins):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    _write_tests(
        tmp_path,
        "import pytest\n\n"
        "@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.full)])\n"
        "def test_both(n):\n    pass\n\n"
        "@pytest.mark.cluster\ndef test_later():\n    pass\n",
    )
    first = "make test"
    later = "make test-all"
    file = "tests/test_x.py"
    expected = {file: [first, later], f"{file}::test_both[1]": [first]}
    expected |= {f"{file}::test_both[2]": [later], f"{file}::test_later": [later]}
    assert targets_of(expected) == expected
    with pytest.raises(RuntimeError, match="not found"):
        targets_of(["tests/test_x.py::test_gone"])


def test_verdicts_of_faults(tmp_path, few_plugins):
    """A fault is planted in the module that the tests import, and removed afterwards. Tests that
    always fail kill no fault.
    """
    (tmp_path / "kept.py").write_text("good = True\n")
    _write_tests(
        tmp_path,
        "import kept\nimport pytest\n\n"
        "def test_seen():\n    assert kept.good\n\n"
        "def test_blind():\n    pass\n\n"
        "@pytest.mark.full\ndef test_later():\n    assert kept.good\n\n"
        "@pytest.mark.full\ndef test_red():\n    assert False\n\n"
        "@pytest.mark.alone\ndef test_time():\n    assert kept.good\n",
    )
    changed = (("True", "False"),)
    names = ("seen", "blind", "later", "red", "time", "unknown")
    file = "tests/test_x.py"
    faults = [Fault(name, "kept.py", changed, (f"{file}::test_{name}",)) for name in names]
    faults.append(Fault("gone", "kept.py", (("no such text", ""),), (f"{file}::test_seen",)))
    verdicts = {fault.name: verdict for fault, _, verdict in try_all([tmp_path], faults)}
    assert (verdicts["seen"], verdicts["blind"]) == ("killed", "SURVIVED")
    assert verdicts["unknown"].startswith("TESTS DID NOT RUN")
    assert verdicts["gone"].startswith("NOT PLANTED")
    assert verdicts["later"] == "killed by `make test-all` alone"
    assert verdicts["time"] == "killed by cases marked alone"
    assert verdicts["red"].startswith("TESTS DID NOT RUN")
    assert (tmp_path / "kept.py").read_text() == "good = True\n"


def _write_tests(root, text):
    markers = "\n".join(f'    "{name}",' for name in ("alone", "cluster", "full"))
    (root / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\nmarkers = [\n{markers}\n]\n")
    (root / "tests").mkdir()
    (root / "tests" / "test_x.py").write_text(text)
