"""Log of prefixes that entered or left the cache, for cache-aware routers."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvboost_edge.kvcache.block_table import PrefixEntry
from kvboost_edge.kvcache.hashing import state_hash
from kvboost_edge.kvcache.prefix_index import PrefixIndex
from kvboost_edge.kvcache.recurrent.slots import StateSlots

__all__ = ["CacheEvents", "EventLog"]


class CacheEvents(NamedTuple):
    """Changes of the pool or of a tier, as 32-byte hashes of block prefixes and recurrent states.

    State hashes (see `state_hash`) occur only for hybrid models. No hash is in both tuples.

    Attributes:
        is_whole: whether `published` lists the whole contents. If so, the reader must discard all
            earlier events.
        published: hashes that changed since the last call and can be matched now.
        evicted: hashes that can no longer be matched. Some may never have been reported as
            published.
    """

    is_whole: bool
    published: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


class EventLog:
    """Log of changes to a `PrefixIndex` and its snapshots, for a single reader.

    Logging starts with the first `take`. The log holds at most `num_blocks` changed hashes. If more
    change, the next `take` returns the whole cache.

    Args:
        index: the prefix index.
        num_blocks: number of blocks in the pool.
        slots: snapshots of recurrent state, or None for models without recurrent layers.
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
        self._by_block: dict[int, bytes] | None = None  # None until the first `take`
        # Number of snapshots by state hash. Duplicate blocks may each have one.
        self._states: Counter[bytes] = Counter()
        self._changed: dict[bytes, None] = {}
        self._is_whole = True

    def take(self, whole: bool = False) -> CacheEvents:
        """Return the changes since the last call.

        The result lists the whole cache on the first call, after an overflow, or if `whole` is
        true.
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
        """Record that a block was published."""
        assert self._by_block is not None
        self._by_block[block_id] = entry.prefix_hash
        self._note(entry.prefix_hash)

    def left(self, block_id: int) -> None:
        """Record that a block is no longer published."""
        assert self._by_block is not None
        self._note(self._by_block.pop(block_id))

    def kept(self, block_id: int) -> None:
        """Record that a snapshot was taken after a published block."""
        state = self._state_of(block_id)
        self._states[state] += 1
        self._note(state)

    def dropped(self, block_id: int) -> None:
        """Record that a snapshot was dropped.

        This must be called before `left` for the same block.
        """
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
