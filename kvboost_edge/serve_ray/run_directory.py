"""The directory for the files of a Ray instance that the server starts."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvboost_edge.errors import ConfigError
from kvboost_edge.host.atomic_files import is_abandoned, open_unfinished
from kvboost_edge.serve_ray.machine import machine_id
from kvboost_edge.server.logs import log_facts

__all__ = ["MEMORY_PLACE", "STORE_BYTES", "ray_directory"]

STORE_BYTES = 80 << 20  # Ray's minimum; answers are small
MEMORY_PLACE = "/dev/shm"
# For Ray's object store, spilled objects and logs.
_MEMORY_BYTES = 4 * STORE_BYTES
_RANDOM = 8  # characters appended by `mkdtemp`
_INSIDE = "r"
_MOST_SOCKET_PATH = 107  # characters of a Unix socket's path
_SESSION_PATH = 70  # characters that Ray appends for its sockets


@contextlib.contextmanager
def ray_directory() -> Iterator[str]:
    """Create a directory for the files of one Ray instance, and remove it at the end.

    Directories of killed servers are removed first. Raises ConfigError if the path is too long for
    Ray's sockets.
    """
    _remove_abandoned()
    # Ray makes its directory accessible to all users, so a directory of this user encloses it.
    outer = Path(tempfile.mkdtemp(prefix=_prefix(), dir=_place()))
    try:
        with open_unfinished(outer):  # The lock keeps other servers from removing it.
            inner = outer / _INSIDE
            if len(str(inner)) + _SESSION_PATH > _MOST_SOCKET_PATH:
                most = _MOST_SOCKET_PATH - _SESSION_PATH - len(f"/{_prefix()}/{_INSIDE}") - _RANDOM
                raise ConfigError(
                    f"the path of the temporary directory, {tempfile.gettempdir()!r}, is too "
                    f"long for Ray's sockets (at most {most} characters); set TMPDIR to a "
                    "shorter path"
                )
            inner.mkdir()
            yield str(inner)
    finally:
        _remove(outer)


def _prefix() -> str:
    """Return the prefix of directory names, which depends on the machine and its last boot."""
    # Machines may share a file system that does not share locks.
    return f"kvray-{machine_id()[:6]}"


def _place() -> str:
    """Return the parent directory: in memory if there is space, else for temporary files."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(MEMORY_PLACE).free >= _MEMORY_BYTES:
            return MEMORY_PLACE
    return tempfile.gettempdir()


def _remove_abandoned() -> None:
    """Remove directories of this user's killed servers on this machine."""
    for place in (MEMORY_PLACE, tempfile.gettempdir()):
        for path in Path(place).glob(f"{_prefix()}*"):
            with contextlib.suppress(OSError):
                if _is_own(path) and is_abandoned(path):
                    log_facts(
                        logging.INFO,
                        "removing files of a killed server",
                        path=str(path),
                    )
                    _remove(path)


def _remove(outer: Path) -> None:
    """Remove a directory. Its locked file is removed last.

    Without that file, later servers could not tell that the directory is abandoned.
    """
    shutil.rmtree(outer / _INSIDE, ignore_errors=True)
    if not (outer / _INSIDE).exists():
        shutil.rmtree(outer, ignore_errors=True)


def _is_own(path: Path) -> bool:
    """Return whether a directory belongs to this user. Other users' files are never opened."""
    return sys.platform != "win32" and path.lstat().st_uid == os.getuid() and path.is_dir()
