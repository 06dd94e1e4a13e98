"""Spans in a table: blocks of other contexts at their new positions, and the table's own blocks between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvboost_edge.errors import CacheCorruption
from kvboost_edge.kvcache.block_pool import BlockPool
from kvboost_edge.kvcache.block_table import BlockTable, Span, TablePart
from kvboost_edge.kvcache.claims import Claims
from kvboost_edge.kvcache.prefix_index import PrefixIndex, Watcher

__all__ = ["Spans"]


class Spans:
    """Places spans in tables of one manager.

    take(count, owner)   takes free blocks for a table
    num_tokens           tokens shared so, all tables together
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        claims: Claims,
        take: Callable[[int, bytes], list[int]],
        block_size: int,
    ) -> None:
        self._pool, self._index, self._claims, self._take, self._size = pool, index, claims, take, block_size
        self.num_tokens = 0

    def watch(self, watcher: Watcher) -> None:
        """Tell it which blocks can be shared: those that are published, whose content their tokens and all before them
        alone determine."""
        self._index.watch(watcher)

    def place(self, table: BlockTable, spans: Sequence[Span], num_tokens: int, spare: int) -> bool:
        """Let a table that was just opened share spans, and take blocks of its own for all else of its `num_tokens`
        tokens. False, and no change, where that takes more than `spare` free blocks.

        A span begins whole blocks behind the one before it, the first behind what the table found (CacheCorruption).
        From the first one on nothing is published; what the table promised there it promises no more.
        """
        shared = [block_id for span in spans for block_id in span.block_ids]
        own = self._num_own(table, spans, num_tokens)
        idle = sum(not self._pool.ref_count(block_id) for block_id in dict.fromkeys(shared))
        if own + idle > min(spare, self._pool.num_free):
            return False
        for block_id in shared:
            self._pool.touch(block_id)
        self._lay_out(table, spans, self._take(own, table.owner))
        for index in [index for index in table._claims if index >= spans[0].start // self._size]:
            self._claims.drop(table, index)
        num_shared = sum(span.stop - span.start for span in spans)
        self.num_tokens += num_shared
        table._uncounted_misses = max(0, table._uncounted_misses - num_shared)
        return True

    def _num_own(self, table: BlockTable, spans: Sequence[Span], num_tokens: int) -> int:
        """Blocks of its own that the table needs: for what is before each span, and for what follows the last one."""
        count, position = 0, len(table) * self._size
        for span in spans:
            blocks, rest = divmod(span.start - position, self._size)
            room = span.first_position + len(span.block_ids) * self._size
            inside = span.first_position <= span.start < span.stop <= room and span.stop < num_tokens
            if blocks < 0 or rest or not inside or not span.start:
                raise CacheCorruption(f"{span} does not fit behind position {position} of {num_tokens} tokens")
            count, position = count + blocks, span.stop
        return count + -(-(num_tokens - position) // self._size)

    def _lay_out(self, table: BlockTable, spans: Sequence[Span], own: list[int]) -> None:
        """Enter spans and own blocks as parts of the table."""
        position, taken = len(table) * self._size, 0
        for span in spans:
            count = (span.start - position) // self._size
            if count and table.spans:
                table.parts.append(TablePart(len(table), position, position, 0))
            table.block_ids += own[taken : taken + count]
            taken += count
            table.parts.append(TablePart(len(table), span.first_position, span.start, span.delta))
            table.block_ids += span.block_ids
            table.spans = (*table.spans, span)
            position = span.stop
        table.parts.append(TablePart(len(table), position, position, 0))
        table.block_ids += own[taken:]
