"""Prefix hashes: a SHA-256 chain over blocks of tokens, rooted in everything else that shapes keys
and values.

Python's `hash()` is never used: it is salted per process and 64 bits wide. SHA-256 takes about 0.6
us per 16 tokens.
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
_WORDS = struct.Struct("<4Q")

STATE_WORD = int.from_bytes(hashlib.sha256(b"kvboost-edge state 1\n").digest()[:8], "little")
STATE_MASK = 2**64 - 256


def state_hash(prefix_hash: bytes) -> bytes:
    """What the state behind a block is known by outside the pool; 32 bytes that no block's chain
    has: each of its four words, little-endian u64, is the block's exclusive-or STATE_WORD, and
    STATE_MASK.

    So who knows a block by one word, as a router does, knows its state, and tells the two apart.
    The last 8 bits are 0: of blocks whose word ends otherwise fewer are told of and remembered, and
    a state stands for many blocks.
    """
    return _WORDS.pack(*[(word ^ STATE_WORD) & STATE_MASK for word in _WORDS.unpack(prefix_hash)])


class BlockAddress(NamedTuple):
    """The content of a full block, to the bit, in the pool and in every tier.

    Equal addresses hold equal keys and values.

    Attributes:
        prefix_hash: 32 bytes: SHA-256 chain over the block and all before it.
        parent_hash: 32 bytes: that of the block before it; of the first block, the root of its
            chain.
        tokens: the block's own tokens, little-endian u32.
    """

    prefix_hash: bytes
    parent_hash: bytes
    tokens: bytes

    @property
    def state_address(self) -> BlockAddress:
        """The address of the recurrent state after the block, which tiers keep as one more block
        after it.
        """
        return BlockAddress(state_hash(self.prefix_hash), self.prefix_hash, self.tokens)


class LoneRoot(bytes):
    """Where the chains of texts start that were computed alone, to be shared at other positions.

    No prompt's chain starts here, so nothing of them is found as a prefix. Of each chain the first
    `num_hidden` blocks are context for what follows and are never shared; what follows is shared by
    prompts whose chains start from `user`.
    """

    user: bytes
    num_hidden: int

    @classmethod
    def of(cls, user: bytes, num_hidden: int) -> LoneRoot:
        """The root of such chains; equal ones have equal bytes."""
        root = cls(narrowed_root(user, "lone", str(num_hidden)))
        root.user = user
        root.num_hidden = num_hidden
        return root

    def shared_with(self, index: int) -> bytes:
        """Whose prompts may share block `index` of a chain at another position; this root itself:
        nobody's.
        """
        return self.user if index >= self.num_hidden else self


def root_hash(
    *, model_fingerprint: str, kv_format: str, rope: str = "", adapter: str = "", tenant: str = ""
) -> bytes:
    """Return the 32 bytes every chain of this model, KV format, rope setting, adapter and tenant
    starts from.

    Each field goes in behind its name and its length, so no two different settings encode to the
    same bytes.
    """
    fields = {
        "model_fingerprint": model_fingerprint,
        "kv_format": kv_format,
        "rope": rope,
        "adapter": adapter,
        "tenant": tenant,
    }
    return _digest_of(b"kvboost-edge prefix root 1\n", fields)


def narrowed_root(root: bytes, name: str, value: str) -> bytes:
    """Return the 32 bytes that chains start from when only requests of equal `value` under `name`
    may share them.
    """
    return _digest_of(b"kvboost-edge narrowed root 1\n" + root, {name: value})


def shared_root(root: bytes, tenant: str | None, cache_salt: str | None) -> bytes:
    """Where the chains of a tenant's prompts start; None or "": the engine's own `root`, no
    salt.
    """
    for name, value in (("tenant", tenant), ("cache_salt", cache_salt)):
        root = narrowed_root(root, name, value) if value else root
    return root


def _digest_of(start: bytes, fields: Mapping[str, str]) -> bytes:
    digest = hashlib.sha256(start)
    for name, value in fields.items():
        # surrogatepass: a tenant may come from undecodable header bytes and must still have a root
        # of its own
        for part in (name.encode(), value.encode("utf-8", "surrogatepass")):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


def chain_hash(parent: bytes, tokens_le_u32: bytes) -> bytes:
    """Return the 32-byte prefix hash of a full block: SHA-256 of its parent's hash and its own
    tokens.
    """
    return hashlib.sha256(parent + tokens_le_u32).digest()


def prefix_hashes(token_ids: Sequence[int], root: bytes, block_size: int) -> tuple[bytes, ...]:
    """The prefix hashes (32 bytes each) of the full blocks of a prompt, in order; RequestError for
    wrong ids.
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
    """Block `index` of a chain that somebody else hashed, 32 bytes a block in one piece; b"" beyond
    its end.

    Whoever takes it looks blocks up by it, and compares tokens and parents of what it finds: a
    wrong one finds nothing. Nothing may be named by it, neither a block that is published nor one
    that is read from a tier.
    """
    return known[index * HASH_BYTES : (index + 1) * HASH_BYTES]


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Return the ids as little-endian u32, 4 bytes each; RequestError for an id that is no integer
    in [0, 2^32).
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
    """The ids of `encode_tokens`."""
    packed = array("I", data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
