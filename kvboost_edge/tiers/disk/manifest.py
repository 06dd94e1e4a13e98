"""Manifest of a space: its records in LRU order, which preserves the order across restarts.

The format is `_FIXED`, one u64 per record, and the xxh3-128 of all preceding bytes. Each u64 holds
the segment, offset / 64, and whether the record was requested since it was written. Records after
the frontier were written later and are not listed.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence

import xxhash

from kvboost_edge.tiers.disk.index import Use
from kvboost_edge.tiers.record import ALIGNMENT

__all__ = ["decode_manifest", "encode_manifest"]

_MAGIC = b"KVBORD\x00\x01"
# Magic, space, frontier segment, number of records, frontier offset.
_FIXED = struct.Struct("<8s32sIIQ")
_SUM_BYTES = 16
_PROVEN = 1 << 63


def encode_manifest(space: bytes, uses: Sequence[Use], frontier: tuple[int, int]) -> bytes:
    """Return an encoded manifest.

    Args:
        space: 32-byte id of the space.
        uses: records, least recently used first.
        frontier: segment and offset of the last record when the manifest was written.
    """
    rows = array(
        "Q",
        [
            segment << 32 | offset // ALIGNMENT | proven * _PROVEN
            for segment, offset, proven in uses
        ],
    )
    if sys.byteorder == "big":
        rows.byteswap()
    data = _FIXED.pack(_MAGIC, space, frontier[0], len(uses), frontier[1]) + rows.tobytes()
    return data + xxhash.xxh3_128_digest(data)


def decode_manifest(data: bytes, space: bytes) -> tuple[list[Use], tuple[int, int]]:
    """Return the records in a manifest, and its frontier.

    If the manifest is damaged or belongs to another space, the result is ([], (0, 0)).
    """
    nothing: tuple[list[Use], tuple[int, int]] = ([], (0, 0))
    body = len(data) - _SUM_BYTES
    if body < _FIXED.size or xxhash.xxh3_128_digest(memoryview(data)[:body]) != data[body:]:
        return nothing
    magic, of_space, segment, count, offset = _FIXED.unpack_from(data)
    if (magic, of_space) != (_MAGIC, space) or body != _FIXED.size + 8 * count:
        return nothing
    rows = array("Q", data[_FIXED.size : body])
    if sys.byteorder == "big":
        rows.byteswap()
    place = 0xFFFFFFFF
    number = 0x7FFFFFFF
    return [Use(row >> 32 & number, (row & place) * ALIGNMENT, row >= _PROVEN) for row in rows], (
        segment,
        offset,
    )
