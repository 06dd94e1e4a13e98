"""Memory of the machine and of this process, in bytes; a container's limit counts as the machine's."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from kvboost_edge.host.cgroup import memory_limit

__all__ = ["available_bytes", "process_peak", "process_rss", "total_bytes"]


def available_bytes() -> int:
    """Memory that can be taken now without swapping: the machine's or the cgroup's, whichever is less."""
    available = int(psutil.virtual_memory().available)
    group = memory_limit()
    return available if group is None else min(available, group.free)


def total_bytes() -> int:
    """Memory this process could ever have: the machine's or the cgroup's limit, whichever is less."""
    total = int(psutil.virtual_memory().total)
    group = memory_limit()
    return total if group is None else min(total, group.limit)


def process_rss() -> int:
    """Resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def process_peak() -> int:
    """Largest resident memory of this process so far."""
    if sys.platform == "linux":
        # Not getrusage: its ru_maxrss is inherited from the process that started this one.
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                # The kernel batches its counts, so the mark can lag a little behind what is resident now.
                return max(int(line.split()[1]) * 1024, process_rss())
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
