"""Shared locks on open files, which keep other processes from deleting files in use."""

from __future__ import annotations

import sys
import time
from typing import IO, Any

if sys.platform != "win32":
    import fcntl

__all__ = ["hold_open"]

_LOOKS = 50
_LOOK_S = 0.01


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
