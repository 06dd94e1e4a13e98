"""The manifest: which records counted when it was written, least recently used first, so that use
outlives a restart.

`_FIXED`, then one u64 for each record (segment, offset / 64, whether it was ever asked for), then
the xxh3-128 of all. Behind the frontier it knows nothing: those records were written later.
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
_FIXED = struct.Struct("<8s32sIIQ")  # magic, space, frontier: segment, records, frontier: offset
_SUM_BYTES = 16
_PROVEN = 1 << 63


def encode_manifest(space: bytes, uses: Sequence[Use], frontier: tuple[int, int]) -> bytes:
    """The manifest's bytes."""
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
    """The records' uses and the frontier; a manifest that is damaged or another space's knows
    nothing.
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
