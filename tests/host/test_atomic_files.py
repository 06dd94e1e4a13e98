"""Unfinished files are removed if their writer was killed, and left alone while it writes."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvboost_edge.host import atomic_files
from kvboost_edge.host.atomic_files import (
    finish_file,
    is_abandoned,
    new_file,
    open_unfinished,
    replace_file,
    synced_meanwhile,
)

_WRITER = """
import sys
from pathlib import Path
from kvboost_edge.host.atomic_files import open_unfinished
file = open_unfinished(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


def _names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_file_gets_its_name_when_complete(tmp_path):
    file = open_unfinished(tmp_path)
    file.write(b"all of it")
    assert [name[:5] for name in _names(tmp_path)] == [".new-"]
    finish_file(file, tmp_path / "done")
    assert _names(tmp_path) == ["done"]
    assert (tmp_path / "done").read_bytes() == b"all of it"
    assert (tmp_path / "done").stat().st_mode & 0o777 == 0o400
    again = open_unfinished(tmp_path)
    again.write(b"more")
    finish_file(again, tmp_path / "done")
    assert (tmp_path / "done").read_bytes() == b"more"


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("part", ["body", "sync"])
def test_a_failed_file_leaves_the_old_one(tmp_path, monkeypatch, failure, part):
    def refuse(*_):
        raise failure

    with new_file(tmp_path / "done") as file:
        file.write(b"first")
    monkeypatch.setattr(os, "fsync", refuse if part == "sync" else lambda _: None)

    def write():
        with new_file(tmp_path / "done") as file:
            file.write(b"second")
            if part == "body":
                refuse()

    with pytest.raises(failure):
        write()
    assert _names(tmp_path) == ["done"]
    assert (tmp_path / "done").read_bytes() == b"first"


def test_files_of_live_writers_are_not_removed(tmp_path):
    command = [sys.executable, "-c", _WRITER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        (theirs,) = tmp_path.iterdir()
        mine = open_unfinished(tmp_path)
        assert theirs.exists()
        writer.kill()
        writer.wait()
    other = open_unfinished(tmp_path)
    assert _names(tmp_path) == sorted(Path(file.name).name for file in (mine, other))
    mine.close()
    other.close()


def test_a_directory_without_live_writers_is_abandoned(tmp_path, monkeypatch):
    assert not is_abandoned(tmp_path)  # no file was begun there
    first = open_unfinished(tmp_path)
    second = open_unfinished(tmp_path)
    assert not is_abandoned(tmp_path)
    first.close()
    assert not is_abandoned(tmp_path)
    second.close()
    assert is_abandoned(tmp_path)
    monkeypatch.setattr(atomic_files, "_lock", lambda handle, wait: None)
    assert not is_abandoned(tmp_path)  # without locks, nothing shows whether the writers live


def test_without_locks_old_files_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_files, "_lock", lambda handle, wait: None)
    for name, age in ((".new-old", 2 * 24 * 3600), (".new-young", 60)):
        (tmp_path / name).write_bytes(b"x")
        when = time.time() - age
        os.utime(tmp_path / name, (when, when))
    open_unfinished(tmp_path).close()
    names = _names(tmp_path)
    assert ".new-young" in names
    assert ".new-old" not in names


def test_a_failed_background_sync_is_raised_at_the_end(tmp_path, monkeypatch):
    """fsync reports a failed write only once, so an error in the thread must not be lost."""
    told = threading.Event()

    def refuse(handle):
        told.set()
        raise OSError(errno.EIO, "the disk failed")

    with open_unfinished(tmp_path) as file:
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="the disk failed"), synced_meanwhile(file):
            assert told.wait(10)
        with pytest.raises(KeyError), synced_meanwhile(file):  # the error inside takes precedence
            raise KeyError
    assert not [thread for thread in threading.enumerate() if thread.name == "kvboost-sync"]


@pytest.mark.parametrize(("platform", "failures"), [("win32", 0), ("win32", 9), ("linux", 0)])
def test_replacing_a_briefly_open_file_is_retried(tmp_path, monkeypatch, platform, failures):
    left = [failures]
    replace = os.replace

    def sometimes(source, target):
        left[0] -= 1
        if left[0] >= 0:
            raise PermissionError(errno.EACCES, "in use")
        replace(source, target)

    monkeypatch.setattr(atomic_files.sys, "platform", platform)
    monkeypatch.setattr(os, "replace", sometimes)
    monkeypatch.setattr(atomic_files, "_REPLACE_WAIT_S", 0.001)
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "old").write_bytes(b"old")
    replace_file(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"new"


@pytest.mark.parametrize(("platform", "tries"), [("win32", 10), ("linux", 1)])
def test_replacing_a_file_that_stays_open_fails(tmp_path, monkeypatch, platform, tries):
    tried = []

    def never(source, target):
        tried.append(target)
        raise PermissionError(errno.EACCES, "in use")

    monkeypatch.setattr(atomic_files.sys, "platform", platform)
    monkeypatch.setattr(os, "replace", never)
    monkeypatch.setattr(atomic_files, "_REPLACE_WAIT_S", 0.001)
    with pytest.raises(PermissionError, match="in use"):
        replace_file(tmp_path / "new", tmp_path / "old")
    assert len(tried) == tries
