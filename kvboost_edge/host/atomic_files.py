"""Files that are written under a temporary name with a lock, and renamed when complete.

The lock ends with its process. An unlocked temporary file therefore comes from a writer that was
killed. The next writer in the directory removes it.

Windows neither deletes nor replaces a file that any process has open. There, an unfinished file
needs no lock of its own, and a directory is locked by a file in it.
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

from kvboost_edge.host.file_lock import lock, try_lock

__all__ = [
    "alone_in",
    "finish_file",
    "is_abandoned",
    "is_open",
    "new_file",
    "open_unfinished",
    "replace_file",
    "synced_meanwhile",
]

_PREFIX = ".new-"
_SYNC_S = 0.1
_LEFTOVER_S = 24 * 3600  # age of an abandoned file on systems where files cannot be locked
_LOCK_NAME = ".kvboost-edge.lock"  # in each directory that is locked, on Windows
# On Windows, a program that reads the target for a moment, such as a virus scanner, keeps it from
# being replaced.
_REPLACE_TRIES = 10
_REPLACE_WAIT_S = 0.01


def open_unfinished(directory: Path) -> IO[bytes]:
    """Open a new temporary file for `finish_file`, and remove abandoned files in the directory.

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
    """Return whether the directory has unfinished files whose writers have all died.

    Returns False if files cannot be locked. Raises OSError.
    """
    with alone_in(directory):
        paths = list(directory.glob(f"{_PREFIX}*"))
        return bool(paths) and all(_is_unused(path) is True for path in paths)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that becomes `path` after the body, and is removed if the body fails.

    Raises OSError.
    """
    file = open_unfinished(path.parent)
    try:
        with file:
            yield file
            finish_file(file, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise


def finish_file(file: IO[bytes], path: Path) -> None:
    """Close a complete file and rename it to `path`, read-only. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())
    # Other writers must stay out, because the file is unlocked between closing and renaming.
    with alone_in(path.parent):
        file.close()
        if sys.platform != "win32":  # Windows cannot replace a read-only file
            os.chmod(file.name, 0o400)
        replace_file(Path(file.name), path)


def replace_file(source: Path, target: Path) -> None:
    """Rename a file, and replace the target if it exists.

    On Windows, this waits for up to 0.1 seconds while another process has the target open. Raises
    OSError.
    """
    tries = _REPLACE_TRIES if sys.platform == "win32" else 1
    for number in range(1, tries + 1):
        try:
            os.replace(source, target)
        except PermissionError:
            if number == tries:
                raise
            time.sleep(_REPLACE_WAIT_S)
        else:
            return


def is_open(path: Path) -> bool:
    """Return whether a process has a file open. Only for Windows. Raises OSError."""
    try:
        os.rename(path, path)  # Windows refuses this for open files
    except PermissionError:
        return True
    return False


@contextlib.contextmanager
def synced_meanwhile(file: IO[bytes]) -> Iterator[None]:
    """Sync a file to disk continuously while the body writes to it. Raises OSError at the end."""
    # This leaves little to sync at the end, where 342 MB would take 150 ms. The system reports a
    # write error only once, so an error in this thread is raised after the body.
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
    """Lock a directory against other processes and threads that use this function.

    Callers hold this lock while they create, rename and remove unfinished files. Does nothing if
    files cannot be locked. Raises OSError.
    """
    if sys.platform == "win32":
        handle = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    else:
        handle = os.open(directory, os.O_RDONLY)
    try:
        _lock(handle, wait=True)
        yield
    finally:
        os.close(handle)


def _is_leftover(path: Path) -> bool:
    unused = _is_unused(path)
    return time.time() - path.stat().st_mtime > _LEFTOVER_S if unused is None else unused


def _is_unused(path: Path) -> bool | None:
    """Return whether the writer of an unfinished file is dead; None if that cannot be told."""
    if sys.platform == "win32":
        return not is_open(path)
    with open(path, "rb") as file:
        return _lock(file.fileno(), wait=False)


def _lock(handle: int, *, wait: bool) -> bool | None:
    """Lock an open file until it is closed. Returns whether that worked, or None if locks are
    unsupported.
    """
    try:
        if not wait:
            return try_lock(handle)
        lock(handle)
    except OSError:  # some network file systems do not support locks
        return None
    return True
