"""Spans in a table: blocks of other contexts at their new positions, and the table's own blocks
between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvboost_edge.errors import CacheCorruption
from kvboost_edge.kvcache.block_pool import BlockPool
from kvboost_edge.kvcache.block_table import WHOLE, BlockTable, Span, TableSegment
from kvboost_edge.kvcache.prefix_index import PrefixIndex, Watcher
from kvboost_edge.kvcache.prefix_sharing import Claims

__all__ = ["Spans", "own_blocks"]


class Spans:
    """Places spans in tables of one manager.

    take(count, owner)   takes free blocks for a table;  released: where ids of those freed with
                         nothing in them go
    num_tokens           tokens shared so since the start, by all tables whose hits and misses count
    num_cut_tokens       tokens of them that `cut` took out again: they are misses
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        claims: Claims,
        take: Callable[[int, bytes], list[int]],
        released: dict[int, None],
        block_size: int,
    ) -> None:
        self._pool = pool
        self._index = index
        self._claims = claims
        self._size = block_size
        self._take = take
        self._released = released
        self.num_tokens = self.num_cut_tokens = 0

    def watch(self, watcher: Watcher) -> None:
        """Tell it which blocks can be shared: those that are published, whose content their tokens
        and all before them alone determine.
        """
        self._index.watch(watcher)

    def place(
        self,
        table: BlockTable,
        spans: Sequence[Span],
        num_tokens: int,
        spare: int,
        *,
        num_reserved: int = 0,
    ) -> bool:
        """Let a table that was just opened share spans, and take blocks of its own for all else of
        its `num_tokens` tokens, and `num_reserved` for `cut`. False, and no change, where that
        takes more than `spare` free blocks.

        A span begins whole blocks behind the one before it, the first behind what the table found
        (CacheCorruption). From the first one on nothing is published; what the table promised there
        it promises no more.
        """
        shared = [block_id for span in spans for block_id in span.block_ids]
        own = self._num_own(table, spans, num_tokens)
        idle = sum(not self._pool.ref_count(block_id) for block_id in dict.fromkeys(shared))
        if own + idle + num_reserved > min(spare, self._pool.num_free):
            return False
        for block_id in shared:
            self._pool.touch(block_id)
        taken = self._take(own + num_reserved, table.owner)
        table.reserve = taken[own:]
        blocks = iter(taken[:own])
        self._lay_out(table, spans, num_tokens, lambda position: next(blocks))
        for index in [index for index in table._claims if index >= spans[0].start // self._size]:
            self._claims.drop(table, index)
        table._counts_spans = table._uncounted_misses > 0
        if table._counts_spans:
            table._uncounted_misses -= _num_tokens(spans)
            self.num_tokens += _num_tokens(spans)
        return True

    def cut(self, table: BlockTable, spans: Sequence[Span]) -> None:
        """Let a table share these spans only: what is left of its own when whole blocks of tokens
        are taken out. Those go to reserved blocks, and what is reserved beyond them is given back.
        """
        if table._counts_spans:
            taken_out = _num_tokens(table.spans) - _num_tokens(spans)
            self.num_tokens -= taken_out
            self.num_cut_tokens += taken_out
        before, after = (
            Counter(b for span in several for b in span.block_ids)
            for several in (table.spans, spans)
        )
        own = own_blocks(table, self._size)
        end = table.num_slots(self._size)
        table.block_ids = []
        table.segments = [WHOLE]
        table.spans = ()
        self._lay_out(
            table,
            spans,
            end,
            lambda position: own[position] if position in own else table.reserve.pop(),
        )
        for block_id in (after - before).elements():
            self._pool.touch(block_id)
        for block_id in (before - after).elements():
            self._pool.release(
                block_id, matchable=self._index.entry(block_id) is not None, owner=table.owner
            )
        self.give_back(table)

    def give_back(self, table: BlockTable) -> None:
        """Free what is reserved for `cut`."""
        for block_id in table.reserve:
            self._pool.release(block_id, matchable=False)
            self._released[block_id] = None
        table.reserve = []

    def _num_own(self, table: BlockTable, spans: Sequence[Span], num_tokens: int) -> int:
        """Blocks of its own that the table needs: for what is before each span, and for what
        follows the last one.
        """
        count = 0
        position = len(table) * self._size
        for span in spans:
            blocks, rest = divmod(span.start - position, self._size)
            room = span.first_position + len(span.block_ids) * self._size
            inside = (
                span.first_position <= span.start < span.stop <= room and span.stop < num_tokens
            )
            if blocks < 0 or rest or not inside or not span.start:
                raise CacheCorruption(
                    f"{span} does not fit behind position {position} of {num_tokens} tokens"
                )
            count = count + blocks
            position = span.stop
        return count + -(-(num_tokens - position) // self._size)

    def _lay_out(
        self, table: BlockTable, spans: Sequence[Span], end: int, block_at: Callable[[int], int]
    ) -> None:
        """Enter spans, and own blocks up to position `end`, behind the blocks of a table that has
        no spans; block_at(position): the own block whose slot 0 holds the position.
        """
        position = len(table) * self._size
        for span in spans:
            if span.start > position and table.spans:
                table.segments.append(TableSegment(len(table), position, position, 0))
            table.block_ids += map(block_at, range(position, span.start, self._size))
            table.segments.append(
                TableSegment(len(table), span.first_position, span.start, span.delta)
            )
            table.block_ids += span.block_ids
            table.spans = (*table.spans, span)
            position = span.stop
        if spans:
            table.segments.append(TableSegment(len(table), position, position, 0))
        table.block_ids += map(block_at, range(position, end, self._size))


def _num_tokens(spans: Sequence[Span]) -> int:
    return sum(span.stop - span.start for span in spans)


def own_blocks(table: BlockTable, block_size: int) -> dict[int, int]:
    """The blocks that no span of a table brought, by the position of their slot 0."""
    starts = {span.start for span in table.spans}
    found: dict[int, int] = {}
    for segment, end in zip(
        table.segments,
        [*(other.first_index for other in table.segments[1:]), len(table)],
        strict=False,
    ):
        if segment.valid_from not in starts:
            places = range(
                segment.first_position,
                segment.first_position + (end - segment.first_index) * block_size,
                block_size,
            )
            found |= zip(
                places, table.block_ids[segment.first_index : end], strict=False
            )  # checks ask of broken ones too
    return found
