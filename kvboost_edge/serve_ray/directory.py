"""Where a Ray of the server's own has its files."""

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
    """A directory for the files of one Ray, removed in the end; what servers that were killed have
    left is removed first. Ray lets everybody into the directory that it is given: it lies in one
    that is the user's alone.

    ConfigError where its path is too long for Ray.
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
    """Of this machine since it was started: others may put theirs into the same directory, on a
    file system that does not tell them of the locks here.
    """
    boot = b""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return f"kvray-{hashlib.sha256(platform.node().encode() + boot).hexdigest()[:6]}"


def _place() -> str:
    """In memory where the system has a place for that with room, else where temporary files are:
    prompts that Ray's store cannot hold are among them.
    """
    with contextlib.suppress(OSError):
        if shutil.disk_usage(MEMORY_PLACE).free >= _MEMORY_BYTES:
            return MEMORY_PLACE
    return tempfile.gettempdir()


def _remove_abandoned() -> None:
    """Directories of this user's servers on this machine that had no time to remove them. Where
    that fails nothing is lost but room.
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
    """What is locked in it goes last: without that nobody would know later that what could not be
    removed may be.
    """
    shutil.rmtree(outer / _INSIDE, ignore_errors=True)
    if not (outer / _INSIDE).exists():
        shutil.rmtree(outer, ignore_errors=True)


def _is_own(path: Path) -> bool:
    """What others put there is not even opened."""
    return sys.platform != "win32" and path.lstat().st_uid == os.getuid() and path.is_dir()
