"""Duplicate blocks: published blocks with the content of blocks that tables hold for themselves.

A table's own block may have an equal that is published already: the one it was copied from, or one
that was there while the table computed its own, because its state was missing or somebody else
computed the same. What the table publishes behind it hangs on that equal. So a table that uses the
cache goes over to it once its own block is full: all it holds can be found as long as it lives. One
that does not use the cache reads nothing but what it computed, and keeps its own.
"""

from __future__ import annotations

from kvboost_edge.kvcache.block_contents import BlockContents
from kvboost_edge.kvcache.block_pool import BlockPool
from kvboost_edge.kvcache.block_table import BlockTable, PrefixEntry
from kvboost_edge.kvcache.prefix_index import PrefixIndex

__all__ = ["DuplicateBlocks", "standing_for"]


def standing_for(table: BlockTable, index: int, published: PrefixIndex) -> int | None:
    """The published block with the content of a table's block: itself, or its duplicate; None where
    there is none.
    """
    if index >= table._num_chained:
        return None
    if published.entry(table.block_ids[index]) is not None:
        return table.block_ids[index]
    duplicate, entry = table._duplicates.get(index, (-1, None))
    return duplicate if entry is not None and published.entry(duplicate) == entry else None


class DuplicateBlocks:
    """Those of one manager's tables. `released`: where ids of blocks go that are freed with nothing
    to match.
    """

    __slots__ = ("_are_apart", "_content", "_index", "_pool", "_released")

    def __init__(
        self, index: PrefixIndex, pool: BlockPool, content: BlockContents, released: dict[int, None]
    ) -> None:
        self._index = index
        self._pool = pool
        self._content = content
        self._released = released
        self._are_apart = False

    def keep_apart(self) -> None:
        """From here on no table goes over to a duplicate: equal tokens do not mean equal
        content.
        """
        self._are_apart = True

    def note(self, table: BlockTable, index: int, block_id: int, entry: PrefixEntry) -> None:
        """Published block `block_id` has the content of the table's own block."""
        if block_id != table.block_ids[index]:
            table._duplicates[index] = (block_id, entry)

    def adopt(self, table: BlockTable, num_full: int) -> int:
        """Let a table that uses the cache share the duplicates of its first `num_full` blocks, all
        computed, and give its own back; where a duplicate was evicted meanwhile, its own block
        takes that one's place. How many blocks changed.
        """
        if not table._duplicates or not table._shares or table.spans or self._are_apart:
            return 0
        indices = sorted(index for index in table._duplicates if index < num_full)
        for index in indices:
            block_id, entry = table._duplicates.pop(index)
            if self._index.entry(block_id) != entry:
                found = self._index.find(entry.prefix_hash, entry.tokens, entry.parent_serial)
                if found is None:
                    self._index.restore(table.block_ids[index], entry)
                    self._content.note_published(table.block_ids[index])
                    continue
                block_id = found
            self._replace(table, index, block_id)
        return len(indices)

    def _replace(self, table: BlockTable, index: int, block_id: int) -> None:
        entry = self._index.entry(block_id)
        own = table.block_ids[index]
        assert entry is not None  # it is published
        self._pool.touch(block_id)
        table.block_ids[index] = block_id
        if index == table._num_chained - 1:
            table._chain_serial = entry.serial
        self._pool.release(own, matchable=False, owner=table.owner)
        if not self._pool.ref_count(own):
            self._released[own] = None

    def keep(self, table: BlockTable, index: int) -> None:
        """The table gives its own block back. The blocks after it were matched through its
        duplicate, which is to outlive them.
        """
        duplicate, entry = table._duplicates.get(index, (-1, None))
        if entry is not None and self._index.entry(duplicate) == entry:
            self._pool.refresh(duplicate)
