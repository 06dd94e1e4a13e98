"""Record format: a header that identifies the block, followed by its payload.

    offset  bytes
    0       8      magic and version
    8       4      length of the header, a multiple of 64, u32 little-endian
    12      4      number of tokens n, u32
    16      8      length of the payload, u64
    24      16     xxh3-128 of the payload
    40      32     space: model, KV format, numerics
    72      32     prefix hash
    104     32     parent hash
    136     4 n    tokens, u32
            ...    zeros
    -16     16     xxh3-128 of the header before it

The payload is a copy of the block's bytes in the pool. A header takes 256 bytes with 16 tokens per
block. The SHA-256 chain identifies the block. xxh3-128 (75 GB/s) detects damage but not tampering.
A tier on a shared server therefore adds a keyed MAC.
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
"""Size of the header's fixed part, which contains the length of the whole header."""


class RecordHeader(NamedTuple):
    """Contents of a header with a valid checksum. Lengths are in bytes."""

    space: bytes
    address: BlockAddress
    header_bytes: int
    payload_bytes: int
    payload_sum: bytes


def header_bytes(num_tokens: int) -> int:
    """Return the header length in bytes for a block of `num_tokens` tokens."""
    return -(-(FIXED_BYTES + 4 * num_tokens + _SUM_BYTES) // ALIGNMENT) * ALIGNMENT


def encode_header(space: bytes, address: BlockAddress, payload: memoryview) -> bytes:
    """Return the encoded header of a record, without the payload."""
    num_tokens = len(address.tokens) // 4
    length = header_bytes(num_tokens)
    fixed = _FIXED.pack(
        *(MAGIC, length, num_tokens, payload.nbytes, xxhash.xxh3_128_digest(payload)),
        *(space, address.prefix_hash, address.parent_hash),
    )
    body = (fixed + address.tokens).ljust(length - _SUM_BYTES, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def decode_header(data: bytes | memoryview) -> RecordHeader | None:
    """Decode the header at the start of `data`. Return None if it is incomplete or damaged."""
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
    """Return whether a payload matches the length and checksum in its header."""
    return (
        payload.nbytes == header.payload_bytes
        and xxhash.xxh3_128_digest(payload) == header.payload_sum
    )
