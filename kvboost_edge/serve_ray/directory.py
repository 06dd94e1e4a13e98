"""Directory for the files of the server's own Ray."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvboost_edge.errors import ConfigError
from kvboost_edge.host.atomic_files import is_abandoned, open_unfinished
from kvboost_edge.server.logs import log_facts

__all__ = ["MEMORY_PLACE", "STORE_BYTES", "ray_directory"]

STORE_BYTES = 80 << 20  # answers are small: what Ray needs at least
MEMORY_PLACE = "/dev/shm"
_MEMORY_BYTES = (
    4 * STORE_BYTES
)  # free there: for Ray's store, what does not fit into that, and logs
_RANDOM = 8  # characters that `mkdtemp` puts behind it
_INSIDE = "r"
_MOST_SOCKET_PATH = 107  # of a Unix socket; Ray's lie below its directory
_SESSION_PATH = 70  # what Ray puts behind it


@contextlib.contextmanager
def ray_directory() -> Iterator[str]:
    """Provide a directory for the files of one Ray, and remove it in the end.

    Directories of killed servers are removed first. Ray opens its directory to every user, so it is
    inside one that only its user may enter. Raises ConfigError if its path is too long for Ray.
    """
    _remove_abandoned()
    outer = Path(tempfile.mkdtemp(prefix=_prefix(), dir=_place()))
    try:
        with open_unfinished(
            outer
        ):  # as long as it is open, somebody lives who will remove all this
            inner = outer / _INSIDE
            if len(str(inner)) + _SESSION_PATH > _MOST_SOCKET_PATH:
                most = _MOST_SOCKET_PATH - _SESSION_PATH - len(f"/{_prefix()}/{_INSIDE}") - _RANDOM
                raise ConfigError(
                    f"the directory for temporary files, {tempfile.gettempdir()!r}, has too long a "
                    f"path for Ray's sockets: at most {most} characters; set TMPDIR"
                )
            inner.mkdir()
            yield str(inner)
    finally:
        _remove(outer)


def _prefix() -> str:
    """Return the prefix of directory names for this machine since its start.

    Other machines may use the same directory, on a file system that does not show them the locks
    here.
    """
    boot = b""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return f"kvray-{hashlib.sha256(platform.node().encode() + boot).hexdigest()[:6]}"


def _place() -> str:
    """Choose the parent directory: in memory if the system has one with enough space, otherwise
    that for temporary files.

    Prompts that exceed Ray's object store are among the files.
    """
    with contextlib.suppress(OSError):
        if shutil.disk_usage(MEMORY_PLACE).free >= _MEMORY_BYTES:
            return MEMORY_PLACE
    return tempfile.gettempdir()


def _remove_abandoned() -> None:
    """Remove directories of this user's killed servers on this machine. A failure costs only disk
    space.
    """
    for place in (MEMORY_PLACE, tempfile.gettempdir()):
        for path in Path(place).glob(f"{_prefix()}*"):
            with contextlib.suppress(OSError):
                if _is_own(path) and is_abandoned(path):
                    log_facts(
                        logging.INFO,
                        "files of a server that was killed are removed",
                        path=str(path),
                    )
                    _remove(path)


def _remove(outer: Path) -> None:
    """Remove a directory, its locked file last: without the lock, a later server could not tell
    that the rest may be removed.
    """
    shutil.rmtree(outer / _INSIDE, ignore_errors=True)
    if not (outer / _INSIDE).exists():
        shutil.rmtree(outer, ignore_errors=True)


def _is_own(path: Path) -> bool:
    """Tell whether a path belongs to this user. Files of others are not even opened."""
    return sys.platform != "win32" and path.lstat().st_uid == os.getuid() and path.is_dir()
