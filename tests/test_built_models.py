"""Tests of shared model directories: each is built once, and every test gets its own copy."""

import pytest

from helpers.models.built import copy_of


def test_a_copy_may_be_changed_and_the_next_one_is_as_built(tmp_path):
    made = []

    def make(folder):
        made.append(folder)
        (folder / "config.json").write_text("{}")

    for name in ("a", "b"):
        copied = copy_of(tmp_path / name, make, "llama", {"layers": 2}, root=tmp_path / "root")
        assert (copied / "config.json").read_text() == "{}"
        (copied / "config.json").write_text("changed")
    assert len(made) == 1
    copy_of(tmp_path / "c", make, "llama", {"layers": 3}, root=tmp_path / "root")
    assert len(made) == 2


def test_a_failed_build_leaves_nothing_to_share(tmp_path):
    def fail(folder):
        (folder / "half").write_text("")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        copy_of(tmp_path / "a", fail, root=tmp_path / "root")
    assert list((tmp_path / "root").glob("*/*")) == []


def test_a_large_model_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("helpers.models.built.LARGEST", 3)
    made = []

    def make(folder):
        made.append(folder)
        (folder / "weights").write_text("four")

    for name in ("a", "b"):
        copied = copy_of(tmp_path / name, make, root=tmp_path / "root")
        assert (copied / "weights").read_text() == "four"
    assert len(made) == 2
    assert list((tmp_path / "root").glob("*/*")) == []
