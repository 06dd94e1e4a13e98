"""Reads and writes at positions of a file from several threads, with and without the system's own
calls.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvboost_edge.host.file_at import FileAt

_PART = 1000


@pytest.fixture(params=["pwrite", "turns"])
def system(request, monkeypatch):
    if request.param == "turns":  # a system that lacks both calls
        monkeypatch.delattr(os, "pwrite", raising=False)
        monkeypatch.delattr(os, "preadv", raising=False)


@pytest.mark.usefixtures("system")
def test_threads_write_and_read_at_their_own_offsets(tmp_path):
    parts = [os.urandom(_PART) for _ in range(64)]
    with open(tmp_path / "file", "w+b", buffering=0) as file, ThreadPoolExecutor(4) as pool:
        target = FileAt(file)
        list(
            pool.map(
                lambda at: target.write(memoryview(parts[at]), at * _PART),
                reversed(range(len(parts))),
            )
        )

        def read(at):
            view = memoryview(bytearray(_PART))
            assert target.read_into(view, at * _PART) == _PART
            return bytes(view)

        assert list(pool.map(read, range(len(parts)))) == parts
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


@pytest.mark.usefixtures("system")
def test_reads_are_short_only_at_the_end_of_the_file(tmp_path):
    (tmp_path / "file").write_bytes(b"abcdef")
    with open(tmp_path / "file", "rb") as file:
        view = memoryview(bytearray(4))
        assert FileAt(file).read_into(view, 4) == 2
        assert bytes(view[:2]) == b"ef"
        assert FileAt(file).read_into(view, 6) == 0


def test_short_reads_and_writes_are_continued(tmp_path, monkeypatch):
    """A signal or a nearly full disk cuts a call short."""
    write = os.pwrite
    read = os.preadv
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: write(handle, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda handle, views, at: read(handle, [views[0][:5]], at))
    data = os.urandom(100)
    with open(tmp_path / "file", "w+b", buffering=0) as file:
        FileAt(file).write(memoryview(data), 20)
        view = memoryview(bytearray(100))
        assert FileAt(file).read_into(view, 20) == 100
    assert bytes(view) == data
