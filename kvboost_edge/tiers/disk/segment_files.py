"""Segment files of one directory: creating, appending, sealing, reading and deleting them.

    active    accepts records; its disk space is reserved
    retired   full, or abandoned after a failed write; waits to be sealed
    sealed    truncated, synced and listed in a sidecar; never written again

A process that does not own the directory follows the owner. It reads the new records of segments
without a sidecar after the last record that it knows, and closes all files after each use, so a
deleted file takes no space.

This module knows nothing about eviction. Only one thread at a time may call it, except for `seal`,
which only touches the files of its own segment.
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
)
from kvboost_edge.tiers.disk.sidecar import Scan, SegmentRecord, decode_sidecar, encode_sidecar
from kvboost_edge.tiers.disk.system_calls import (
    CHANGE,
    NEW,
    READ,
    Files,
    passes,
    read_file,
    transferred,
    write_whole,
)

__all__ = ["SegmentFile", "SegmentFiles"]

_LOG = logging.getLogger(__name__)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_LONGEST = 4 << 30  # maximum size of a segment to scan. The tier never writes larger ones.
_OPEN = 32
"""Number of segments kept open for reading. A deleted file takes space until it is closed."""


@dataclasses.dataclass(slots=True)
class SegmentFile:
    """File that holds the records of a segment.

    Attributes:
        number: number of the segment.
        nbytes: size of the file on disk, in bytes.
        end: offset of the end of the last record. A process that does not own the directory only
            needs it until the segment is sealed.
        settled: whether the segment is sealed or sealing it failed.
        records: records of the segment. Empty once it is sealed.
    """

    number: int
    nbytes: int
    end: int = 0
    settled: bool = False
    records: list[SegmentRecord] = dataclasses.field(default_factory=list)


class SegmentFiles:
    """Segment files of one directory.

    Only the process that owns the directory may call `append`, `begin`, `retire`, `seal` and
    `remove`.

    Args:
        directory: directory of the space.
        space: 32-byte id of the space.
        files: system calls to use.
        owned: whether this process owns the directory.

    Attributes:
        active: segment that accepts records, or None.
        unsealed: segments that `load` found without a sidecar, for the owner to seal.
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
        self.unsealed: list[SegmentFile] = []

    @property
    def nbytes(self) -> int:
        """Size of all segments on disk, in bytes."""
        return sum(segment.nbytes for segment in list(self._all.values()))

    def settled(self) -> list[SegmentFile]:
        """Return the segments that will never be written again, oldest first."""
        return [segment for segment in self._all.values() if segment.settled]

    def load(self, last: int) -> Iterator[tuple[int, list[SegmentRecord]]]:
        """Yield the number and the records of each segment. May raise OSError.

        A segment without a valid sidecar is scanned. The owner must also seal it, and an empty one
        is deleted. Numbers of new segments will be greater than all existing ones and `last`.
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
                segment.end = records[-1].end if records else 0
                if not self._owned:
                    segment.settled = False
                elif found is not None and not found.unread:
                    self._settle(segment, records)
            yield number, records

    def follow(self) -> Iterator[tuple[int, list[SegmentRecord] | None]]:
        """Yield the segments that the owner has changed since the last call. May raise OSError.

        Each comes with its new records, in the order in which they were written. Deleted segments
        follow, with None. The cleaner copies records before it deletes their segment, so no record
        is missing in between.
        """
        sizes = self._files.sizes(self._directory)
        numbers = segment_ids(sizes)
        for number in numbers:
            segment = self._all.setdefault(number, SegmentFile(number, 0))
            if not segment.settled:
                with contextlib.suppress(FileNotFoundError):
                    has_sidecar = sidecar_path(self._directory, number).name in sizes
                    records = self._new_records(segment, has_sidecar=has_sidecar)
                    if records:
                        yield number, records
        for number in self._all.keys() - set(numbers):
            del self._all[number]
            yield number, None

    def _new_records(self, segment: SegmentFile, *, has_sidecar: bool) -> list[SegmentRecord]:
        handle = self._handle(segment.number, READ)
        # The size in the directory may be outdated on Windows.
        segment.nbytes = self._files.size(handle)
        if segment.nbytes > _LONGEST:
            return []
        listed = self._sidecar(segment.number, segment.nbytes) if has_sidecar else None
        if listed is not None:
            segment.settled = True
            return [record for record in listed if record.offset >= segment.end]
        # The owner may be writing where there is no valid record. Should the record be damaged,
        # those after it become known with the sidecar.
        scan = Scan(self._files, handle, segment.nbytes, self._space, segment.end, searches=False)
        if scan.records:
            segment.end = scan.records[-1].end
        return scan.records

    def records(self, number: int) -> list[SegmentRecord]:
        """Return the records of a settled segment. May raise OSError.

        The records are read from its sidecar. Without a valid sidecar, the segment is scanned.
        """
        size = self._all[number].nbytes
        known = self._sidecar(number, size)
        if known is not None:
            return known
        found = self._scanned(number, size)
        return [] if found is None else found.records

    def begin(self, nbytes: int) -> SegmentFile:
        """Create a new active segment of `nbytes`. May raise OSError."""
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
        """Append a record to the active segment, which must have room for it.

        Raises:
            OSError: the record could not be written. Any bytes after the last record are ignored.
        """
        segment = self.active
        assert segment is not None
        record = SegmentRecord(segment.end, header.nbytes, payload.nbytes, prefix_hash, parent_hash)
        done = transferred(
            self._files.write, self._handle(segment.number, CHANGE), [header, payload], segment.end
        )
        if done != header.nbytes + payload.nbytes:
            raise OSError(f"only {done} of {header.nbytes + payload.nbytes} bytes were written")
        segment.records.append(record)
        segment.end = record.end
        return record

    def read(self, number: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read from a segment into consecutive buffers, and return the number of bytes read.

        Raises:
            FileNotFoundError: the owner of the directory deleted the segment.
            OSError: the segment cannot be read.
        """
        return transferred(self._files.read, self._handle(number, READ), buffers, offset)

    def retire(self) -> SegmentFile | None:
        """Stop writing to the active segment, and return it for sealing.

        An empty segment is deleted, and the result is None.
        """
        segment = self.active
        self.active = None
        if segment is not None and not segment.records:
            self._remove_empty(segment)
            return None
        return segment

    def seal(self, segment: SegmentFile) -> None:
        """Truncate a retired segment, sync it to the device, and write its sidecar.

        A failure is logged. The segment is then scanned the next time it is loaded.
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
            OSError: the file could not be deleted. Its size still counts as used space.
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
        """Close the file of a segment. It is reopened when needed."""
        handle = self._handles.pop(number, None)
        if handle is not None:
            with contextlib.suppress(OSError):
                self._files.close(handle)

    def close(self) -> None:
        """Close all segment files."""
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
        """Close the least recently used file other than this segment's and the active one.

        Returns:
            False if no other file is open.
        """
        active = 0 if self.active is None else self.active.number
        other = next((other for other in self._handles if other not in (number, active)), None)
        if other is not None:
            self.forget(other)
        return other is not None

    def _new_file(self) -> tuple[int, int]:
        """Create an empty segment file with the next free number. May raise OSError."""
        while self._last < LAST_SEGMENT:
            self._last += 1
            with contextlib.suppress(FileExistsError):
                return self._last, self._files.open(segment_path(self._directory, self._last), NEW)
        raise OSError("all segment numbers are used up; run `kvboost-edge cache clear`")

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
        """Leave the segment of a killed process to be sealed, or delete it if it is empty."""
        if records:
            segment.records = records
            segment.settled = False
            self.unsealed.append(segment)
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
