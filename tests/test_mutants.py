"""The mutation gate (`make mutants`) itself: its faults can still be planted, and it reports what it should."""

from __future__ import annotations

import re

import pytest

from mutants import FAULTS, ROOT, Fault, copied_tree, planted, try_fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_can_be_planted(fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    broken = planted(text, fault)
    assert broken != text
    if fault.file.endswith(".py"):
        compile(broken, fault.file, "exec")
    assert all((ROOT / test.partition("::")[0]).exists() for test in fault.tests)


def test_there_are_enough_faults_with_names_of_their_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "Makefile"])
def test_what_is_said_of_their_number_is_about_right(name):
    (said,) = re.findall(r"about (\d+) faults", (ROOT / name).read_text(encoding="utf-8"))
    assert abs(int(said) - len(FAULTS)) <= len(FAULTS) // 10


def test_text_that_is_gone_or_ambiguous_is_an_error():
    fault = Fault("x", "file", (("a", "b"),), ())
    for text in ("", "aa"):
        with pytest.raises(ValueError, match="not once"):
            planted(text, fault)


@pytest.mark.slow
def test_a_fault_that_no_test_sees_survives_and_one_that_is_seen_does_not(tmp_path):
    tree = copied_tree(tmp_path)
    changed = (("those to be evicted first", "those to be evicted last"),)
    pool = "kvboost_edge/kvcache/block_pool.py"
    (tree / "tests" / "test_seen.py").write_text(
        "import kvboost_edge.kvcache.block_pool as pool\n\n"
        "def test_text():\n    assert 'evicted first' in pool.BlockPool.take.__doc__\n"
    )
    (tree / "tests" / "test_blind.py").write_text("def test_nothing():\n    pass\n")
    before = (tree / pool).read_text(encoding="utf-8")
    assert try_fault(tree, Fault("seen", pool, changed, ("tests/test_seen.py",))) == "killed"
    assert try_fault(tree, Fault("blind", pool, changed, ("tests/test_blind.py",))) == "SURVIVED"
    assert try_fault(tree, Fault("none", pool, changed, ("tests/no_such.py",))).startswith("TESTS DID NOT RUN")
    assert try_fault(tree, Fault("gone", pool, (("no such text", ""),), ())).startswith("NOT PLANTED")
    assert (tree / pool).read_text(encoding="utf-8") == before
