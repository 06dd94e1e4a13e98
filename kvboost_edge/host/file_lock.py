"""Locks on open files. They end when the file is closed, or with its process."""

from __future__ import annotations

import os
import sys
import time
from typing import IO, Any

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = ["hold_open", "lock", "try_lock"]

_LOOKS = 50
_LOOK_S = 0.01
# Windows locks bytes, and other handles cannot read a locked byte. So lock one after the contents.
# The C library's positions have 31 bits.
_LOCKED_BYTE = (1 << 31) - 2


def try_lock(handle: int) -> bool:
    """Lock an open file exclusively until it is closed.

    Returns:
        False if another handle has locked the file.

    Raises:
        OSError: the file system does not support locks.
    """
    try:
        if sys.platform == "win32":
            position = os.lseek(handle, 0, os.SEEK_CUR)
            os.lseek(handle, _LOCKED_BYTE, os.SEEK_SET)
            try:
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            finally:
                os.lseek(handle, position, os.SEEK_SET)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def lock(handle: int) -> None:
    """Lock an open file exclusively until it is closed, and wait for other handles' locks.

    Raises:
        OSError: the file system does not support locks.
    """
    if sys.platform == "win32":
        while not try_lock(handle):
            time.sleep(_LOOK_S)
    else:
        fcntl.flock(handle, fcntl.LOCK_EX)


def hold_open(file: IO[Any]) -> None:
    """Hold a shared lock on a file until the file and all its mappings are closed.

    Does nothing where files cannot be locked, or on Windows, which does not delete mapped files.
    Also gives up if another process holds an exclusive lock for about 0.5 seconds. Without the
    lock, the file may be deleted, but the mappings keep its contents.
    """
    if sys.platform == "win32":
        return
    # A process that checks for other users of the file, or deletes it, locks it exclusively for a
    # moment.
    for _ in range(_LOOKS):
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_S)
        except OSError:  # some network file systems do not support locks
            return
        else:
            return
