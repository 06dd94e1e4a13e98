"""Prefix hashes: a SHA-256 chain over blocks of tokens.

The root of a chain covers everything else that affects the KV: model, KV format, RoPE, adapter and
tenant. Python's `hash()` is unsuitable, because it is salted per process and has only 64 bits.
SHA-256 takes about 0.6 us per 16 tokens.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvboost_edge.errors import RequestError

__all__ = [
    "HASH_BYTES",
    "STATE_MASK",
    "STATE_WORD",
    "TOKEN_BYTES",
    "BlockAddress",
    "HashFn",
    "LoneRoot",
    "chain_hash",
    "decode_tokens",
    "encode_tokens",
    "known_hash",
    "narrowed_root",
    "prefix_hashes",
    "root_hash",
    "shared_root",
    "state_hash",
]

HashFn = Callable[[bytes, bytes], bytes]

TOKEN_BYTES = 4
HASH_BYTES = 32
_MAX_TOKEN_ID = 2**32 - 1
_SELECTION_VERSION = 3  # increment it when sparse prefill attends to other blocks
_WORDS = struct.Struct("<4Q")

STATE_WORD = int.from_bytes(hashlib.sha256(b"kvboost-edge state 1\n").digest()[:8], "little")
STATE_MASK = 2**64 - 256


def state_hash(prefix_hash: bytes) -> bytes:
    """Return the 32-byte hash that identifies the recurrent state after a block.

    Each of its four little-endian u64 words is `(w ^ STATE_WORD) & STATE_MASK`, where w is the same
    word of `prefix_hash`. No block has a state hash as its prefix hash.
    """
    # A router that knows one word of a block's hash can compute the same word of the state's hash.
    # The last 8 bits are 0, because routers short of memory keep only hashes that end in zero bits.
    # States must survive this sampling, since one state is worth many blocks.
    return _WORDS.pack(*[(word ^ STATE_WORD) & STATE_MASK for word in _WORDS.unpack(prefix_hash)])


class BlockAddress(NamedTuple):
    """Content address of a full block, in the pool and in every tier.

    Blocks with the same address hold bit-identical KV.

    Attributes:
        prefix_hash: SHA-256 chain hash of the block and all blocks before it, 32 bytes.
        parent_hash: prefix hash of the previous block, or the root for the first block, 32 bytes.
        tokens: the block's own tokens, little-endian u32.
    """

    prefix_hash: bytes
    parent_hash: bytes
    tokens: bytes

    @property
    def state_address(self) -> BlockAddress:
        """Address of the recurrent state after the block. Tiers store the state like a block."""
        return BlockAddress(state_hash(self.prefix_hash), self.prefix_hash, self.tokens)


class LoneRoot(bytes):
    """Root of chains for text that is computed on its own and shared at other positions.

    No prompt starts with this root, so these blocks never match as a prefix. The first `num_hidden`
    blocks of a chain only provide context and are never shared. Later blocks can be shared by
    prompts whose root is `user`.

    Attributes:
        user: root of the prompts that may share the blocks.
        num_hidden: number of blocks at the start of a chain that are never shared.
    """

    user: bytes
    num_hidden: int

    @classmethod
    def of(cls, user: bytes, num_hidden: int) -> LoneRoot:
        """Return the root for this user root and number of hidden blocks."""
        root = cls(narrowed_root(user, "lone", str(num_hidden)))
        root.user = user
        root.num_hidden = num_hidden
        return root

    def shared_with(self, index: int) -> bytes:
        """Return the root whose prompts may share block `index`.

        For a hidden block, the result is this root itself.
        """
        return self.user if index >= self.num_hidden else self


def root_hash(
    *, model_fingerprint: str, kv_format: str, rope: str = "", adapter: str = "", tenant: str = ""
) -> bytes:
    """Return the 32-byte root of all chains with these settings."""
    # Each field is hashed with its name and length, so different settings have different encodings.
    fields = {
        "model_fingerprint": model_fingerprint,
        "kv_format": kv_format,
        "rope": rope,
        "adapter": adapter,
        "tenant": tenant,
    }
    return _digest_of(b"kvboost-edge prefix root 1\n", fields)


def narrowed_root(root: bytes, name: str, value: str) -> bytes:
    """Return a 32-byte root derived from `root` for requests with this `value` of `name`."""
    return _digest_of(b"kvboost-edge narrowed root 1\n" + root, {name: value})


def shared_root(
    root: bytes, tenant: str | None, cache_salt: str | None, prefill: str = "exact"
) -> bytes:
    """Return the root for prompts with this tenant, cache salt and prefill.

    Without a tenant or salt (None or ""), the result for exact prefill is the engine's `root`.
    """
    narrowing = {"tenant": tenant, "cache_salt": cache_salt}
    if prefill != "exact":
        narrowing["prefill"] = f"{prefill} {_SELECTION_VERSION}"
    for name, value in narrowing.items():
        root = narrowed_root(root, name, value) if value else root
    return root


def _digest_of(start: bytes, fields: Mapping[str, str]) -> bytes:
    digest = hashlib.sha256(start)
    for name, value in fields.items():
        # With surrogatepass, a tenant name from undecodable header bytes still gets its own root.
        for part in (name.encode(), value.encode("utf-8", "surrogatepass")):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


def chain_hash(parent: bytes, tokens_le_u32: bytes) -> bytes:
    """Return a block's prefix hash: the SHA-256 of its parent's hash and its own tokens."""
    return hashlib.sha256(parent + tokens_le_u32).digest()


def prefix_hashes(token_ids: Sequence[int], root: bytes, block_size: int) -> tuple[bytes, ...]:
    """Return the 32-byte prefix hashes of a prompt's full blocks, in order.

    Raises:
        RequestError: a token id is not an integer in [0, 2^32).
    """
    data = encode_tokens(token_ids)
    size = block_size * TOKEN_BYTES
    found: list[bytes] = []
    parent = root
    for start in range(0, len(data) - size + 1, size):
        parent = chain_hash(parent, data[start : start + size])
        found.append(parent)
    return tuple(found)


def known_hash(known: bytes, index: int) -> bytes:
    """Return hash `index` of concatenated 32-byte hashes, or b"" beyond the end.

    The hashes come from the caller and are not verified. Use them only to look up blocks whose
    tokens and parents are then compared. Never publish a block or load one from a tier under such a
    hash.
    """
    return known[index * HASH_BYTES : (index + 1) * HASH_BYTES]


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids encoded as little-endian u32, 4 bytes each.

    Raises:
        RequestError: a token id is not an integer in [0, 2^32).
    """
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError(
            f"token ids must be integers in [0, {_MAX_TOKEN_ID}]: {error}"
        ) from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def decode_tokens(data: bytes) -> list[int]:
    """Return the token ids encoded in `data`, the inverse of `encode_tokens`."""
    packed = array("I", data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
