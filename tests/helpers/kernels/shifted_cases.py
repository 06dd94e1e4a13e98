"""Sequences composed of runs of stored blocks, reused at other positions than they were computed
at, and of newly computed stretches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.segments import Segment, entry_of


class Row(NamedTuple):
    """Tokens [start, stop) that a sequence computes, as a row of a batch. The segments are those of
    sequence 0.
    """

    start: int
    stop: int
    table: list[int]
    segments: list[Segment]

    def last(self, count: int) -> Row:
        """Return the row reduced to its last tokens."""
        return self._replace(start=self.stop - count)

    def slots(self, size: int) -> np.ndarray:
        indices, offsets = entry_of(
            np.array(self.segments, np.int32), 0, np.arange(self.start, self.stop), size
        )
        return np.array(self.table, np.int64)[indices] * size + offsets


class Pieces:
    """Builder of a composed sequence. `take(count)` returns that many free blocks."""

    def __init__(self, size: int, take: Callable[[int], list[int]]) -> None:
        self.size = size
        self._take = take
        self.table: list[int] = []
        self.segments: list[Segment] = []
        self.length = 0

    def run(self, stored: Sequence[int], start: int, count: int) -> None:
        """Append tokens [start, start + count) of a sequence stored in the blocks `stored`."""
        self._begin(start % self.size, self.length - start)
        self.table += stored[start // self.size : -(-(start + count) // self.size)]
        self.length += count

    def own(self, count: int) -> Row:
        """Append newly computed tokens, from the beginning of a block."""
        self._begin(0, 0)
        self.table += self._take(-(-count // self.size))
        self.length += count
        return Row(self.length - count, self.length, list(self.table), list(self.segments))

    def _begin(self, offset: int, delta: int) -> None:
        self.segments.append(Segment(0, len(self.table), self.length - offset, self.length, delta))


def plain(count: int, size: int, take: Callable[[int], list[int]]) -> Row:
    """Return a row without chunk boundaries, all of which is computed."""
    return Pieces(size, take).own(count)


def blocks_from(first: int) -> Callable[[int], list[int]]:
    """Return a `take` that hands out a pool's blocks in order."""
    free = iter(range(first, 1 << 20))
    return lambda count: [next(free) for _ in range(count)]


def layout_of(rows: Sequence[Row], size: int) -> BatchLayout:
    """Return the batch of these rows."""
    tables = np.full((len(rows), max(len(row.table) for row in rows)), -1, np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row.table)] = row.table
    return BatchLayout(
        np.cumsum([0] + [row.stop - row.start for row in rows]).astype(np.int32),
        np.array([row.stop for row in rows], np.int32),
        tables,
        np.concatenate([row.slots(size) for row in rows]),
        np.array(
            [
                segment._replace(sequence=index)
                for index, row in enumerate(rows)
                for segment in row.segments
            ],
            np.int32,
        ),
    )


def with_deltas(row: Row, change: Callable[[int], int]) -> Row:
    """Return the row with its nonzero deltas changed."""
    return row._replace(
        segments=[
            segment._replace(delta=segment.delta and change(segment.delta))
            for segment in row.segments
        ]
    )
