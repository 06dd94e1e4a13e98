"""Append-only JSON Lines files of answered lines, which survive a crash at any moment.

Each record is one line, passed to the system in one write. A line of a batch is answered once its
record is written. Records are synced to disk at most once a second, and at the end. After a loss of
power, the last records may be missing or damaged. Opening the file cuts it before the first damaged
record, and the lines without a record run again.
"""

from __future__ import annotations

import errno
import io
import json
import os
import time
from pathlib import Path

from kvboost_edge.errors import RequestError
from kvboost_edge.host.file_lock import try_lock

__all__ = ["RecordFile"]

_SYNC_SECONDS = 1.0


class RecordFile:
    """A file of records that one process writes.

    Attributes:
        answered: ids of the records, which their lines chose.
        num_bytes: size of the file.
    """

    def __init__(self, path: Path) -> None:
        """Open or create a file, and remove damaged records at its end.

        Raises:
            RequestError: another process writes to the file, or it holds something else.
            OSError: the file cannot be opened.
        """
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        try:
            if not try_lock(self._file.fileno()):
                raise RequestError(f"another process writes to {str(path)!r}; wait until it ends")
            self.answered, self.num_bytes = _intact(self._file, path)
            self._file.truncate(self.num_bytes)
        except BaseException:
            self._file.close()
            raise
        self._synced_at = time.monotonic()

    def append(self, custom_id: str, record: bytes) -> None:
        """Write a record, a JSON object with this id. Raises OSError."""
        line = record.replace(b"\n", b" ") + b"\n"
        written = self._file.write(line)
        if written != len(line):  # the disk is full; the rest of the record would be damaged
            os.ftruncate(self._file.fileno(), self.num_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.num_bytes += len(line)
        self.answered.add(custom_id)
        if time.monotonic() - self._synced_at >= _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Wait until all records are on the disk. Raises OSError."""
        os.fsync(self._file.fileno())
        self._synced_at = time.monotonic()

    def close(self) -> None:
        """Sync and close the file."""
        if not self._file.closed:
            try:
                self.sync()
            finally:
                self._file.close()


def _intact(file: io.FileIO, path: Path) -> tuple[set[str], int]:
    """Return the ids of the intact records at the start of a file, and their size.

    Args:
        file: the locked file. On Windows, other handles may not read all of it.
        path: path of the file, for messages.

    Raises:
        RequestError: a line that a crash cannot explain is no record.
    """
    answered: set[str] = set()
    size = 0
    file.seek(0)
    reader = io.BufferedReader(file)
    try:
        for line in reader:
            name = _custom_id(line)
            if name is None:
                if line.endswith(b"\n") and b"\0" not in line:
                    raise RequestError(
                        f"line {len(answered) + 1} of {str(path)!r} is no answer of a batch; "
                        "choose another file"
                    )
                break
            answered.add(name)
            size += len(line)
    finally:
        reader.detach()
    return answered, size


def _custom_id(line: bytes) -> str | None:
    """Return the id of a record, or None for a damaged one."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    name = record.get("custom_id") if isinstance(record, dict) else None
    return name if isinstance(name, str) else None
