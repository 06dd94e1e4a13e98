"""Redis values of a block: its record and a keyed MAC, in pieces of at most 1 MiB.

    value = header (tiers/record.py) + payload + MAC
    keys    kvb:{space, 16 hex digits}:{id of the secret, 8 hex digits}:{prefix hash, hex}
            and the same with :1, :2 and so on for further pieces

Without a secret, "open" takes the place of its id. Machines with different secrets therefore never
find, replace or delete each other's values.

The MAC is BLAKE2b over header and payload, keyed with a shared secret. A client without the secret
can delete a value but not forge one. A value copied from another block, space or tenant does not
match the requested header.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import struct

from kvboost_edge.kvcache.hashing import BlockAddress
from kvboost_edge.tiers.record import decode_header, encode_header, header_bytes, is_intact

__all__ = [
    "HEAD",
    "PIECE_BYTES",
    "Seal",
    "piece_lengths",
    "pieces_of",
    "stored_bytes",
    "value_bytes_at",
]

PIECE_BYTES = 1 << 20
_MAC_BYTES = 32
_LONGEST_VALUE = 4096 * PIECE_BYTES  # maximum length that is accepted before the MAC is checked
_LENGTHS = struct.Struct("<IIQ")
HEAD = (8, 23)
"""Byte range of a value's length fields, as arguments of GETRANGE."""


class Seal:
    """Encodes, decodes and verifies the values of one space.

    Without a secret, values carry no MAC, and every client that can write to the server is trusted.
    """

    def __init__(self, space: bytes, secret: str | None) -> None:
        self._space = space
        self._key = None if secret is None else _mac_key(secret)
        self._prefix = f"kvb:{space[:8].hex()}:{'open' if self._key is None else _id_of(self._key)}"

    def keys(self, prefix_hash: bytes, value_bytes: int) -> list[str]:
        """Return the keys for the pieces of a value of `value_bytes`, in order."""
        first = f"{self._prefix}:{prefix_hash.hex()}"
        return [first, *(f"{first}:{index}" for index in range(1, -(-value_bytes // PIECE_BYTES)))]

    @property
    def mac_bytes(self) -> int:
        """Length of the MAC after the payload, in bytes."""
        return 0 if self._key is None else _MAC_BYTES

    def value(self, address: BlockAddress, payload: memoryview) -> bytes:
        """Return the complete value to store for a block."""
        header = encode_header(self._space, address, payload)
        return b"".join((header, payload, self._mac(header, payload)))

    def open(self, value: bytes, address: BlockAddress, into: memoryview) -> bool:
        """Verify the value of a block and copy its payload into `into`.

        The MAC is verified before anything else.

        Returns:
            False if the value is invalid or belongs to another block.
        """
        start = header_bytes(len(address.tokens) // 4)
        end = start + into.nbytes
        view = memoryview(value)
        if len(value) != end + self.mac_bytes or not hmac.compare_digest(
            self._mac(view[:end]), view[end:]
        ):
            return False
        header = decode_header(view[:start])
        if header is None or header.space != self._space or header.address != address:
            return False
        if not is_intact(header, view[start:end]):
            return False
        into[:] = view[start:end]
        return True

    def _mac(self, *parts: bytes | memoryview) -> bytes:
        if self._key is None:
            return b""
        digest = hashlib.blake2b(key=self._key, digest_size=_MAC_BYTES, person=b"kvboost-edge rec")
        for part in parts:
            digest.update(part)
        return digest.digest()


def _mac_key(secret: str) -> bytes:
    return hashlib.blake2b(
        secret.encode("utf-8", "surrogatepass"), person=b"kvboost-edge key"
    ).digest()


def _id_of(key: bytes) -> str:
    return hashlib.blake2b(key, digest_size=4, person=b"kvboost-edge id").hexdigest()


def stored_bytes(seal: Seal, address: BlockAddress, payload_bytes: int) -> int:
    """Return the length of a block's value, in bytes."""
    return header_bytes(len(address.tokens) // 4) + payload_bytes + seal.mac_bytes


def value_bytes_at(seal: Seal, head: bytes) -> int:
    """Return a value's unverified length from its length fields, or 0 if they are invalid."""
    if len(head) != _LENGTHS.size:
        return 0
    header, _, payload = _LENGTHS.unpack(head)
    length = header + payload + seal.mac_bytes
    return length if length <= _LONGEST_VALUE else 0


def piece_lengths(value_bytes: int) -> list[int]:
    """Return the lengths of a value's pieces, which are nearly equal and at most 1 MiB."""
    # Redis serves one command at a time, so a long value would block other clients.
    count = max(1, -(-value_bytes // PIECE_BYTES))
    step = -(-value_bytes // count)
    return [min(step, value_bytes - start) for start in range(0, value_bytes, step)]


def pieces_of(value: bytes) -> list[memoryview]:
    """Split a value into its pieces."""
    ends = list(itertools.accumulate(piece_lengths(len(value))))
    view = memoryview(value)
    return [view[start:end] for start, end in zip([0, *ends], ends, strict=False)]
