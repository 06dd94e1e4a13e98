"""Memory of the machine and of this process, in bytes; a container's limit counts as the
machine's.
"""

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
    "Slack",
    "available_bytes",
    "give_back",
    "process_peak",
    "process_rss",
    "resident_bytes",
    "set_own_limit",
    "set_own_share",
    "shared_out",
    "total_bytes",
    "uncollected",
]

_WORTH = 8 << 20  # that a process grew by since the last time, for giving back to be tried again
_MADV_DONTNEED = 4  # Linux
_COMPILER = "libllvmlite"
_ENTRY = 8  # bytes of /proc/self/pagemap for each page; the highest bit: it is in memory
_ENTRIES_BYTES = 1 << 18


class Region(NamedTuple):
    """A run of this process's memory."""

    address: int
    nbytes: int


def available_bytes() -> int:
    """Memory that can be taken now without swapping: the machine's, the cgroup's or this process's
    own limit, whichever is least.
    """
    available = int(psutil.virtual_memory().available)
    group = memory_limit()
    found = available if group is None else min(available, group.free)
    return found if _own_limit is None else min(found, _own_limit)


def total_bytes() -> int:
    """Memory this process could ever have: the machine's or the cgroup's limit, whichever is
    less.
    """
    total = int(psutil.virtual_memory().total)
    group = memory_limit()
    return total if group is None else min(total, group.limit)


_own_limit: int | None = None


def set_own_limit(num_bytes: int | None) -> None:
    """Let `available_bytes` count at most so much as available to this process; None: no limit."""
    global _own_limit  # noqa: PLW0603 - one value of the process
    _own_limit = num_bytes


_own_share = 1.0


def set_own_share(share: float) -> None:
    """Of memory that several processes like this one take at the same time, this one's part, above
    0 and at most 1.
    """
    global _own_share  # noqa: PLW0603 - one value of the process
    if not 0 < share <= 1:
        raise ValueError(f"share={share!r} must be above 0 and at most 1")
    _own_share = share


def shared_out(num_bytes: int) -> int:
    """This process's part of so much memory."""
    return int(num_bytes * _own_share)


def process_rss() -> int:
    """Resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def process_peak() -> int:
    """Largest resident memory of this process so far."""
    if sys.platform == "linux":
        # Not getrusage: its ru_maxrss is inherited from the process that started this one.
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                # The kernel batches its counts, so the mark can lag a little behind what is
                # resident now.
                return max(int(line.split()[1]) * 1024, process_rss())
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def resident_bytes(regions: Iterable[Region]) -> int | None:
    """How much of the regions is resident in this process, in whole pages: mapped files are read
    bit by bit, and pages of an array that nobody has written take no memory. None where the system
    does not tell (all but Linux).

    About 9 ms for each gigabyte that is resident.
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


class Slack:
    """What a process has left over when it comes to rest: given back if it grew since the last
    time.
    """

    def __init__(self) -> None:
        self._last = 0

    def give_back(self) -> None:
        """Give memory back if it grew: some milliseconds, else 20 us.

        A failure to read the memory, such as a lack of file descriptors, puts it off.
        """
        with contextlib.suppress(OSError):
            if process_rss() > self._last + _WORTH:
                give_back()
                self._last = process_rss()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Python's search for garbage rests inside, where many objects are made that stay: it would
    look at all there are again and again, which was 40% of making 50,000.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def give_back() -> None:
    """Return to the system what loading and compiling have left: free pages of the heap, which
    glibc keeps, and the code of the compiler, some 70 MB of pages of a file that come back by
    themselves where they are wanted again. Does nothing but on Linux.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # musl has none and keeps less
        library.malloc_trim(ctypes.c_size_t(0))
    if hasattr(library, "madvise"):
        for region in _unwritten_code(_COMPILER):
            library.madvise(
                ctypes.c_void_p(region.address), ctypes.c_size_t(region.nbytes), _MADV_DONTNEED
            )


def _unwritten_code(name: str) -> list[Region]:
    """Mappings of a library that nothing can write and of which no page differs from the file."""
    found = []
    region = None
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, rest = line.partition(" ")
        if "-" in key and not key.endswith(":"):
            start, end = (int(number, 16) for number in key.split("-"))
            fixed = "w" not in rest.split(" ", 1)[0] and name in line
            region = Region(start, end - start) if fixed else None
        elif region is not None and key == "Anonymous:" and rest.split()[0] == "0":
            found.append(region)
    return found
