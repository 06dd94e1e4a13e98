"""Duplicate blocks: private blocks of a table whose content equals that of a published block.

A duplicate arises in one of three ways: the block is a copy of a published block, the published
block could not be shared because its recurrent state was missing, or another table computed the
same tokens concurrently. Blocks that the table publishes later use the published block as their
parent.

A table that uses the cache replaces its own block with the published one. Its whole chain then
stays matchable while the table is live. The published block takes over KV of a drafter that it
lacks. A table that bypasses the cache keeps its own blocks.
"""

from __future__ import annotations

from kvboost_edge.kvcache.block_contents import BlockContents
from kvboost_edge.kvcache.block_pool import BlockPool
from kvboost_edge.kvcache.block_table import BlockTable, PrefixEntry
from kvboost_edge.kvcache.drafted_blocks import DraftedBlocks
from kvboost_edge.kvcache.prefix_index import PrefixIndex

__all__ = ["DuplicateBlocks", "published_equal"]


def published_equal(table: BlockTable, index: int, published: PrefixIndex) -> int | None:
    """Return the published block that has the content of a table's block, or None.

    The result is the table's own block if that is published, otherwise its duplicate.
    """
    if index >= table._num_hashed:
        return None
    if published.entry(table.block_ids[index]) is not None:
        return table.block_ids[index]
    duplicate, entry = table._duplicates.get(index, (-1, None))
    return duplicate if entry is not None and published.entry(duplicate) == entry else None


class DuplicateBlocks:
    """Tracks the duplicate blocks in the tables of one manager.

    Args:
        index: the prefix index.
        pool: the block pool.
        content: log of published blocks, to which new ones are added.
        released: ordered set that collects the ids of freed blocks that cannot be matched.
        drafted: record of the blocks that have KV of a drafter.
    """

    __slots__ = ("_content", "_drafted", "_index", "_is_disabled", "_pool", "_released")

    def __init__(
        self,
        index: PrefixIndex,
        pool: BlockPool,
        content: BlockContents,
        released: dict[int, None],
        drafted: DraftedBlocks,
    ) -> None:
        self._index = index
        self._pool = pool
        self._content = content
        self._released = released
        self._drafted = drafted
        self._is_disabled = False

    def keep_apart(self) -> None:
        """Stop replacing blocks with duplicates.

        Needed if blocks with equal tokens may have different contents.
        """
        self._is_disabled = True

    def note(self, table: BlockTable, index: int, block_id: int, entry: PrefixEntry) -> None:
        """Record published block `block_id` as the duplicate of a table's block `index`."""
        if block_id != table.block_ids[index]:
            table._duplicates[index] = (block_id, entry)

    def adopt(self, table: BlockTable, num_full: int) -> int:
        """Replace a table's blocks with their published duplicates.

        Only the first `num_full` blocks are considered. If a duplicate was evicted, the table's own
        block is published instead. Tables that bypass the cache or have spans are left unchanged.

        Returns:
            the number of blocks that were replaced or published.
        """
        if not table._duplicates or not table._shares or table.spans or self._is_disabled:
            return 0
        indices = sorted(index for index in table._duplicates if index < num_full)
        for index in indices:
            block_id, entry = table._duplicates.pop(index)
            if self._index.entry(block_id) != entry:
                # The duplicate was evicted. Use another equal block, or publish the table's own.
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
        assert entry is not None  # `block_id` is published
        self._pool.touch(block_id)
        self._drafted.merge(own, block_id)
        table.block_ids[index] = block_id
        if index == table._num_hashed - 1:
            table._chain_serial = entry.serial
        self._pool.release(own, matchable=False, owner=table.owner)
        if not self._pool.ref_count(own):
            self._released[own] = None

    def keep(self, table: BlockTable, index: int) -> None:
        """Mark a block's duplicate as recently used, before the table frees its own block."""
        # Lookups reach the table's later blocks through the duplicate, so it must outlive them.
        duplicate, entry = table._duplicates.get(index, (-1, None))
        if entry is not None and self._index.entry(duplicate) == entry:
            self._pool.refresh(duplicate)
