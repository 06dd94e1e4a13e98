"""A suffix automaton, built token by token: the longest end of a text that stood in it before, and
where.

The states of Blumer et al. (1985), "The smallest automaton recognizing the subwords of a text": at
most two for a token and three edges, each token in amortised constant time. Edges lie in one
open-addressed table; those of a state are chained, because a state that is split takes them along.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.core import types

from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.jit import kernel

__all__ = ["Automaton", "automaton_bytes", "extend", "extend_entry", "new_automaton"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

NUM_TOKENS, NUM_STATES, LAST, MATCH_LENGTH, MATCH_END = range(5)
"""Places in `Automaton.counts`. Of the longest end of the text that stood in it before: how many
tokens it has, at most all but the first, and the position behind the last of them where it stood,
the latest that is known.
"""

_EMPTY = -1
_NONE = -1
_EDGES_PER_TOKEN = 4  # slots; at most three are taken
# Of the shorter ends of a text so many learn where it stood last: in a run of one token all would.
_MOST_UPDATED = 64


class Automaton(NamedTuple):
    """All arrays of one text; see `new_automaton`.

    Attributes:
        counts: int64 [5], by the names above.
        lengths: int32 [2 * room], tokens of a state's longest string.
        links: int32 [2 * room], the state of its longest shorter end.
        ends: int32 [2 * room], the position behind where its strings stood last.
        first_edges: int32 [2 * room], a slot of the edges.
        keys: int64 [4 * room], state * 2^32 + token.
        targets: int32 [4 * room], the state an edge leads to.
        next_edges: int32 [4 * room], another slot of the same state.
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
        """Tokens it can take in all."""
        return len(self.lengths) // 2

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self)


def automaton_bytes(room: int) -> int:
    """What an automaton of that room takes."""
    return 96 * room + 40


def new_automaton(room: int) -> Automaton:
    """An automaton of no text, for one of up to `room` tokens, a power of two. 96 bytes a token."""
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
    """The slot of an edge, or the empty one where it belongs."""
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
    """A new edge in an empty slot; its target is set by the caller."""
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
    """A new state for the shorter strings, up to `length`, of a state, with its edges."""
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
    """Append tokens, ids in [0, 2^31), to the text of `Automaton(counts, …)`, which has room for
    them.
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


_INTS = types.Array(types.int32, 1, "C")
_LONGS = types.Array(types.int64, 1, "C")
extend_entry = KernelEntry(extend, _INTS, _LONGS, _INTS, _INTS, _INTS, _INTS, _LONGS, _INTS, _INTS)
"""What a sequence runs with each of its tokens."""
