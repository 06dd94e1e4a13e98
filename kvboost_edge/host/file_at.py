"""Reads and writes at a position of a file, from any number of threads."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol

__all__ = ["FileAt"]


class _File(Protocol):
    """Interface of an open file."""

    def fileno(self) -> int: ...
    def seek(self, offset: int, /) -> int: ...
    def write(self, data: Any, /) -> int: ...


class FileAt:
    """An open binary file with reads and writes at a position. Both methods raise OSError.

    Without `preadv` and `pwrite`, the threads take turns because they share one file position.
    Other code must not use the file meanwhile.
    """

    def __init__(self, file: _File) -> None:
        self._file = file
        self._turn = threading.Lock()

    def read_into(self, view: memoryview, start: int) -> int:
        """Fill a view with the bytes from position `start`, and return the number of bytes read.

        The number is smaller than the view's length only at the end of the file.
        """
        done = 0
        while done < len(view):
            count = self._read(view[done:], start + done)
            if not count:
                break
            done += count
        return done

    def write(self, view: memoryview, start: int) -> None:
        """Write all bytes of a view at position `start`."""
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
