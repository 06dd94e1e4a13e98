"""An n-gram index over the latest tokens of many texts, for prompt-lookup speculative decoding.

A ring buffer holds the tokens of all texts, one text after another. A table maps the hash of GRAM
consecutive tokens to the position after their latest occurrence. `find_end` compares the tokens
too, so a hash collision only costs a missed draft.

Positions count all tokens ever appended and never wrap. A position that is too old therefore shows
that its tokens have been overwritten.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.signature import array

__all__ = ["GRAM", "Ring", "append_entry", "append_tokens", "find_end", "find_entry", "new_ring"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

GRAM = 8
"""Length of an n-gram in tokens. Shorter n-grams match too many texts by chance."""

_MULTIPLIER = 0x9E3779B97F4A7C1


class Ring(NamedTuple):
    """The ring buffer and its hash table.

    Attributes:
        total: int64 [1], number of tokens ever appended.
        tokens: int32 [room]; the token at position p is at index p % room.
        heads: int64 [room], positions by hash; 0 marks an empty slot.
    """

    total: Longs
    tokens: Ints
    heads: Longs

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self)


def new_ring(room: int) -> Ring:
    """Return an empty ring for `room` tokens, a power of two; it takes 12 bytes per token."""
    return Ring(np.zeros(1, np.int64), np.zeros(room, np.int32), np.zeros(room, np.int64))


@kernel
def _hash(tokens: Ints, stop: int, mask: int, heads: Longs) -> int:
    """Return the slot in `heads` for the GRAM tokens before position `stop`."""
    mixed = 0
    for i in range(GRAM):
        mixed = (mixed ^ tokens[(stop - GRAM + i) & mask]) * _MULTIPLIER
        mixed ^= mixed >> 29
    return mixed & (len(heads) - 1)


@kernel
def append_tokens(new: Ints, total: Longs, tokens: Ints, heads: Longs) -> None:
    """Append tokens to a ring, passed as the fields of `Ring`."""
    mask = len(tokens) - 1
    for token in new:
        tokens[total[0] & mask] = token
        total[0] += 1
        if total[0] >= GRAM:
            heads[_hash(tokens, total[0], mask, heads)] = total[0]


@kernel
def find_end(tail: Ints, found: Longs, total: Longs, tokens: Ints, heads: Longs) -> None:
    """Find the latest position in the ring where the last tokens of `tail` occur.

    Args:
        tail: int32 [n], n >= GRAM.
        found: int64 [2], written: the number of matching tokens (0, or at least GRAM) and the
            position after them.
        total: see `Ring`.
        tokens: see `Ring`.
        heads: see `Ring`.
    """
    found[0] = found[1] = 0
    mask = len(tokens) - 1
    end = heads[_hash(tail[len(tail) - GRAM :], GRAM, GRAM - 1, heads)]
    if end == 0 or end >= total[0]:  # not found, or no token follows it yet
        return
    oldest = max(0, total[0] - len(tokens))
    length = 0
    while length < len(tail) and end - length > oldest:
        if tokens[(end - 1 - length) & mask] != tail[len(tail) - 1 - length]:
            break
        length += 1
    if length >= GRAM:
        found[0] = length
        found[1] = end


_INTS = array("int32")
_LONGS = array("int64")
append_entry = KernelEntry(append_tokens, _INTS, _LONGS, _INTS, _LONGS)
find_entry = KernelEntry(find_end, _INTS, _LONGS, _LONGS, _INTS, _LONGS)
"""Entries of `append_tokens` and `find_end` for ahead-of-time compilation."""
