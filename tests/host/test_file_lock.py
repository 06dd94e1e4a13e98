"""Files that are held open by locks."""

import mmap
import sys
import threading
import time

import pytest

from kvboost_edge.host import file_lock
from kvboost_edge.host.file_lock import hold_open, lock, try_lock
from kvboost_edge.tiers.disk.system_calls import READ, Files

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="files are not locked there")


def is_free(path):
    files = Files()
    handle = files.open(path, READ)
    try:
        return files.lock(handle)
    finally:
        files.close(handle)


def test_a_mapping_locks_its_file_until_closed(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    maps = []
    for _ in range(2):  # at the same time
        with open(path, "rb") as file:
            hold_open(file)
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    assert not is_free(path)
    maps.pop().close()
    assert not is_free(path)
    maps.pop().close()
    assert is_free(path)


def test_a_brief_lock_is_waited_for(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    files = Files()
    handle = files.open(path, READ)
    assert files.lock(handle)
    timer = threading.Timer(0.1, files.close, [handle])
    timer.start()
    begun = time.monotonic()
    with open(path, "rb") as file:
        hold_open(file)
        assert time.monotonic() - begun < 5
        timer.join()
        assert not is_free(path)


def test_a_permanent_lock_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(file_lock, "_LOOK_S", 0.001)
    path = tmp_path / "file"
    path.write_bytes(b"weights")
    files = Files()
    handle = files.open(path, READ)
    assert files.lock(handle)
    with open(path, "rb") as file:
        hold_open(file)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    files.unlink(path)
    files.close(handle)
    assert mapped[:] == b"weights"
    mapped.close()


def test_an_exclusive_lock_keeps_the_file_position(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"contents")
    with open(path, "r+b", buffering=0) as first, open(path, "r+b", buffering=0) as second:
        first.seek(3)
        assert try_lock(first.fileno())
        assert first.tell() == 3
        assert not try_lock(second.fileno())
        timer = threading.Timer(0.05, first.close)
        timer.start()
        lock(second.fileno())
        timer.join()
        with open(path, "rb") as third:
            assert not try_lock(third.fileno())
            assert third.read() == b"contents"
