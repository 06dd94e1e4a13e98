"""Resident memory is counted by page, and memory left over from loading is returned to the system."""

import errno
import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvboost_edge.host import memory
from kvboost_edge.host.memory import (
    Region,
    give_back_growth,
    mapped_file,
    paused_garbage_collection,
    process_rss,
    resident_bytes,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")


def _region(array):
    return Region(array.ctypes.data, array.nbytes)


@linux
def test_only_touched_pages_are_resident():
    pages = np.frombuffer(
        mmap.mmap(-1, 64 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
    )
    assert resident_bytes([_region(pages)]) == 0
    for touched in (0, 1, 40):
        pages[touched * mmap.PAGESIZE] = 1
    assert resident_bytes([_region(pages)]) == 3 * mmap.PAGESIZE
    pages[:] = 1
    assert resident_bytes([_region(pages), Region(0, 0)]) == 64 * mmap.PAGESIZE
    assert (
        resident_bytes([_region(pages[: mmap.PAGESIZE + 1]), _region(pages[-10:])])
        == mmap.PAGESIZE + 11
    )


@linux
def test_a_mapped_file_counts_its_read_pages(tmp_path):
    (tmp_path / "file").write_bytes(bytes(1024 * mmap.PAGESIZE))
    with open(tmp_path / "file", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    pages = np.frombuffer(mapped, np.uint8)
    mapped.madvise(mmap.MADV_RANDOM)  # no pages around the one that is read
    before = resident_bytes([_region(pages)])
    assert before is not None
    assert before < pages.nbytes // 2
    assert not pages.any()
    assert resident_bytes([_region(pages)]) == pages.nbytes


@linux
def test_mappings_of_a_file_have_its_identity(tmp_path):
    def mapped(path):
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    for name in "ab":
        (tmp_path / name).write_bytes(bytes(10_000))
    maps = [mapped(tmp_path / name) for name in "aab"]
    addresses = [np.frombuffer(one, np.uint8).ctypes.data for one in maps]
    first, again, other = map(mapped_file, addresses)
    assert first == again == mapped_file(addresses[0] + 9_999) != other
    assert first.endswith(f":{(tmp_path / 'a').stat().st_ino}")
    memory = np.zeros(1 << 24, np.uint8)
    assert mapped_file(memory.ctypes.data) == mapped_file(0) == ""


def test_resident_bytes_are_none_if_unknown(monkeypatch):
    def refuse(*_, **__):
        raise FileNotFoundError("/proc/self/pagemap")

    monkeypatch.setattr("builtins.open", refuse)
    assert resident_bytes([Region(4096, 4096)]) is None


def test_without_proc_files_peak_and_release_still_work(monkeypatch):
    before = memory.process_peak()

    def refuse(*_, **__):
        raise PermissionError("/proc/self/status")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert memory.process_peak() > 0.5 * before > 0
    memory.give_back()


def test_memory_is_released_once_per_growth(monkeypatch):
    resident = [100 << 20]
    calls = []

    def give_back():
        calls.append(resident[0])
        resident[0] -= 30 << 20

    monkeypatch.setattr(memory, "process_rss", lambda: resident[0])
    monkeypatch.setattr(memory, "give_back", give_back)
    monkeypatch.setattr(memory, "_grown_from", 0)
    for _ in range(3):
        give_back_growth()
    assert calls == [100 << 20]
    resident[0] += 7 << 20
    give_back_growth()
    assert len(calls) == 1
    resident[0] += 7 << 20
    give_back_growth()
    give_back_growth()
    assert calls == [100 << 20, 84 << 20]


def test_growth_is_measured_from_the_smallest_size(monkeypatch):
    """An engine's memory that was freed does not hide the growth of the next engine."""
    resident = [900 << 20]
    calls = []
    monkeypatch.setattr(memory, "process_rss", lambda: resident[0])
    monkeypatch.setattr(memory, "give_back", lambda: calls.append(resident[0]))
    monkeypatch.setattr(memory, "_grown_from", 0)
    for size in (900, 300, 307, 320):
        resident[0] = size << 20
        give_back_growth()
    assert calls == [900 << 20, 320 << 20]


def test_running_out_of_descriptors_postpones_the_release(monkeypatch):
    """The engine's thread makes this call, so an error would end the engine."""
    calls = []

    def lacking():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(memory, "give_back", lambda: calls.append(1))
    monkeypatch.setattr(memory, "_grown_from", 0)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "process_rss", lacking)
        give_back_growth()
    assert calls == []
    give_back_growth()
    assert calls == [1]


_GIVE_BACK = """
import numpy as np
from kvboost_edge.host.memory import give_back, process_rss
from kvboost_edge.kernels.linear.weights import pack_rows
weights = np.random.default_rng(0).standard_normal((64, 64), np.float32)
first = pack_rows(weights, "int8").codes
kept = [bytearray(b"x") * 100_000 for _ in range(1000)]
last = kept[-1]
del kept  # the heap ends with `last`, so that all before it stays
before = process_rss()
give_back()
after = process_rss()
assert np.array_equal(pack_rows(weights, "int8").codes, first)
print(before, after)
"""


@linux
@pytest.mark.alone
def test_releasing_compiler_memory_keeps_the_process_working():
    done = subprocess.run(
        [sys.executable, "-c", _GIVE_BACK],
        env={**os.environ, "KVBOOST_EDGE_KERNELS": "none"},  # the compiler must run
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    before, after = (int(number) for number in done.stdout.split())
    assert before - after > 120e6


@linux
def test_only_read_only_pages_are_dropped():
    import llvmlite.binding  # noqa: F401 - the library is mapped now

    regions = memory._unwritten_code("libllvmlite")
    assert sum(region.nbytes for region in regions) > 20e6
    maps = {
        line.split()[0]: line.split() for line in Path("/proc/self/maps").read_text().splitlines()
    }
    for region in regions:
        found = maps[f"{region.address:08x}-{region.address + region.nbytes:08x}"]
        assert "w" not in found[1]
        assert "libllvmlite" in found[-1]
    assert memory._unwritten_code("no library") == []


def test_the_process_is_resident():
    assert 1e6 < process_rss() < memory.total_bytes()


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_collection_is_paused_and_restored(is_on):
    before = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        inside = []
        with pytest.raises(ZeroDivisionError), paused_garbage_collection():
            inside.append(gc.isenabled() / 0)
        with paused_garbage_collection():
            inside.append(gc.isenabled())
        assert inside == [False]
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if before else gc.disable)()


def test_a_process_limit_bounds_available_memory(monkeypatch):
    monkeypatch.setattr(memory, "_own_limit", None)
    machine = memory.available_bytes()
    memory.set_own_limit(1_000_000)
    assert memory.available_bytes() == 1_000_000 < machine
    memory.set_own_limit(1 << 60)
    assert memory.available_bytes() > 1_000_000
