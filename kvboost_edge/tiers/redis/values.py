"""A block as values of a server that others write to: the record, sealed with a keyed MAC, in
pieces of at most 1 MiB.

    value = header (tiers/record.py) + payload + MAC        keys  kvb:{space, 16 hex digits}:{prefix
    hash, hex}
                                                                  kvb:{…}:{…}:1, :2, … for the
                                                                  second piece and so on

The MAC is blake2b under a shared secret, over header and payload: whoever does not know the secret
can destroy a value, not forge one; one of another block, space or tenant fits its own header only.
A value of up to 1 MiB is one piece; a longer one is cut into the fewest equal pieces, so that none
blocks the server for long.
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
    "keys_of",
    "piece_lengths",
    "pieces_of",
    "stored_bytes",
    "value_bytes_at",
]

PIECE_BYTES = 1 << 20
_MAC_BYTES = 32
_LONGEST_VALUE = 4096 * PIECE_BYTES  # that is believed when it only says so
_LENGTHS = struct.Struct("<IIQ")
HEAD = (8, 23)
"""First and last byte of a value's field of lengths, as GETRANGE counts."""


class Seal:
    """Makes and checks values of one space. Without a secret there is no MAC: any writer of the
    server is believed.
    """

    def __init__(self, space: bytes, secret: str | None) -> None:
        self._space = space
        self._key = None if secret is None else _mac_key(secret)

    @property
    def mac_bytes(self) -> int:
        """Bytes behind the payload."""
        return 0 if self._key is None else _MAC_BYTES

    def value(self, address: BlockAddress, payload: memoryview) -> bytes:
        """The whole value of a block."""
        header = encode_header(self._space, address, payload)
        return b"".join((header, payload, self._mac(header, payload)))

    def open(self, value: bytes, address: BlockAddress, into: memoryview) -> bool:
        """Verify the MAC first, then that this is the block asked for; only then write its payload
        into `into`.
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


def stored_bytes(seal: Seal, address: BlockAddress, payload_bytes: int) -> int:
    """Length of the value of a block."""
    return header_bytes(len(address.tokens) // 4) + payload_bytes + seal.mac_bytes


def value_bytes_at(seal: Seal, head: bytes) -> int:
    """Length of the value whose field of lengths this is, as it says itself, unverified; 0 where it
    says nothing.
    """
    if len(head) != _LENGTHS.size:
        return 0
    header, _, payload = _LENGTHS.unpack(head)
    length = header + payload + seal.mac_bytes
    return length if length <= _LONGEST_VALUE else 0


def piece_lengths(value_bytes: int) -> list[int]:
    """How a value of that length is cut: no piece over 1 MiB, all but the last equal."""
    count = max(1, -(-value_bytes // PIECE_BYTES))
    step = -(-value_bytes // count)
    return [min(step, value_bytes - start) for start in range(0, value_bytes, step)]


def pieces_of(value: bytes) -> list[memoryview]:
    """The value, cut."""
    ends = list(itertools.accumulate(piece_lengths(len(value))))
    view = memoryview(value)
    return [view[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def keys_of(space: bytes, prefix_hash: bytes, value_bytes: int) -> list[str]:
    """Keys of the pieces of a value of that length, in their order."""
    first = f"kvb:{space[:8].hex()}:{prefix_hash.hex()}"
    return [first, *(f"{first}:{index}" for index in range(1, -(-value_bytes // PIECE_BYTES)))]
