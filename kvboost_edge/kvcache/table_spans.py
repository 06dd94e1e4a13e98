"""Placement of spans in block tables, for non-prefix KV reuse.

A span reuses blocks that were computed in another context at new positions. The table's own blocks
fill the gaps between spans.
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
    """Places spans in the tables of one manager.

    Args:
        pool: the block pool.
        index: the prefix index.
        claims: claims on blocks that tables are about to compute.
        take: function `take(count, owner)` that allocates free blocks.
        released: ordered set that collects the ids of freed blocks that cannot be matched.
        block_size: tokens per block.

    Attributes:
        num_tokens: number of tokens reused in spans since the start. Only tables whose lookups are
            counted contribute.
        num_cut_tokens: number of span tokens that `cut` removed. They count as misses.
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
        """Report all published blocks to a watcher, then every later change.

        Spans may use any published block, because its KV depends only on its own and earlier
        tokens.
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
        """Place spans in a new table, and allocate blocks for the other tokens.

        There must be a whole number of blocks between the matched prefix and the first span, and
        between consecutive spans. From the first span on, the table publishes no blocks and drops
        its claims.

        Args:
            table: the new table.
            spans: spans in order.
            num_tokens: number of tokens in the table.
            spare: maximum number of free blocks to use.
            num_reserved: number of blocks to reserve for `cut`.

        Returns:
            False if more than `spare` free blocks are needed. The table is then unchanged.

        Raises:
            CacheCorruption: a span does not fit at its position.
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
        """Replace the spans of a table with `spans`, which cover fewer whole blocks of its tokens.

        Reserved blocks take the place of the removed blocks. Unused reserved blocks are freed.
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
        """Free the blocks that were reserved for `cut`."""
        for block_id in table.reserve:
            self._pool.release(block_id, matchable=False)
            self._released[block_id] = None
        table.reserve = []

    def _num_own(self, table: BlockTable, spans: Sequence[Span], num_tokens: int) -> int:
        """Return how many blocks the table needs between its spans and after the last one."""
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
                    f"{span} does not fit after position {position} of {num_tokens} tokens"
                )
            count = count + blocks
            position = span.stop
        return count + -(-(num_tokens - position) // self._size)

    def _lay_out(
        self, table: BlockTable, spans: Sequence[Span], end: int, block_at: Callable[[int], int]
    ) -> None:
        """Append spans to a table, with its own blocks in between and up to position `end`.

        `block_at(position)` returns the block whose slot 0 holds the position.
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
    """Return the blocks of a table outside spans, by the position of their slot 0."""
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
            # Not strict, because invariant checks also pass inconsistent tables.
            found |= zip(places, table.block_ids[segment.first_index : end], strict=False)
    return found
