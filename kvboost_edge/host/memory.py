"""Memory of this process, and of the machine or container, in bytes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from kvboost_edge.host.cgroup import memory_limit

__all__ = [
    "Region",
    "available_bytes",
    "give_back",
    "give_back_growth",
    "mapped_file",
    "paused_garbage_collection",
    "process_peak",
    "process_rss",
    "resident_bytes",
    "set_own_limit",
    "set_own_share",
    "shared_out",
    "total_bytes",
]

_WORTH = 8 << 20  # growth of the process after which memory is returned to the system again
_MADV_DONTNEED = 4  # Linux
_COMPILER = "libllvmlite"
_ENTRY = 8  # bytes per page in /proc/self/pagemap; the highest bit is set if the page is in memory
_ENTRIES_BYTES = 1 << 18


class Region(NamedTuple):
    """A contiguous region of this process's memory, in bytes."""

    address: int
    nbytes: int


def available_bytes() -> int:
    """Return the memory that can be allocated without swapping.

    The result is the minimum of the machine's available memory, the cgroup's and the limit from
    `set_own_limit`.
    """
    available = int(psutil.virtual_memory().available)
    group = memory_limit()
    found = available if group is None else min(available, group.free)
    return found if _own_limit is None else min(found, _own_limit)


def total_bytes() -> int:
    """Return the memory of the machine, or the cgroup's limit if that is smaller."""
    total = int(psutil.virtual_memory().total)
    group = memory_limit()
    return total if group is None else min(total, group.limit)


_own_limit: int | None = None


def set_own_limit(num_bytes: int | None) -> None:
    """Limit the result of `available_bytes` in this process; None removes the limit."""
    global _own_limit  # noqa: PLW0603 - one value of the process
    _own_limit = num_bytes


_own_share = 1.0


def set_own_share(share: float) -> None:
    """Set this process's share, in (0, 1], of memory that several processes divide."""
    global _own_share  # noqa: PLW0603 - one value of the process
    if not 0 < share <= 1:
        raise ValueError(f"share={share!r} must be above 0 and at most 1")
    _own_share = share


def shared_out(num_bytes: int) -> int:
    """Return this process's share of `num_bytes`."""
    return int(num_bytes * _own_share)


def process_rss() -> int:
    """Return the resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def process_peak() -> int:
    """Return the largest resident memory of this process so far."""
    if sys.platform == "linux":
        # Getrusage is the second choice, because ru_maxrss is inherited from the parent process.
        for line in _lines_of("/proc/self/status"):
            if line.startswith("VmHWM:"):
                # The kernel updates its counters in batches, so the peak may lag behind the current
                # value.
                return max(int(line.split()[1]) * 1024, process_rss())
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(int(peak if sys.platform == "darwin" else peak * 1024), process_rss())


def resident_bytes(regions: Iterable[Region]) -> int | None:
    """Return the resident bytes of the regions in whole pages, or None on systems other than Linux.

    Takes about 9 ms per resident gigabyte.
    """
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            return sum(_resident(file.fileno(), region) for region in regions if region.nbytes)
    except OSError:
        return None


def _resident(pages: int, region: Region) -> int:
    first = region.address // mmap.PAGESIZE
    last = -(-(region.address + region.nbytes) // mmap.PAGESIZE)
    at = _ENTRY * first
    end = _ENTRY * last
    found = 0
    while at < end:
        entries = os.pread(pages, min(end - at, _ENTRIES_BYTES), at)
        if not entries:
            raise OSError("the region lies outside the process's memory")
        found += int(np.count_nonzero(np.frombuffer(entries, dtype=np.int64) < 0))
        at += len(entries)
    return min(found * mmap.PAGESIZE, region.nbytes)


_grown_from = 0  # resident memory after the last return to the system, or the smallest since then


def give_back_growth() -> None:
    """Return unused memory to the system if the process has grown since this was last done.

    Takes a few milliseconds if it has, otherwise 20 us. If the process's memory cannot be read, for
    example for lack of file descriptors, the next call tries again.
    """
    global _grown_from  # noqa: PLW0603 - one value of the process, whose engines share its memory
    with contextlib.suppress(OSError):
        resident = process_rss()
        if resident > _grown_from + _WORTH:
            give_back()
            resident = process_rss()
        else:
            resident = min(resident, _grown_from)
        _grown_from = resident


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Disable garbage collection while the body creates many permanent objects."""
    # The collector would scan all objects repeatedly, which takes 40% of the time to create 50,000.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def give_back() -> None:
    """Return memory to the system that loading and compiling no longer need. Linux only.

    This includes free heap pages that glibc keeps, and about 70 MB of the compiler's code. The code
    is read from its file again when it is needed.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # musl lacks this function, and keeps less memory
        library.malloc_trim(ctypes.c_size_t(0))
    if hasattr(library, "madvise"):
        for region in _unwritten_code(_COMPILER):
            library.madvise(
                ctypes.c_void_p(region.address), ctypes.c_size_t(region.nbytes), _MADV_DONTNEED
            )


def mapped_file(address: int) -> str:
    """Return an identity of the file whose mapping contains an address.

    Processes of a machine that map the same file share its pages in memory. The identity is "" if
    the address belongs to no file, or the system does not tell.
    """
    for line in _lines_of("/proc/self/maps"):
        bounds, _, _, device, inode = line.split(None, 5)[:5]
        start, end = (int(number, 16) for number in bounds.split("-"))
        if start <= address < end:
            return "" if inode == "0" else f"{device}:{inode}"
    return ""


def _unwritten_code(name: str) -> list[Region]:
    """Return the read-only mappings of a library whose pages all equal the file's pages."""
    found = []
    region = None
    for line in _lines_of("/proc/self/smaps"):
        key, _, rest = line.partition(" ")
        if "-" in key and not key.endswith(":"):
            start, end = (int(number, 16) for number in key.split("-"))
            fixed = "w" not in rest.split(" ", 1)[0] and name in line
            region = Region(start, end - start) if fixed else None
        elif region is not None and key == "Anonymous:" and rest.split()[0] == "0":
            found.append(region)
    return found


def _lines_of(path: str) -> list[str]:
    """Return the lines of a file of the kernel; none if it cannot be read, as in some sandboxes."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
