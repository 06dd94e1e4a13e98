"""An online suffix automaton that finds the longest suffix of a text that occurred earlier in it.

The algorithm is from Blumer et al. (1985), "The smallest automaton recognizing the subwords of a
text". The automaton has at most two states and three edges per token and takes amortized constant
time per token. All edges are in one open-addressed hash table. The edges of each state are also
chained, because splitting a state copies them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.signature import array

__all__ = ["Automaton", "automaton_bytes", "extend", "extend_entry", "new_automaton"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

NUM_TOKENS, NUM_STATES, LAST, MATCH_LENGTH, MATCH_END = range(5)
"""Indices in `Automaton.counts`.

MATCH_LENGTH is the length of the longest suffix of the text that occurred earlier. MATCH_END is the
position after the latest known occurrence of that suffix.
"""

_EMPTY = -1
_NONE = -1
_EDGES_PER_TOKEN = 4  # hash slots per token; at most three are used
# Maximum number of suffixes whose latest position is updated per token. Without a limit, a run of
# one repeated token would update all of them.
_MOST_UPDATED = 64


class Automaton(NamedTuple):
    """The arrays of one text's automaton; see `new_automaton`.

    Attributes:
        counts: int64 [5], indexed by NUM_TOKENS to MATCH_END.
        lengths: int32 [2 * room], length in tokens of each state's longest string.
        links: int32 [2 * room], suffix links.
        ends: int32 [2 * room], the position after the latest known occurrence of each state's
            strings.
        first_edges: int32 [2 * room], slot of each state's first edge.
        keys: int64 [4 * room], state * 2^32 + token of each edge.
        targets: int32 [4 * room], target state of each edge.
        next_edges: int32 [4 * room], slot of the next edge of the same state.
    """

    counts: Longs
    lengths: Ints
    links: Ints
    ends: Ints
    first_edges: Ints
    keys: Longs
    targets: Ints
    next_edges: Ints

    @property
    def room(self) -> int:
        """Capacity of the automaton in tokens."""
        return len(self.lengths) // 2

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self)


def automaton_bytes(room: int) -> int:
    """Return the size in bytes of an automaton for `room` tokens."""
    return 96 * room + 40


def new_automaton(room: int) -> Automaton:
    """Return an empty automaton for up to `room` tokens, a power of two; 96 bytes per token."""
    states = 2 * room
    slots = _EDGES_PER_TOKEN * room
    links = np.full(states, _NONE, np.int32)
    counts = np.zeros(5, np.int64)
    counts[NUM_STATES] = 1
    return Automaton(
        counts,
        np.zeros(states, np.int32),
        links,
        np.zeros(states, np.int32),
        np.full(states, _NONE, np.int32),
        np.full(slots, _EMPTY, np.int64),
        np.empty(slots, np.int32),
        np.empty(slots, np.int32),
    )


@kernel
def _slot(keys: Longs, state: int, token: int) -> Any:
    """Return the slot of an edge, or the empty slot where the edge would be inserted."""
    key = (state << 32) | token
    mask = len(keys) - 1
    mixed = key * 0x9E3779B97F4A7C1
    slot = (mixed ^ (mixed >> 29)) & mask
    while keys[slot] != key and keys[slot] != _EMPTY:
        slot = (slot + 1) & mask
    return slot


@kernel
def _add(
    first_edges: Ints,
    keys: Longs,
    targets: Ints,
    next_edges: Ints,
    slot: int,
    state: int,
    token: int,
) -> None:
    """Add an edge in an empty slot; the caller must set its target."""
    keys[slot] = (state << 32) | token
    next_edges[slot] = first_edges[state]
    first_edges[state] = slot


@kernel
def _split(
    counts: Longs,
    lengths: Ints,
    links: Ints,
    ends: Ints,
    first_edges: Ints,
    keys: Longs,
    targets: Ints,
    next_edges: Ints,
    state: int,
    length: int,
) -> Any:
    """Clone a state and its edges for strings of up to `length` tokens; return the clone."""
    clone = counts[NUM_STATES]
    counts[NUM_STATES] = clone + 1
    lengths[clone] = length
    links[clone] = links[state]
    ends[clone] = ends[state]
    edge = first_edges[state]
    while edge != _NONE:
        token = keys[edge] & 0xFFFFFFFF
        slot = _slot(keys, clone, token)
        _add(first_edges, keys, targets, next_edges, slot, clone, token)
        targets[slot] = targets[edge]
        edge = next_edges[edge]
    links[state] = clone
    return clone


@kernel
def extend(
    tokens: Ints,
    counts: Longs,
    lengths: Ints,
    links: Ints,
    ends: Ints,
    first_edges: Ints,
    keys: Longs,
    targets: Ints,
    next_edges: Ints,
) -> None:
    """Append tokens to the text; the automaton must have room for them.

    The arguments after `tokens` are the fields of `Automaton`, updated in place.

    Args:
        tokens: int32 [n], ids in [0, 2^31).
        counts: int64 [5].
    """
    for token in tokens:
        position = counts[NUM_TOKENS]
        state = counts[LAST]
        new = counts[NUM_STATES]
        counts[NUM_STATES] = new + 1
        lengths[new] = lengths[state] + 1
        slot = 0
        while state != _NONE:
            slot = _slot(keys, state, token)
            if keys[slot] != _EMPTY:
                break
            _add(first_edges, keys, targets, next_edges, slot, state, token)
            targets[slot] = new
            state = links[state]
        found = 0
        if state != _NONE:
            found = targets[slot]
            if lengths[found] > lengths[state] + 1:
                other = found
                found = _split(
                    counts,
                    lengths,
                    links,
                    ends,
                    first_edges,
                    keys,
                    targets,
                    next_edges,
                    other,
                    lengths[state] + 1,
                )
                while state != _NONE:
                    slot = _slot(keys, state, token)
                    if targets[slot] != other:
                        break
                    targets[slot] = found
                    state = links[state]
        links[new] = found
        counts[MATCH_LENGTH] = lengths[found]
        counts[MATCH_END] = ends[found]
        ends[new] = position + 1
        for _ in range(_MOST_UPDATED):
            if found <= 0:
                break
            ends[found] = position + 1
            found = links[found]
        counts[NUM_TOKENS] = position + 1
        counts[LAST] = new


_INTS = array("int32")
_LONGS = array("int64")
extend_entry = KernelEntry(extend, _INTS, _LONGS, _INTS, _INTS, _INTS, _INTS, _LONGS, _INTS, _INTS)
"""Entry of `extend` for ahead-of-time compilation."""
