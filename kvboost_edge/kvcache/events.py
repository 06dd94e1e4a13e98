"""Which prefixes came to the pool and which left it since somebody last asked."""

from __future__ import annotations

from typing import NamedTuple

from kvboost_edge.kvcache.block_table import PrefixEntry
from kvboost_edge.kvcache.prefix_index import PrefixIndex

__all__ = ["CacheEvents", "EventLog"]


class CacheEvents(NamedTuple):
    """Prefix hashes of blocks, 32 bytes each; one is in at most one of the two.

    is_whole    `published` is all that can be found now; what was told before is void
    published   can be found now, and changed since the events before these
    evicted     cannot be found now; some may never have been told of
    """

    is_whole: bool
    published: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


class EventLog:
    """What changed in a `PrefixIndex`, for one asker. Watches nothing until it is asked for the first time.

    At most as many changed hashes are remembered as there are blocks; with more, the next answer is whole.
    """

    __slots__ = ("_by_block", "_changed", "_index", "_is_whole", "_max_changes")

    def __init__(self, index: PrefixIndex, num_blocks: int) -> None:
        self._index, self._max_changes = index, num_blocks
        self._by_block: dict[int, bytes] | None = None  # None: nobody has asked
        self._changed: dict[bytes, None] = {}
        self._is_whole = True

    def take(self, whole: bool = False) -> CacheEvents:
        """What changed since the last call; all there is at the first one, if more changed than is remembered, or if
        `whole` is asked for."""
        if self._by_block is None:
            self._by_block = {}
            self._index.watch(self)
        changed, self._changed = self._changed, {}
        if whole or self._is_whole:
            self._is_whole = False
            return CacheEvents(True, tuple(self._index.hashes()), ())
        found = {prefix_hash: prefix_hash in self._index for prefix_hash in changed}
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

    def _note(self, prefix_hash: bytes) -> None:
        if self._is_whole:
            return
        self._changed[prefix_hash] = None
        if len(self._changed) > self._max_changes:
            self._changed.clear()
            self._is_whole = True
