"""Tests of record files: a crash at any byte, a second process, and a full disk."""

import errno
import json
import os

import pytest

from helpers.clocks import give_clock
from kvboost_edge.errors import RequestError
from kvboost_edge.server.batches import answered_lines
from kvboost_edge.server.batches.answered_lines import RecordFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "answers.jsonl"


def written(path, *names):
    file = RecordFile(path)
    for name in names:
        append(file, name)
    file.close()


def append(file, name):
    record = {"custom_id": name, "text": "ä\n\u2028" * 3}
    file.append(name, json.dumps(record, indent=1, ensure_ascii=False).encode())


def names_of(path):
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


def test_a_crash_at_any_byte_keeps_complete_records(path):
    written(path, "a", "b", "c")
    whole = path.read_bytes()
    ends = [end + 1 for end in range(len(whole)) if whole[end : end + 1] == b"\n"]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = sum(end <= size for end in ends)
        file = RecordFile(path)
        assert file.answered == set("abc"[:kept])
        append(file, "d")
        file.close()
        assert names_of(path) == [*"abc"[:kept], "d"]


@pytest.mark.parametrize("damage", [b"\0" * 100, b'{"custom_id": "x"\0\n', b'\0\0\n{"cust'])
def test_a_damaged_tail_is_truncated(path, damage):
    written(path, "a")
    with open(path, "ab") as file:
        file.write(damage)
    written(path, "b")
    assert names_of(path) == ["a", "b"]


@pytest.mark.parametrize("content", [b"notes\n", b'{"id": 1}\n{"id": 2}\n', b"[]\n"])
def test_other_files_are_refused_and_not_changed(path, content):
    path.write_bytes(content)
    with pytest.raises(RequestError, match=r"line 1 of .* is no answer of a batch"):
        RecordFile(path)
    assert path.read_bytes() == content


def test_a_second_writer_is_refused(path):
    file = RecordFile(path)
    with pytest.raises(RequestError, match="another process writes to"):
        RecordFile(path)
    file.close()
    RecordFile(path).close()


def test_a_full_disk_keeps_complete_records(path, monkeypatch):
    written(path, "a")
    file = RecordFile(path)
    real = file._file

    class Full:
        def write(self, data):
            return real.write(data[:7])

        def __getattr__(self, name):
            return getattr(real, name)

    monkeypatch.setattr(file, "_file", Full())
    with pytest.raises(OSError) as caught:
        append(file, "b")
    assert caught.value.errno == errno.ENOSPC
    assert file.answered == {"a"}
    monkeypatch.setattr(file, "_file", real)
    append(file, "c")
    file.close()
    assert names_of(path) == ["a", "c"]


def test_records_are_synced_once_a_second_and_at_the_end(path, monkeypatch):
    now = [0.0]
    synced = []
    give_clock(monkeypatch, lambda: now[0], answered_lines)
    monkeypatch.setattr(answered_lines.os, "fsync", lambda handle: synced.append(now[0]))
    file = RecordFile(path)
    for number in range(25):
        now[0] = number / 10
        append(file, str(number))
        assert os.stat(path).st_size == file.num_bytes, "a record must be written immediately"
    file.close()
    assert synced == pytest.approx([1.0, 2.0, 2.4])
