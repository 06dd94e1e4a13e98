"""Where a Ray of the server's own has its files."""

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
from kvboost_edge.host.unfinished import is_abandoned, open_unfinished
from kvboost_edge.server.logs import log_facts

__all__ = ["MEMORY_PLACE", "STORE_BYTES", "ray_directory"]

STORE_BYTES = 80 << 20  # answers are small: what Ray needs at least
MEMORY_PLACE = "/dev/shm"
_MEMORY_BYTES = 4 * STORE_BYTES  # free there: for Ray's store, what does not fit into that, and logs
_PREFIX = "kvboost-ray-"
_RANDOM = 8  # characters that `mkdtemp` puts behind it
_INSIDE = "r"
_MOST_SOCKET_PATH = 107  # of a Unix socket; Ray's lie below its directory
_SESSION_PATH = 70  # what Ray puts behind it


@contextlib.contextmanager
def ray_directory() -> Iterator[str]:
    """A directory for the files of one Ray, removed in the end; what servers that were killed have left is removed
    first. Ray lets everybody into the directory that it is given: it lies in one that is the user's alone.

    ConfigError where its path is too long for Ray."""
    _remove_abandoned()
    outer = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_place()))
    try:
        with open_unfinished(outer):  # as long as it is open, somebody lives who will remove all this
            inner = outer / _INSIDE
            if len(str(inner)) + _SESSION_PATH > _MOST_SOCKET_PATH:
                most = _MOST_SOCKET_PATH - _SESSION_PATH - len(f"/{_PREFIX}/{_INSIDE}") - _RANDOM
                raise ConfigError(
                    f"the directory for temporary files, {tempfile.gettempdir()!r}, has too long a path for Ray's "
                    f"sockets: at most {most} characters; set TMPDIR"
                )
            inner.mkdir()
            yield str(inner)
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def _place() -> str:
    """In memory where the system has a place for that with room, else where temporary files are: prompts that Ray's
    store cannot hold are among them."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(MEMORY_PLACE).free >= _MEMORY_BYTES:
            return MEMORY_PLACE
    return tempfile.gettempdir()


def _remove_abandoned() -> None:
    """Directories of this user's servers that had no time to remove them. Where that fails nothing is lost but room."""
    for place in (MEMORY_PLACE, tempfile.gettempdir()):
        for path in Path(place).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if _is_own(path) and is_abandoned(path):
                    log_facts(logging.INFO, "files of a server that was killed are removed", path=str(path))
                    shutil.rmtree(path, ignore_errors=True)


def _is_own(path: Path) -> bool:
    """What others put there is not even opened."""
    return sys.platform != "win32" and path.lstat().st_uid == os.getuid() and path.is_dir()
