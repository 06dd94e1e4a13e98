"""Number and limit of this process's open files and sockets."""

from __future__ import annotations

import contextlib
import sys

import psutil

if sys.platform != "win32":
    import resource

__all__ = ["allow_open_files", "num_open_files"]


def num_open_files() -> int:
    """Return the number of open file descriptors, including sockets."""
    process = psutil.Process()
    return int(process.num_handles() if sys.platform == "win32" else process.num_fds())


def allow_open_files(wanted: int) -> int:
    """Raise the limit of open files to `wanted` if it is lower and the system permits it.

    Returns:
        The number of files that may be open: at least `wanted`, or the limit that applies.
    """
    if sys.platform == "win32":  # Windows does not limit the number of sockets
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS also has a limit in the kernel
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        return allowed
    return soft
