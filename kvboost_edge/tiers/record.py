"""A block as bytes outside the pool: a header that says all that the block is, then the pool's own
bytes.

    offset  bytes
    0       8      magic and version
    8       4      length of the header: a multiple of 64, u32 little-endian
    12      4      number of tokens, u32
    16      8      length of the payload, u64
    24      16     xxh3-128 of the payload
    40      32     space: model, KV format, numerics
    72      32     prefix hash
    104     32     parent hash
    136     4 n    tokens, u32
            ...    zeros
    -16     16     xxh3-128 of all of the header before it

256 bytes at 16 tokens a block. xxh3-128 finds damage (75 GB/s); who a block is, the SHA-256 chain
says. Where others may write, a keyed MAC goes around the record: xxh3 withstands nobody who means
harm.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvboost_edge.kvcache.hashing import BlockAddress

__all__ = [
    "ALIGNMENT",
    "FIXED_BYTES",
    "MAGIC",
    "RecordHeader",
    "decode_header",
    "encode_header",
    "header_bytes",
    "is_intact",
]

MAGIC = b"KVBREC\x00\x01"
_FIXED = struct.Struct("<8sIIQ16s32s32s32s")
_SUM_BYTES = 16
ALIGNMENT = 64
FIXED_BYTES = _FIXED.size
"""Bytes that say how long the header is, and all else of fixed length."""


class RecordHeader(NamedTuple):
    """What a record says of itself, its own checksum verified. Lengths in bytes."""

    space: bytes
    address: BlockAddress
    header_bytes: int
    payload_bytes: int
    payload_sum: bytes


def header_bytes(num_tokens: int) -> int:
    """Length of the header of a block of so many tokens."""
    return -(-(FIXED_BYTES + 4 * num_tokens + _SUM_BYTES) // ALIGNMENT) * ALIGNMENT


def encode_header(space: bytes, address: BlockAddress, payload: memoryview) -> bytes:
    """The header of a record; the payload follows it."""
    num_tokens = len(address.tokens) // 4
    length = header_bytes(num_tokens)
    fixed = _FIXED.pack(
        *(MAGIC, length, num_tokens, payload.nbytes, xxhash.xxh3_128_digest(payload)),
        *(space, address.prefix_hash, address.parent_hash),
    )
    body = (fixed + address.tokens).ljust(length - _SUM_BYTES, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def decode_header(data: bytes | memoryview) -> RecordHeader | None:
    """The header that `data` begins with; None unless it is whole and its checksum holds. More may
    follow it.
    """
    if len(data) < FIXED_BYTES:
        return None
    magic, length, num_tokens, payload_bytes, payload_sum, space, prefix_hash, parent_hash = (
        _FIXED.unpack_from(data)
    )
    if magic != MAGIC or length > len(data) or length != header_bytes(num_tokens):
        return None
    body = bytes(data[: length - _SUM_BYTES])
    if xxhash.xxh3_128_digest(body) != bytes(data[length - _SUM_BYTES : length]):
        return None
    tokens = body[FIXED_BYTES : FIXED_BYTES + 4 * num_tokens]
    address = BlockAddress(prefix_hash, parent_hash, tokens)
    return RecordHeader(space, address, length, payload_bytes, payload_sum)


def is_intact(header: RecordHeader, payload: memoryview) -> bool:
    """Whether these are the bytes that the header was written for."""
    return (
        payload.nbytes == header.payload_bytes
        and xxhash.xxh3_128_digest(payload) == header.payload_sum
    )
