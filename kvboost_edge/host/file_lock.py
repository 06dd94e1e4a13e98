"""Who has a file open says so by a lock, so that nobody deletes it meanwhile; the system lets go of
it in any case.
"""

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
    """Hold a file, beside others that do, until it and all that was mapped through it is closed.
    Who looks whether it is held, or deletes it, locks it for an instant, which is waited for.
    Nothing where files cannot be locked; Windows does not delete what is mapped.
    """
    if sys.platform == "win32":
        return
    for _ in range(_LOOKS):
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_S)
        except OSError:  # some network file systems have no locks
            return
        else:
            return
