"""Sidecars: lists of the records in a segment, and the scan that recovers them from headers.

A sidecar consists of `_FIXED`, `_ROW` for each record in the order of writing, and the xxh3-128 of
all bytes before it.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvboost_edge.tiers.disk.files import READ, Files, passes, transferred
from kvboost_edge.tiers.record import ALIGNMENT, MAGIC, decode_header, is_intact

__all__ = ["Scan", "SegmentRecord", "decode_sidecar", "encode_sidecar", "padded", "read_file"]

_MAGIC = b"KVBIDX\x00\x01"
# Magic, space, segment, number of records, bytes up to the end of the last record.
_FIXED = struct.Struct("<8s32sIIQ")
# Offset / 64, bytes of the header, bytes of the payload, prefix hash, parent hash.
_ROW = struct.Struct("<IIQ32s32s")
_SUM_BYTES = 16
_HEADER_BYTES = 4096  # first read of a header; a longer one is read a second time as a whole
_SEARCH_BYTES = 1 << 20
_LONGEST = 256 << 20  # longest file read as a whole: a manifest of 30 million blocks


class SegmentRecord(NamedTuple):
    """Position of a record in a segment. Offset and lengths are in bytes."""

    offset: int
    header_bytes: int
    payload_bytes: int
    prefix_hash: bytes
    parent_hash: bytes

    @property
    def end(self) -> int:
        """Offset of the next record."""
        return self.offset + padded(self.header_bytes + self.payload_bytes)


def padded(nbytes: int) -> int:
    """Return the space that a record of this length takes in a segment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def encode_sidecar(space: bytes, segment: int, records: list[SegmentRecord]) -> bytes:
    """Return the bytes of a sidecar."""
    end = records[-1].end if records else 0
    rows = [_ROW.pack(offset // ALIGNMENT, *rest) for offset, *rest in records]
    data = b"".join([_FIXED.pack(_MAGIC, space, segment, len(records), end), *rows])
    return data + xxhash.xxh3_128_digest(data)


def decode_sidecar(
    data: bytes, space: bytes, segment: int, segment_bytes: int
) -> list[SegmentRecord] | None:
    """Return the records of a sidecar, or None if it is invalid.

    It is invalid if it is damaged, belongs to another segment, or the segment is shorter than
    listed.
    """
    body = len(data) - _SUM_BYTES
    if body < _FIXED.size or xxhash.xxh3_128_digest(memoryview(data)[:body]) != data[body:]:
        return None
    magic, of_space, of_segment, count, end = _FIXED.unpack_from(data)
    if (magic, of_space, of_segment) != (_MAGIC, space, segment) or end > segment_bytes:
        return None
    if body != _FIXED.size + count * _ROW.size:
        return None
    rows = _ROW.iter_unpack(memoryview(data)[_FIXED.size : body])
    # Calling the class takes twice as long, and opening a tier creates tens of thousands of them.
    new = tuple.__new__
    return [new(SegmentRecord, (place * ALIGNMENT, a, b, c, d)) for place, a, b, c, d in rows]


class Scan:
    """Scan of a segment for records with valid headers, no matter how damaged the rest is.

    After a record the next one follows. If none does, the scan tries every multiple of 64, so
    damage costs only the records that it hit. The payload of the last record is verified too,
    because the process may have ended while writing it.

    Args:
        files: system calls.
        handle: the segment.
        size: bytes of the segment.
        space: 32 bytes of the space.

    Attributes:
        records: the records.
        unread: the device could not read some of the segment, which counts as zeros.
    """

    def __init__(self, files: Files, handle: int, size: int, space: bytes) -> None:
        self.records: list[SegmentRecord] = []
        self.unread = False
        self._files = files
        self._handle = handle
        self._size = size
        self._space = space
        offset = 0
        while offset < size:
            record = self._record_at(offset)
            if record is None:
                offset = self._next_magic(offset + ALIGNMENT)
            else:
                self.records.append(record)
                offset = record.end
        if self.records and not self.payload_holds(self.records[-1]):
            self.records.pop()

    def _read(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(min(nbytes, self._size - offset))
        try:
            return bytes(
                data[: transferred(self._files.read, self._handle, [memoryview(data)], offset)]
            )
        except OSError:
            self.unread = True
            return bytes(len(data))

    def _record_at(self, offset: int) -> SegmentRecord | None:
        data = self._read(offset, _HEADER_BYTES)
        if len(data) == _HEADER_BYTES and data.startswith(MAGIC):
            length = int.from_bytes(data[8:12], "little")
            if _HEADER_BYTES < length <= self._size - offset:
                data = self._read(offset, length)
        header = decode_header(data)
        if header is None or header.space != self._space:
            return None
        if offset + header.header_bytes + header.payload_bytes > self._size:
            return None
        address = header.address
        return SegmentRecord(
            offset,
            header.header_bytes,
            header.payload_bytes,
            address.prefix_hash,
            address.parent_hash,
        )

    def _next_magic(self, offset: int) -> int:
        """Return the next multiple of 64 from `offset` on where a record may begin, or the size."""
        while offset < self._size:
            data = self._read(offset, _SEARCH_BYTES)
            at = data.find(MAGIC)
            while at >= 0:
                if at % ALIGNMENT == 0:
                    return offset + at
                at = data.find(MAGIC, at + 1)
            offset += _SEARCH_BYTES
        return self._size

    def payload_holds(self, record: SegmentRecord) -> bool:
        """Return whether a record is intact."""
        data = self._read(record.offset, record.header_bytes + record.payload_bytes)
        header = decode_header(data)
        return header is not None and is_intact(header, memoryview(data)[header.header_bytes :])


def read_file(files: Files, path: Path) -> bytes | None:
    """Return the contents of a small file, or None.

    None means that the file does not exist, cannot be read, or is too long for a file of the tier.

    Raises:
        OSError: a temporary failure, after which a retry may succeed.
    """
    handle = None
    try:
        handle = files.open(path, READ)
        size = files.size(handle)
        if size > _LONGEST:
            return None
        data = bytearray(size)
        return (
            bytes(data[: transferred(files.read, handle, [memoryview(data)], 0)]) if data else b""
        )
    except OSError as error:
        if passes(error):
            raise
        return None
    finally:
        if handle is not None:
            files.close(handle)
