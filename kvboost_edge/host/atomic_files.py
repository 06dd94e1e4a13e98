"""Files on their way: written under a name of their own, locked meanwhile, renamed when complete.

A lock goes with its process, however that ends: an unfinished file without one is left of a writer
that was killed, and is removed by the next writer in the same directory.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl

__all__ = ["alone_in", "finish_file", "is_abandoned", "open_unfinished", "synced_meanwhile"]

_PREFIX = ".new-"
_SYNC_S = 0.1
_LEFTOVER_S = 24 * 3600  # where files cannot be locked


def open_unfinished(directory: Path) -> IO[bytes]:
    """A new file for `finish_file`, open for writing; leftovers in the directory are removed.
    Raises OSError.
    """
    with alone_in(directory):
        for path in directory.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if _is_leftover(path):
                    path.unlink()
        file: IO[bytes] = tempfile.NamedTemporaryFile(  # noqa: SIM115
            dir=directory, prefix=_PREFIX, delete=False
        )
        _lock(file.fileno(), wait=True)
    return file


def is_abandoned(directory: Path) -> bool:
    """Whether files were begun in the directory and the writer of none is alive. False where files
    cannot be locked. Raises OSError.
    """
    with alone_in(directory):
        paths = list(directory.glob(f"{_PREFIX}*"))
        return bool(paths) and all(_try_lock(path) is True for path in paths)


def finish_file(file: IO[bytes], path: Path) -> None:
    """Close a file that is complete and give it its name, read-only. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())
    with alone_in(path.parent):  # between closing and renaming it has no lock
        file.close()
        if sys.platform != "win32":  # where a read-only file cannot be replaced
            os.chmod(file.name, 0o400)
        os.replace(file.name, path)


@contextlib.contextmanager
def synced_meanwhile(file: IO[bytes]) -> Iterator[None]:
    """What is written inside is given to the disk as it comes, so that little is left for the end
    (150 ms of waiting for 342 MB otherwise). Raises OSError at the end where the disk refused any
    of it: the system tells it only once.
    """
    done = threading.Event()
    refused = list[OSError]()

    def sync() -> None:
        try:
            while not done.wait(_SYNC_S):
                os.fsync(file.fileno())
        except OSError as error:
            refused.append(error)

    thread = threading.Thread(target=sync, name="kvboost-sync", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    for error in refused:
        raise error


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """No other process, and no other thread, is inside for the same directory; where files cannot
    be locked, nothing is held off. Unfinished files begin, end and are removed in here. Raises
    OSError.
    """
    if sys.platform == "win32":
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        _lock(handle, wait=True)
        yield
    finally:
        os.close(handle)


def _is_leftover(path: Path) -> bool:
    locked = _try_lock(path)
    return time.time() - path.stat().st_mtime > _LEFTOVER_S if locked is None else locked


def _try_lock(path: Path) -> bool | None:
    with open(path, "rb") as file:
        return _lock(file.fileno(), wait=False)


def _lock(handle: int, *, wait: bool) -> bool | None:
    """Lock an open file until it is closed: whether it worked, None where files cannot be
    locked.
    """
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have no locks
        return None
    return True
