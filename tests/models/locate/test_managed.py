"""The store of pulled models: shared files, links, damaged records, and limits."""

import errno
import json
import os
import time

import pytest

from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.models.locate import locate_model
from kvboost_edge.models.locate import managed as store_module
from kvboost_edge.models.locate.managed import ManagedModel, managed_models

FOLDER = "0" * 32


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    return managed_models()


def put(store, name, **fields):
    store.made("files", FOLDER)
    store.inside_files(FOLDER, "a.gguf").write_bytes(b"GGUF")
    model = ManagedModel(name=name, origin=name, folder=FOLDER, file="a.gguf", **fields)
    store.put(model)
    return model


def test_shared_files_are_kept_until_unused(store):
    first = put(store, "a")
    second = put(store, "b")
    assert [one.name for one in store.models()] == ["a", "b"]
    store.remove("a")
    assert store.find("a") is None
    assert store.path_of(second).read_bytes() == b"GGUF"
    store.remove("b")
    assert not (store.root / "files" / FOLDER).exists()
    with pytest.raises(ModelFormatError, match=r"missing from the model directory; pull a again"):
        store.path_of(first)
    with pytest.raises(ConfigError, match=r"'b' was not pulled or created here; .* no models"):
        store.remove("b")


def test_a_model_with_defaults_is_for_servers_only(store):
    put(store, "helper", system="Be brief.")
    with pytest.raises(ModelFormatError, match="which only a server applies"):
        locate_model("helper")


def test_links_are_refused(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.gguf").write_bytes(b"GGUF")
    put(store, "a")
    folder = store.root / "files" / FOLDER
    (folder / "a.gguf").unlink()
    folder.rmdir()
    folder.symlink_to(outside)
    for work in (
        lambda: store.path_of(store.find("a")),
        lambda: store.made("files", FOLDER),
        lambda: store.remove("a"),
    ):
        with pytest.raises(ModelFormatError, match="is a symbolic link"):
            work()
    assert (outside / "a.gguf").exists()
    folder.unlink()
    (record,) = (store.root / "records").glob("*.json")
    moved = outside / "record.json"
    record.rename(moved)
    record.symlink_to(moved)
    with pytest.raises(ModelFormatError, match="is a symbolic link"):
        store.find("a")
    assert moved.exists()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"name": 1, "origin": "x"}', '{"name": "a"}', '{"other": 1}']
)
def test_damaged_records_are_ignored(store, text, caplog):
    put(store, "a")
    path = store.made("records") / f"{'f' * 32}.json"
    path.write_text(text)
    assert [one.name for one in store.models()] == ["a"]
    assert "not a valid record" in caplog.text


@pytest.mark.parametrize(("folder", "file"), [("..", ""), (FOLDER, "../../x"), (FOLDER, "/x")])
def test_a_record_cannot_point_elsewhere(store, folder, file):
    model = put(store, "a")
    (path,) = (store.root / "records").glob("*.json")
    path.chmod(0o600)
    path.write_text(json.dumps({**json.loads(path.read_text()), "folder": folder, "file": file}))
    with pytest.raises(ModelFormatError):
        store.path_of(store.find(model.name))


def test_the_number_of_models_is_limited(store, monkeypatch):
    monkeypatch.setattr(store_module, "_MAX_MODELS", 2)
    put(store, "a")
    put(store, "b")
    put(store, "b")
    with pytest.raises(ConfigError, match="2 models are stored, which is the limit"):
        put(store, "c")


def test_a_record_that_cannot_be_written_leaves_nothing(store, monkeypatch):
    def refuse(handle):
        raise OSError(errno.ENOSPC, "the disk is full")

    before = put(store, "a")
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ModelFormatError, match=r"cannot be changed: the disk is full"):
        put(store, "b")
    assert store.models() == [before]
    assert len(list((store.root / "records").iterdir())) == 1


def test_unfinished_pulls_are_removed_after_a_week(store):
    old, new = ("1" * 32, "2" * 32)
    for name in (old, new):
        store.made("files", name)
    week = time.time() - 8 * 86_400
    os.utime(store.root / "files" / old, (week, week))
    put(store, "a")
    assert {path.name for path in (store.root / "files").iterdir()} == {FOLDER, new}


def test_files_of_newer_record_versions_are_kept(store):
    """After a downgrade the model is not listed, but none of its files is deleted."""
    put(store, "a")
    (path,) = (store.root / "records").glob("*.json")
    record = path.read_text()
    path.chmod(0o600)
    path.write_text(json.dumps({**json.loads(record), "a_newer_field": 1}))
    week = time.time() - 8 * 86_400
    os.utime(store.root / "files" / FOLDER, (week, week))
    store.put(ManagedModel(name="b", origin="b", folder=FOLDER, file="a.gguf"))
    assert [one.name for one in store.models()] == ["b"]
    store.remove("b")
    path.write_text(record)
    assert store.path_of(store.find("a")).read_bytes() == b"GGUF"
