"""Tests of a tenant's files and batches on disk: limits, expiry, restarts, and names that are not
paths.
"""

import errno
import json
import os

import pytest

from kvboost_edge.errors import ConfigError
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.batches.api_objects import StoredFile
from kvboost_edge.server.batches.batch_store import BatchStore
from kvboost_edge.server.batches.tenant_space import TenantSpace
from kvboost_edge.server.settings import ServerSettings

HOUR = 3600
KEYS = ("key-one", "key-two")


class Clock:
    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def opened(tmp_path, clock):
    """Function `opened(**settings)` that opens the tenant's folder like a new process."""
    return lambda **settings: TenantSpace(
        tmp_path / "space", ServerSettings(**settings), clock=clock
    )


def put(space, content=b"x", name="in.jsonl", seconds=HOUR):
    upload = space.upload()
    try:
        upload.write(content)
        return upload.finish(name, seconds)
    finally:
        upload.close()


def new_batch(space, file, seconds=HOUR):
    return space.create_batch(file.id, "/v1/completions", "1h", seconds, HOUR, {"a": "b"})


def paths(tmp_path):
    return {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}


def test_files_and_batches_survive_a_restart(opened):
    space = opened()
    file = put(space, b"one", "ä/../b.jsonl")
    batch = new_batch(space, file)
    again = opened()
    assert again.file(file.id) == file
    assert again.path_of(file).read_bytes() == b"one"
    assert again.batch(batch.id) == batch
    assert again.num_bytes == 3


def test_files_and_batches_of_a_newer_version_are_kept_for_it(opened, tmp_path):
    """A downgraded server hides them; an upgraded one finds them unchanged."""
    space = opened()
    file = put(space, b"one")
    batch = new_batch(space, file)
    records = [
        *(tmp_path / "space" / "files").glob("*.json"),
        *(tmp_path / "space" / "batches").glob("*/batch.json"),
    ]
    before = {path: path.read_bytes() for path in records}
    for path, data in before.items():
        path.write_text(json.dumps({**json.loads(data), "a_newer_field": 1}))
    older = opened()
    assert (older.files(), older.batches()) == ([], [])
    older.expire()
    assert put(older, b"two").num_bytes == 3
    for path, data in before.items():
        path.write_bytes(data)
    newer = opened()
    assert newer.path_of(newer.file(file.id)).read_bytes() == b"one"
    assert newer.batch(batch.id) == batch
    assert len(newer.files()) == 2


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "a\0b", "..", "", "x" * 999, "con", "a\nb\x1b[31m"]
)
def test_file_names_are_metadata_only(opened, tmp_path, name):
    space = opened()
    before = paths(tmp_path)
    file = put(space, name=name)
    assert paths(tmp_path) - before == {
        f"space/files/{file.id}{end}" for end in (".json", ".jsonl")
    }
    assert file.filename.isprintable()
    assert len(file.filename) <= 255
    for call in (space.file, space.delete_file, space.batch):
        with pytest.raises(ApiError) as caught:
            call(name if name else f"../files/{file.id}")
        assert caught.value.status_code == 404
    assert opened().file(file.id) == file


def test_an_aborted_upload_leaves_nothing(opened, tmp_path):
    space = opened()
    before = paths(tmp_path)
    upload = space.upload()
    upload.write(b"part")
    assert space.num_bytes == 4
    upload.close()
    assert space.num_bytes == 0
    assert paths(tmp_path) == before
    assert len(opened().files()) == 0


def test_an_upload_whose_description_cannot_be_written_leaves_nothing(
    opened, tmp_path, monkeypatch
):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "the disk is full")

    space = opened()
    before = paths(tmp_path)
    monkeypatch.setattr("kvboost_edge.server.batches.tenant_space._write_json", refuse)
    with pytest.raises(OSError, match="the disk is full"):
        put(space)
    assert paths(tmp_path) == before
    assert (space.files(), space.num_bytes) == ([], 0)


def test_a_batch_that_cannot_be_written_keeps_its_last_state(opened, tmp_path, monkeypatch):
    def refuse(handle):
        raise OSError(errno.ENOSPC, "the disk is full")

    space = opened()
    batch = new_batch(space, put(space))
    before = paths(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse)
    batch.status = "in_progress"
    with pytest.raises(OSError, match="the disk is full"):
        space.save(batch)
    assert paths(tmp_path) == before
    assert opened().batch(batch.id).status != "in_progress"


def test_number_and_size_of_files_are_limited(opened):
    space = opened(max_files=2, max_file_bytes=2000)
    put(space, b"a" * 1000)
    second = put(space, b"a" * 500)
    with pytest.raises(ApiError, match=r"2 files are stored, .*--max-files") as caught:
        space.upload()
    assert (caught.value.status_code, caught.value.code) == (400, "file_limit")
    space.delete_file(second.id)
    upload = space.upload()
    upload.write(b"a" * 900)
    with pytest.raises(ApiError, match=r"more than 2000 bytes \(--max-file-bytes\)") as caught:
        upload.write(b"a" * 101)
    assert (caught.value.status_code, caught.value.code) == (413, "file_bytes_limit")
    with pytest.raises(ApiError, match="2 files") as caught:
        put(space, b"a"), put(space, b"a")
    upload.close()


def test_number_of_batches_is_limited(opened):
    space = opened(max_batches=2)
    file = put(space)
    first, _ = new_batch(space, file), new_batch(space, file)
    with pytest.raises(ApiError, match="2 batches are unfinished, and the limit is 2") as caught:
        new_batch(space, file)
    assert (caught.value.status_code, caught.value.code) == (400, "batch_limit")
    first.end("completed", space.now())
    new_batch(space, file)


def test_a_file_in_use_is_not_deleted(opened, clock):
    space = opened()
    file = put(space, seconds=HOUR)
    batch = new_batch(space, file, 10 * HOUR)
    with pytest.raises(ApiError, match="reads the file") as caught:
        space.delete_file(file.id)
    assert caught.value.status_code == 409
    clock.now += 2 * HOUR
    space.expire()
    assert space.input_path(batch).exists()
    with pytest.raises(ApiError, match="there is no file"):
        space.file(file.id)
    batch.end("cancelled", space.now())
    space.expire()
    assert space.input_path(batch) is None


def test_files_and_batches_expire(opened, clock, tmp_path):
    space = opened(batch_retention=HOUR)
    empty = paths(tmp_path)
    file = put(space, seconds=HOUR)
    batch = new_batch(space, file)
    batch.end("completed", space.now())
    space.save(batch)
    clock.now += HOUR - 1
    space.expire()
    assert space.batch(batch.id)
    assert space.file(file.id)
    clock.now += 1
    space.expire()
    assert paths(tmp_path) == empty
    assert (space.files(), space.batches()) == ([], [])


def test_finished_batches_are_bounded(opened, monkeypatch):
    monkeypatch.setattr("kvboost_edge.server.batches.tenant_space._MAX_FINISHED", 2)
    space = opened()
    file = put(space)
    made = []
    for _ in range(5):
        made.append(new_batch(space, file))
        made[-1].end("completed", space.now())
    assert len(space.batches()) == 3
    assert len(opened().batches()) == 3


@pytest.mark.parametrize("crash", ["before", "between", "after"])
def test_answers_become_files_once_after_a_crash(opened, crash, monkeypatch):
    space = opened()
    batch = new_batch(space, put(space))
    (space.batch_directory(batch) / "answers.jsonl").write_bytes(b"answers")
    (space.batch_directory(batch) / "errors.jsonl").write_bytes(b"")
    batch.outcome = "completed"
    space.save(batch)
    if crash == "between":
        monkeypatch.setattr(TenantSpace, "_keep", lambda *_: (_ for _ in ()).throw(OSError()))
        with pytest.raises(OSError):
            space.publish(batch)
        monkeypatch.undo()
    elif crash == "after":
        space.publish(batch)
    again = opened()
    batch = again.batch(batch.id)
    again.publish(batch)
    again.publish(batch)
    assert batch.error_file_id is None, "a batch without errors must not have an error file"
    output = again.file(batch.output_file_id)
    assert again.path_of(output).read_bytes() == b"answers"
    assert output.purpose == "batch_output"
    assert len(again.files()) == 2


def test_damaged_and_foreign_entries_are_ignored(opened, tmp_path):
    space = opened()
    file = put(space)
    folder = tmp_path / "space" / "files"
    (folder / "notes.json").write_text("{}")
    (folder / f"file-{'0' * 32}.json").write_text("{")
    (folder / f"file-{'1' * 32}.json").write_text(json.dumps({"id": "file-x"}))
    (folder / f"file-{'2' * 32}.jsonl").write_text("no description")
    (tmp_path / "space" / "batches" / f"batch_{'0' * 32}").mkdir()
    again = opened()
    assert again.files() == [file]
    assert again.batches() == []
    assert not (folder / f"file-{'2' * 32}.jsonl").exists()
    assert (folder / "notes.json").exists()
    assert isinstance(again.files()[0], StoredFile)


def test_a_folder_is_locked_by_one_server(tmp_path):
    store = BatchStore(tmp_path, ServerSettings())
    with pytest.raises(ConfigError, match="in use by another server"):
        BatchStore(tmp_path, ServerSettings())
    store.close()
    BatchStore(tmp_path, ServerSettings()).close()


def test_an_unusable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"batch_dir=.* cannot be used: "):
        BatchStore(tmp_path / "file", ServerSettings())
    with pytest.raises(ConfigError, match="batch_dir='' is empty"):
        ServerSettings(batch_dir="")


def test_tenants_have_separate_folders(tmp_path):
    settings = ServerSettings(api_keys=KEYS)
    store = BatchStore(tmp_path, settings)
    spaces = list(store)
    file = put(spaces[0])
    with pytest.raises(ApiError, match="there is no file"):
        spaces[1].file(file.id)
    store.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == 3
    assert not any(tenant in name for tenant in settings.tenant_weights for name in names)
    assert oct(os.stat(tmp_path / sorted(names)[0]).st_mode & 0o777) == "0o700"
    # The files of a removed key stay until they expire.
    BatchStore(tmp_path, ServerSettings(api_keys=KEYS[1:])).close()
    store = BatchStore(tmp_path, settings)
    assert next(iter(store)).file(file.id) == file
    store.close()
