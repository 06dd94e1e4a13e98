"""Bytes of a large file read into own buffers.

Nothing is mapped: a file that is cut short, or whose disk fails, while it is read raises an error instead of ending the
process (SIGBUS), and its pages do not count as this process's memory.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_memo import FileStamp

__all__ = ["FileBytes"]


class FileBytes:
    """An open file, read at any place from any number of threads. Both methods raise ModelFormatError that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - `close` closes it
        except OSError as error:
            raise ModelFormatError(f"{path} cannot be read: {error}") from error
        self.stamp = FileStamp.of_open(self._file, path)
        self._turn = threading.Lock()

    def read_into(self, buffer: npt.NDArray[Any], start: int) -> None:
        """Fill a contiguous array with the bytes from `start` on."""
        raw = buffer.reshape(-1).view(np.uint8).data
        done = 0
        try:
            while done < len(raw):
                count = self._read(raw[done:], start + done)
                if not count:
                    raise ModelFormatError(
                        f"{self.path} was cut short while it was read: it ends {len(raw) - done} bytes early"
                    )
                done += count
        except OSError as error:
            raise ModelFormatError(f"{self.path} cannot be read: {error}") from error

    def _read(self, view: memoryview, start: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [view], start)
        with self._turn:  # systems without it have one position for all threads
            self._file.seek(start)
            return self._file.readinto(view)

    def close(self) -> None:
        self._file.close()
