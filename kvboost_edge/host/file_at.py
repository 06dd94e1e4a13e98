"""Reading and writing a file at any place, from any number of threads."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol

__all__ = ["FileAt"]


class _File(Protocol):
    """What open files of every kind have."""

    def fileno(self) -> int: ...
    def seek(self, offset: int, /) -> int: ...
    def write(self, data: Any, /) -> int: ...


class FileAt:
    """An open binary file without a position of its own. Both methods raise OSError.

    Systems without `preadv` and `pwrite` have one position for all threads, which then take turns;
    the file must not be used otherwise meanwhile.
    """

    def __init__(self, file: _File) -> None:
        self._file = file
        self._turn = threading.Lock()

    def read_into(self, view: memoryview, start: int) -> int:
        """Fill a view of bytes with those from `start` on: how many it got, fewer only where the
        file ends.
        """
        done = 0
        while done < len(view):
            count = self._read(view[done:], start + done)
            if not count:
                break
            done += count
        return done

    def write(self, view: memoryview, start: int) -> None:
        """Write all of a view of bytes from `start` on."""
        if hasattr(os, "pwrite"):
            done = 0
            while done < len(view):
                done += os.pwrite(self._file.fileno(), view[done:], start + done)
            return
        with self._turn:
            self._file.seek(start)
            self._file.write(view)

    def _read(self, view: memoryview, start: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [view], start)
        with self._turn:
            self._file.seek(start)
            return int(self._file.readinto(view))  # type: ignore[attr-defined]
