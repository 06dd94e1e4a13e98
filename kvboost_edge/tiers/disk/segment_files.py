"""Segment files of one directory. They are appended to, sealed, read and removed.

    active    accepts records; its disk space is reserved
    retired   full, or abandoned after a failed write; waits to be sealed
    sealed    truncated, synced and listed in a sidecar; never written again

This module knows nothing about eviction. One thread at a time calls it, except for `seal`, which
only uses the files of its own segment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvboost_edge.tiers.disk.file_names import (
    LAST_SEGMENT,
    leftovers,
    segment_ids,
    segment_path,
    sidecar_path,
    write_whole,
)
from kvboost_edge.tiers.disk.files import CHANGE, NEW, READ, Files, passes, transferred
from kvboost_edge.tiers.disk.sidecar import (
    Scan,
    SegmentRecord,
    decode_sidecar,
    encode_sidecar,
    read_file,
)

__all__ = ["SegmentFile", "SegmentFiles"]

_LOG = logging.getLogger(__name__)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_LONGEST = 4 << 30  # longest segment that is scanned; the tier writes none of that length
_OPEN = 32
"""Segments kept open for reading. Few, because a removed file takes space until it is closed."""


@dataclasses.dataclass(slots=True)
class SegmentFile:
    """Segment file.

    Attributes:
        number: its number.
        nbytes: bytes that it takes on disk.
        end: end of its last record.
        settled: it is sealed, or sealing failed.
        records: its records until it is sealed.
    """

    number: int
    nbytes: int
    end: int = 0
    settled: bool = False
    records: list[SegmentRecord] = dataclasses.field(default_factory=list)


class SegmentFiles:
    """Segment files of one directory.

    Only the owner may call `append`, `begin`, `retire`, `seal` and `remove`.

    Args:
        directory: directory of the space.
        space: 32 bytes of the space.
        files: system calls.
        owned: this process owns the directory.

    Attributes:
        active: segment that accepts records, or None.
    """

    def __init__(self, directory: Path, space: bytes, files: Files, *, owned: bool) -> None:
        self._directory = directory
        self._space = space
        self._files = files
        self._owned = owned
        self._all: dict[int, SegmentFile] = {}
        self._handles: OrderedDict[int, int] = OrderedDict()
        self._last = 0
        self.active: SegmentFile | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the segments take on disk."""
        return sum(segment.nbytes for segment in list(self._all.values()))

    def settled(self) -> list[SegmentFile]:
        """Return the segments that are never written again, oldest first."""
        return [segment for segment in self._all.values() if segment.settled]

    def load(self, last: int) -> Iterator[tuple[int, list[SegmentRecord]]]:
        """Yield number and records of each segment. May raise OSError.

        New segments get numbers after these and after `last`. A segment without a valid sidecar is
        scanned. The owner then truncates it after its last record and seals it.
        """
        sizes = self._files.sizes(self._directory)
        self._last = last
        for name in leftovers(sizes) if self._owned else ():
            with contextlib.suppress(OSError):
                self._files.unlink(self._directory / name)
        for number in segment_ids(sizes):
            self._last = max(self._last, number)
            size = sizes[segment_path(self._directory, number).name]
            segment = self._all[number] = SegmentFile(number, size, settled=True)
            records = self._sidecar(number, size)
            if records is None:
                found = self._scanned(number, size)
                records = [] if found is None else found.records
                if self._owned and found is not None and not found.unread:
                    self._settle(segment, records)
            yield number, records

    def records(self, number: int) -> list[SegmentRecord]:
        """Return the records of a settled segment. May raise OSError.

        They come from its sidecar, or else from a scan.
        """
        size = self._all[number].nbytes
        known = self._sidecar(number, size)
        if known is not None:
            return known
        found = self._scanned(number, size)
        return [] if found is None else found.records

    def begin(self, nbytes: int) -> SegmentFile:
        """Create a new active segment with room for `nbytes`. May raise OSError."""
        number, handle = self._new_file()
        try:
            self._files.allocate(handle, nbytes)
        except OSError:
            self._files.close(handle)
            with contextlib.suppress(OSError):
                self._files.unlink(segment_path(self._directory, number))
            raise
        self._keep(number, handle)
        self.active = self._all[number] = SegmentFile(number, nbytes)
        return self.active

    def append(
        self, header: memoryview, payload: memoryview, prefix_hash: bytes, parent_hash: bytes
    ) -> SegmentRecord:
        """Append a record to the active segment, which has room for it.

        Raises:
            OSError: the record was not written. Bytes after the last record are ignored.
        """
        segment = self.active
        assert segment is not None
        record = SegmentRecord(segment.end, header.nbytes, payload.nbytes, prefix_hash, parent_hash)
        done = transferred(
            self._files.write, self._handle(segment.number, CHANGE), [header, payload], segment.end
        )
        if done != header.nbytes + payload.nbytes:
            raise OSError("short write")
        segment.records.append(record)
        segment.end = record.end
        return record

    def read(self, number: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers from a segment; return how many bytes were read.

        Raises:
            FileNotFoundError: the owner removed the segment.
            OSError: it cannot be read.
        """
        handle = self._handle(number, READ)
        if not self._owned and self._files.is_unlinked(handle):
            raise FileNotFoundError(f"segment {number} was removed by its owner")
        return transferred(self._files.read, handle, buffers, offset)

    def retire(self) -> SegmentFile | None:
        """Stop writing to the active segment; return it for sealing, or None if it was empty.

        An empty segment is removed.
        """
        segment = self.active
        self.active = None
        if segment is not None and not segment.records:
            self._remove_empty(segment)
            return None
        return segment

    def seal(self, segment: SegmentFile) -> None:
        """Truncate a retired segment, sync it to the device, and write its sidecar.

        A failure is logged. The segment is then scanned at the next opening.
        """
        try:
            path = segment_path(self._directory, segment.number)
            handle = self._files.open(path, CHANGE)
            try:
                self._files.truncate(handle, segment.end)
                self._files.sync(handle)
                segment.nbytes = segment.end
                self._write_sidecar(segment)
                self._files.forget(handle)
            finally:
                self._files.close(handle)
        except OSError as error:
            _LOG.warning("segment %s of the disk tier cannot be sealed: %s", segment.number, error)
        segment.records = []
        segment.settled = True

    def remove(self, number: int) -> None:
        """Delete a segment without live records.

        Raises:
            OSError: the file could not be deleted. It still counts as used space.
        """
        self.forget(number)
        self._files.unlink(segment_path(self._directory, number))
        self._all.pop(number, None)
        try:
            self._files.unlink(sidecar_path(self._directory, number))
        except OSError as error:
            _LOG.warning(
                "the sidecar of segment %s of the disk tier cannot be removed: %s", number, error
            )

    def forget(self, number: int) -> None:
        """Close a segment's file. It is reopened when needed."""
        handle = self._handles.pop(number, None)
        if handle is not None:
            with contextlib.suppress(OSError):
                self._files.close(handle)

    def close(self) -> None:
        """Close all files."""
        for number in list(self._handles):
            self.forget(number)

    def _handle(self, number: int, flags: int) -> int:
        handle = self._handles.get(number)
        if handle is None:
            path = segment_path(self._directory, number)
            try:
                handle = self._files.open(path, flags)
            except OSError as error:
                if error.errno not in _TOO_MANY or not self._forget_one(number):
                    raise
                handle = self._files.open(path, flags)
            self._keep(number, handle)
        self._handles.move_to_end(number)
        return handle

    def _keep(self, number: int, handle: int) -> None:
        self._handles[number] = handle
        while len(self._handles) > _OPEN:
            self._forget_one(number)

    def _forget_one(self, number: int) -> bool:
        """Close the least recently used file except this one and the active one.

        Returns:
            False if there is no such file.
        """
        active = 0 if self.active is None else self.active.number
        other = next((other for other in self._handles if other not in (number, active)), None)
        if other is not None:
            self.forget(other)
        return other is not None

    def _new_file(self) -> tuple[int, int]:
        """Create an empty file under the next free number. May raise OSError."""
        while self._last < LAST_SEGMENT:
            self._last += 1
            with contextlib.suppress(FileExistsError):
                return self._last, self._files.open(segment_path(self._directory, self._last), NEW)
        raise OSError("all segment numbers are used up; run: kvboost-edge cache clear")

    def _sidecar(self, number: int, size: int) -> list[SegmentRecord] | None:
        data = read_file(self._files, sidecar_path(self._directory, number))
        return None if data is None else decode_sidecar(data, self._space, number, size)

    def _scanned(self, number: int, size: int) -> Scan | None:
        if size > _LONGEST:
            return None
        try:
            handle = self._files.open(segment_path(self._directory, number), READ)
        except OSError as error:
            if passes(error):
                raise
            return None
        try:
            return Scan(self._files, handle, size, self._space)
        finally:
            self._files.close(handle)

    def _settle(self, segment: SegmentFile, records: list[SegmentRecord]) -> None:
        """Seal or remove a segment that a killed process left."""
        if records:
            segment.records = records
            segment.end = records[-1].end
            self.seal(segment)
        else:
            self._remove_empty(segment)

    def _remove_empty(self, segment: SegmentFile) -> None:
        try:
            self.remove(segment.number)
        except OSError as error:
            segment.settled = True  # the cleaner will try again
            _LOG.warning("segment %s of the disk tier cannot be removed: %s", segment.number, error)

    def _write_sidecar(self, segment: SegmentFile) -> None:
        data = encode_sidecar(self._space, segment.number, segment.records)
        write_whole(self._files, sidecar_path(self._directory, segment.number), data)
        self._files.sync_directory(self._directory)
