"""Sidecars, which list the records of a segment, and the scan that recovers them from headers.

A sidecar consists of `_FIXED`, one `_ROW` per record in the order of writing, and the xxh3-128 of
all preceding bytes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvboost_edge.tiers.disk.system_calls import Files, transferred
from kvboost_edge.tiers.record import ALIGNMENT, MAGIC, decode_header, is_intact

__all__ = ["Scan", "SegmentRecord", "decode_sidecar", "encode_sidecar", "padded"]

_MAGIC = b"KVBIDX\x00\x01"
# Magic, space, segment number, number of records, offset of the end of the last record.
_FIXED = struct.Struct("<8s32sIIQ")
# Offset / 64, header length, payload length, prefix hash, parent hash.
_ROW = struct.Struct("<IIQ32s32s")
_SUM_BYTES = 16
# Bytes of the first read of a header.  Longer headers are reread as a whole.
_HEADER_BYTES = 4096
_SEARCH_BYTES = 1 << 20


class SegmentRecord(NamedTuple):
    """Position of a record in a segment. Offset and lengths are in bytes."""

    offset: int
    header_bytes: int
    payload_bytes: int
    prefix_hash: bytes
    parent_hash: bytes

    @property
    def end(self) -> int:
        """Offset of the end of the record, where the next one begins."""
        return self.offset + padded(self.header_bytes + self.payload_bytes)


def padded(nbytes: int) -> int:
    """Return the space in bytes that a record of `nbytes` takes in a segment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def encode_sidecar(space: bytes, segment: int, records: list[SegmentRecord]) -> bytes:
    """Return the encoded sidecar of a segment."""
    end = records[-1].end if records else 0
    rows = [_ROW.pack(offset // ALIGNMENT, *rest) for offset, *rest in records]
    data = b"".join([_FIXED.pack(_MAGIC, space, segment, len(records), end), *rows])
    return data + xxhash.xxh3_128_digest(data)


def decode_sidecar(
    data: bytes, space: bytes, segment: int, segment_bytes: int
) -> list[SegmentRecord] | None:
    """Return the records of a sidecar, or None if it is invalid.

    A sidecar is invalid if it is damaged, belongs to another segment, or lists records beyond the
    end of the segment.
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
    # Calling the class would take twice as long, and opening a tier creates tens of thousands of
    # records.
    new = tuple.__new__
    return [new(SegmentRecord, (place * ALIGNMENT, a, b, c, d)) for place, a, b, c, d in rows]


class Scan:
    """Scan of a segment for records with valid headers.

    After each record, the scan expects the next one. If the next header is invalid or missing, it
    tries every multiple of 64. Damage therefore only loses the records that it affects. The payload
    of the last record is verified too, because the process may have ended while writing it.

    Args:
        files: system calls to use.
        handle: open file of the segment.
        size: size of the segment, in bytes.
        space: 32-byte id of the space.
        start: offset at which the scan begins.
        searches: whether the scan goes on after an invalid or missing header.

    Attributes:
        records: records that were found.
        unread: whether the device could not read parts of the segment. Such parts count as zeros.
    """

    def __init__(
        self,
        files: Files,
        handle: int,
        size: int,
        space: bytes,
        start: int = 0,
        *,
        searches: bool = True,
    ) -> None:
        self.records: list[SegmentRecord] = []
        self.unread = False
        self._files = files
        self._handle = handle
        self._size = size
        self._space = space
        offset = start
        while offset < size:
            record = self._record_at(offset)
            if record is not None:
                self.records.append(record)
                offset = record.end
            elif searches:
                offset = self._next_magic(offset + ALIGNMENT)
            else:
                break
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
        """Return the first aligned offset at or after `offset` at which a record may begin.

        If there is none, the result is the size of the segment.
        """
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
        """Return whether the header and payload of a record are intact."""
        data = self._read(record.offset, record.header_bytes + record.payload_bytes)
        header = decode_header(data)
        return header is not None and is_intact(header, memoryview(data)[header.header_bytes :])
