"""What a scan reads and writes, as flat arrays. Importing this imports no compiler."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["HASH_BITS", "MODULUS", "MOST_TRIED", "NONE", "NUM_FIELDS", "SpanSearch", "SpanTables"]

HASH_BITS = 61
MODULUS = (1 << HASH_BITS) - 1
"""Prime. The span hash of tokens t_0 .. t_(n-1) is the sum of t_i * base^(n-1-i) modulo this: it
moves on by a token in two multiplications, and for a secret base two spans of 16 tokens agree with
a chance of 15 / 2^61 whoever made them.
"""

MOST_TRIED = 8
"""Blocks of equal tokens that are tried at one place, and children of a block: the newest of them.
"""

NONE = -1
"""In place of a block id."""

NUM_FIELDS = 4
"""Numbers of a run as a scan writes it: prompt_start, length, stored position of its first token,
blocks it touches.
"""

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.uint32]


class SpanTables(NamedTuple):
    """Blocks that can be found. All arrays are C-contiguous; those of links hold block ids or NONE.
    Where a scan passes this on, addresses stand in place of the arrays.

    Blocks of one root with equal tokens are a group, the newest of them leads it. Groups whose
    hashes meet in a slot are linked behind one another.

    Attributes:
        tokens: uint32 [num_blocks, block_size].
        hashes: int64 [num_blocks], span hashes cut to `hash_mask`.
        roots: int64 [num_blocks], number of the block's root.
        first_positions: int64 [num_blocks], position of a block's first token where it was
            computed.
        heads: int32 [num_slots], leader of the first group in slot (hash + root) % num_slots; a
            power of two.
        next_groups: int32 [num_blocks], of a leader: that of the next group in its slot.
        older: int32 [num_blocks], the next older block of the same group.
        parents: int32 [num_blocks], the block before it in its context.
        first_children: int32 [num_blocks], the newest of the blocks after it.
        older_siblings: int32 [num_blocks], the next older of those with the same parent.
        block_size: int.
        slot_mask: int, num_slots - 1.
        base: int, in [2^32, MODULUS).
        last_power: int, base^(block_size - 1) modulo MODULUS.
        hash_mask: int, MODULUS; less where hashes have to collide.
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
    """What is searched for; in a scan with addresses, as `SpanTables`.

    Attributes:
        tokens: uint32 [num_tokens], the prompt.
        hashes: int64 [num_tokens], written by the scan: the hash of the block_size tokens that
            begin at each place.
        start, stop: tokens [start, stop) may be covered; 0 <= start <= stop <= num_tokens.
        root: number of the root whose blocks count.
        min_tokens: shorter runs are passed over.
    """

    tokens: Tokens
    hashes: Longs
    start: int
    stop: int
    root: int
    min_tokens: int
