"""Reads of large files into private buffers.

Files are not memory-mapped. If a file is truncated or its disk fails while it is read, an error is
raised, whereas a mapping would kill the process with SIGBUS. Pages of the file do not count as
memory of this process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_at import FileAt
from kvboost_edge.host.file_memo import FileStamp

__all__ = ["FileBytes", "check_stamped", "open_stamped", "read_bytes"]


class FileBytes:
    """Open file that any number of threads can read at any offset.

    Errors are ModelFormatError and name the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - `close` closes it
        except OSError as error:
            raise ModelFormatError(f"{path} cannot be read: {error}") from error
        self.stamp = FileStamp.of_open(self._file, path)
        self._at = FileAt(self._file)

    def read_into(self, buffer: npt.NDArray[Any], start: int) -> None:
        """Fill a contiguous array with the bytes from offset `start`."""
        raw = buffer.reshape(-1).view(np.uint8).data
        try:
            done = self._at.read_into(raw, start)
        except OSError as error:
            raise ModelFormatError(f"{self.path} cannot be read: {error}") from error
        if done < len(raw):
            raise ModelFormatError(
                f"{self.path} was truncated while it was being read: {len(raw) - done} bytes are "
                "missing; load it again when it is complete"
            )

    def announce(self, starts: Iterable[int], count: int) -> None:
        """Announce reads of `count` bytes at each offset, so that the system can combine them."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # not supported by some file systems
                for start in starts:
                    os.posix_fadvise(self._file.fileno(), start, count, os.POSIX_FADV_WILLNEED)

    def check_unchanged(self) -> None:
        """Check that the file was not modified since it was opened.

        A file that was moved or renamed can still be read.

        Raises:
            ModelFormatError: the file was modified or truncated.
        """
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self.stamp.size, self.stamp.modified_ns):
            raise ModelFormatError(
                f"{self.path} changed while its model was open (from {self.stamp.size} to "
                f"{now.st_size} bytes); restore the file and load the model again"
            )

    def close(self) -> None:
        self._file.close()


def read_bytes(path: Path, start: int, stop: int) -> npt.NDArray[np.uint8]:
    """Return bytes [start, stop) of a file.

    Raises:
        ModelFormatError: the file cannot be read, or is shorter.
    """
    data = np.empty(stop - start, dtype=np.uint8)
    with contextlib.closing(FileBytes(path)) as file:
        file.read_into(data, start)
    return data


def check_stamped(files: Iterable[tuple[Path, FileStamp]], what: str) -> None:
    """Check files as `open_stamped` does, without opening them."""
    for path, stamp in files:
        try:
            found = FileStamp.of(path)
        except OSError as error:
            raise ModelFormatError(f"{path} cannot be read: {error}") from error
        _check_stamp(path, found, stamp, what)


def open_stamped(files: Iterable[tuple[Path, FileStamp]], what: str) -> list[FileBytes]:
    """Open files and return them in order.

    Args:
        files: paths, each with the stamp that the file had at an earlier read.
        what: name of the part that was read earlier, for messages.

    Raises:
        ModelFormatError: a file is missing or has changed since then. No file stays open.
    """
    with contextlib.ExitStack() as stack:
        opened: list[FileBytes] = []
        for path, stamp in files:
            opened.append(FileBytes(path))
            stack.callback(opened[-1].close)
            _check_stamp(path, opened[-1].stamp, stamp, what)
        stack.pop_all()
    return opened


def _check_stamp(path: Path, found: FileStamp, stamp: FileStamp, what: str) -> None:
    if found != stamp:
        raise ModelFormatError(
            f"{path} changed since its {what} was read; load it again when it is complete"
        )
