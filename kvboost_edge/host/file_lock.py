"""Shared locks on open files, so that no other process deletes them while they are in use."""

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
    Without the lock (also if another process keeps an exclusive lock for about 0.5 seconds), the
    file may be deleted. The mappings keep its contents.
    """
    if sys.platform == "win32":
        return
    # A process that checks for holders, or deletes the file, locks it exclusively for an instant.
    for _ in range(_LOOKS):
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_S)
        except OSError:  # some network file systems lack locks
            return
        else:
            return
