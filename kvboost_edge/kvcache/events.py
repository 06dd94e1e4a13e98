"""Which prefixes came to the pool and which left it since somebody last asked, and the states
behind them.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvboost_edge.kvcache.block_table import PrefixEntry
from kvboost_edge.kvcache.hashing import state_hash
from kvboost_edge.kvcache.prefix_index import PrefixIndex
from kvboost_edge.kvcache.recurrent.slots import StateSlots

__all__ = ["CacheEvents", "EventLog"]


class CacheEvents(NamedTuple):
    """Prefix hashes of blocks, and of the states behind some (`state_hash`) where the model keeps
    any; 32 bytes each. One is in at most one of the two.

    Attributes:
        is_whole: `published` is all that can be found now; what was told before is void.
        published: can be found now, and changed since the events before these.
        evicted: cannot be found now; some may never have been told of.
    """

    is_whole: bool
    published: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


class EventLog:
    """What changed in a `PrefixIndex`, and among the snapshots in `slots` (None: the model keeps no
    states), for one asker. Watches nothing until it is asked for the first time.

    At most as many changed hashes are remembered as there are blocks; with more, the next answer is
    whole.
    """

    __slots__ = (
        "_by_block",
        "_changed",
        "_index",
        "_is_whole",
        "_max_changes",
        "_slots",
        "_states",
    )

    def __init__(
        self, index: PrefixIndex, num_blocks: int, slots: StateSlots | None = None
    ) -> None:
        self._index = index
        self._max_changes = num_blocks
        self._slots = slots
        self._by_block: dict[int, bytes] | None = None  # None: nobody has asked
        self._states: Counter[bytes] = (
            Counter()
        )  # of those there are; blocks of one hash may have one each
        self._changed: dict[bytes, None] = {}
        self._is_whole = True

    def take(self, whole: bool = False) -> CacheEvents:
        """What changed since the last call; all there is at the first one, if more changed than is
        remembered, or if `whole` is asked for.
        """
        if self._by_block is None:
            self._by_block = {}
            self._index.watch(self)
            if self._slots is not None:
                self._slots.watch(self)
        changed = self._changed
        self._changed = {}
        if whole or self._is_whole:
            self._is_whole = False
            return CacheEvents(True, (*self._index.hashes(), *self._states), ())
        found = {one: one in self._index or one in self._states for one in changed}
        return CacheEvents(
            False,
            tuple(prefix_hash for prefix_hash, is_there in found.items() if is_there),
            tuple(prefix_hash for prefix_hash, is_there in found.items() if not is_there),
        )

    def entered(self, block_id: int, entry: PrefixEntry) -> None:
        """A block was published."""
        assert self._by_block is not None
        self._by_block[block_id] = entry.prefix_hash
        self._note(entry.prefix_hash)

    def left(self, block_id: int) -> None:
        """A block is published no more."""
        assert self._by_block is not None
        self._note(self._by_block.pop(block_id))

    def kept(self, block_id: int) -> None:
        """A state is kept behind a published block."""
        state = self._state_of(block_id)
        self._states[state] += 1
        self._note(state)

    def dropped(self, block_id: int) -> None:
        """It is kept no more; where its block goes too, that is told after it."""
        state = self._state_of(block_id)
        self._states[state] -= 1
        if not self._states[state]:
            del self._states[state]
        self._note(state)

    def _state_of(self, block_id: int) -> bytes:
        assert self._by_block is not None
        return state_hash(self._by_block[block_id])

    def _note(self, prefix_hash: bytes) -> None:
        if self._is_whole:
            return
        self._changed[prefix_hash] = None
        if len(self._changed) > self._max_changes:
            self._changed.clear()
            self._is_whole = True
