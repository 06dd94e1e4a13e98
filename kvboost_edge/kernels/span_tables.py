"""Inputs and outputs of a span search as flat arrays.

Importing this module does not import the compiler.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["HASH_BITS", "MODULUS", "MOST_TRIED", "NONE", "NUM_FIELDS", "SpanSearch", "SpanTables"]

HASH_BITS = 61
MODULUS = (1 << HASH_BITS) - 1
"""A Mersenne prime, the modulus of span hashes.

The span hash of tokens t_0 .. t_(n-1) is the sum of t_i * base^(n-1-i). Moving the span by one
token takes two multiplications. If the base is secret, two different spans of 16 tokens collide
with probability 15 / 2^61.
"""

MOST_TRIED = 8
"""Maximum number of equal blocks tried at one position, and of children per block, newest first."""

NONE = -1
"""Marks a missing block id."""

NUM_FIELDS = 4
"""Fields of a run: prompt_start, length, stored position of its first token, blocks touched."""

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.uint32]


class SpanTables(NamedTuple):
    """The blocks that a search can find.

    All arrays are C-contiguous. Arrays of links hold block ids or NONE. Blocks of one root with
    equal tokens form a group, led by the newest block. Groups in the same hash slot are chained.
    Inside the kernel, addresses replace the arrays.

    Attributes:
        tokens: uint32 [num_blocks, block_size].
        hashes: int64 [num_blocks], span hashes & hash_mask.
        roots: int64 [num_blocks], number of the block's root.
        first_positions: int64 [num_blocks], position of the block's first token when its KV was
            computed.
        heads: int32 [num_slots], leader of the first group in slot (hash + root) % num_slots.
            num_slots is a power of two.
        next_groups: int32 [num_blocks]; for a leader, the leader of the next group in its slot.
        older: int32 [num_blocks], the next older block of the group.
        parents: int32 [num_blocks], the block before it in its context.
        first_children: int32 [num_blocks], the newest block that follows it.
        older_siblings: int32 [num_blocks], the next older block with the same parent.
        block_size: tokens per block.
        slot_mask: num_slots - 1.
        base: base of the hash, in [2^32, MODULUS).
        last_power: base^(block_size - 1) modulo MODULUS.
        hash_mask: MODULUS; smaller in tests that need collisions.
    """

    tokens: Tokens
    hashes: Longs
    roots: Longs
    first_positions: Longs
    heads: Ints
    next_groups: Ints
    older: Ints
    parents: Ints
    first_children: Ints
    older_siblings: Ints
    block_size: int
    slot_mask: int
    base: int
    last_power: int
    hash_mask: int


class SpanSearch(NamedTuple):
    """The prompt to search; inside the kernel, addresses replace the arrays.

    Attributes:
        tokens: uint32 [num_tokens], the prompt.
        hashes: int64 [num_tokens], written: hash of the block_size tokens that start at each index.
        start: first token that a run may cover; start >= 0.
        stop: end of the tokens that a run may cover; start <= stop <= num_tokens.
        root: number of the root whose blocks may match.
        min_tokens: minimum length of a reported run.
    """

    tokens: Tokens
    hashes: Longs
    start: int
    stop: int
    root: int
    min_tokens: int
