"""Deviation scoring: selects the blocks in a prompt's spans to recompute.

`Probe` selects the blocks that deviate most from their stored values, measured in one layer for all
tokens. This is the method of CacheBlend (Yao et al., "CacheBlend: Fast Large Language Model Serving
for RAG with Cached Knowledge Fusion", EuroSys 2025). Tokens whose values differ most in the second
layer are worth recomputing, and they are mostly the same in all layers. This module selects whole
blocks, because only whole blocks can be closed and quantized.

`QueryProbe` selects the blocks that the end of the prompt, with the question, attends to most. It
runs only some layers, and only for tokens that must be computed in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.kvcache.block_table import BlockTable, Span, TableSegment
from kvboost_edge.reuse.span_plan import cut_spans
from kvboost_edge.runners.base import StoredKeys

__all__ = ["NUM_QUERY_TOKENS", "Probe", "ProbeRow", "QueryProbe", "num_probed_blocks"]

NUM_QUERY_TOKENS = 32
"""Number of tokens at the end of a prompt whose attention is scored."""

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]


class ProbeRow(NamedTuple):
    """Run of consecutive prompt tokens to compute in a probe.

    Attributes:
        start: position of the first token.
        stop: position after the last token.
        block_ids: blocks with the KV of earlier tokens, followed by the blocks to write.
        segments: positions that the blocks hold. The last segment covers the tokens of this row.
        stored: slots of the tokens' reused KV. Empty for tokens outside spans.
    """

    start: int
    stop: int
    block_ids: list[int]
    segments: list[TableSegment]
    stored: list[int]


def num_probed_blocks(spans: Sequence[Span], ratio: float, block_size: int) -> int:
    """Return how many whole blocks of the spans to select for recomputing.

    The result is the share `ratio` of all whole blocks. If `ratio` is above 0, at least one block
    is selected.
    """
    whole = sum((span.stop - span.start) // block_size for span in spans)
    return min(whole, max(1, round(ratio * whole))) if ratio > 0 else 0


class Probe:
    """Deviation scores of the span blocks in one table.

    The probe writes to the table's reserved blocks. Their number is the number of blocks to select.

    Args:
        table: the table.
        block_size: tokens per block.
        layer_share: fraction of the model's layers that a scoring pass runs.
    """

    def __init__(self, table: BlockTable, block_size: int, layer_share: float = 1.0) -> None:
        self.layer_share = layer_share
        self._table = table
        self._size = block_size
        self._num_chosen = len(table.reserve)
        # Scores of blocks, by the position of their first token.
        self._weights: dict[int, float] = {}
        self._ahead = self._stretches()
        self.seconds = 0.0

    @property
    def is_done(self) -> bool:
        """True once all tokens are scored."""
        return not self._ahead

    @property
    def num_left(self) -> int:
        """Number of tokens that are not scored yet."""
        return sum(stop - start for start, stop, _ in self._ahead)

    @property
    def position(self) -> int:
        """Position of the next token to score."""
        return self._ahead[-1][0]

    def next_rows(self, limit: int) -> list[ProbeRow]:
        """Return the next tokens to compute, which are whole blocks inside spans.

        Args:
            limit: maximum number of tokens. A block of a span is returned even if it is larger.
        """
        rows: list[ProbeRow] = []
        left = max(1, limit)
        spare = list(self._table.reserve)
        while self._ahead and left:
            start, stop, span = self._ahead[-1]
            room = left
            if span:
                least = 0 if rows else 1
                room = min(max(least, left // self._size), len(spare)) * self._size
            if not room:
                break
            end = min(stop, start + room)
            if span is None:
                rows.append(self._own_row(start, end))
            else:
                count = (end - start) // self._size
                rows.append(self._span_row(start, end, span, spare[:count]))
                del spare[:count]
            left = max(0, left - (end - start))
            self._ahead[-1] = (end, stop, span)
            if end == stop:
                self._ahead.pop()
        return rows

    def take(self, rows: Sequence[ProbeRow], deviations: Floats) -> None:
        """Record the deviations of computed rows.

        Args:
            rows: rows from `next_rows`.
            deviations: squared distance of each token from its stored values, float32 [number of
                tokens in rows with stored KV].
        """
        first = 0
        for row in rows:
            if row.stored:
                count = row.stop - row.start
                sums = deviations[first : first + count].reshape(-1, self._size).sum(axis=1)
                starts = range(row.start, row.stop, self._size)
                self._weights.update(zip(starts, sums.tolist(), strict=True))
                first += count

    def spans(self) -> list[Span]:
        """Return the table's spans without the highest-scoring blocks. Ties go to earlier ones."""
        ranked = sorted(self._weights, key=lambda start: (-self._weights[start], start))
        return cut_spans(self._table.spans, ranked[: self._num_chosen], self._size)

    def _stretches(self) -> list[tuple[int, int, Span | None]]:
        """Return the stretches to compute, last one first.

        Each is (start, stop, span), where `span` is None between spans. Stretches in spans cover
        whole blocks.
        """
        position = self._table.num_computed_tokens
        found = list[tuple[int, int, Span | None]]()
        for span in self._table.spans:
            if span.start > position:
                found.append((position, span.start, None))
            if (whole := _whole(span, self._size)) > span.start:
                found.append((span.start, whole, span))
            position = span.stop
        return found[::-1]

    def _own_row(self, start: int, stop: int) -> ProbeRow:
        own = self._table.segment_of(start)
        segments = [
            segment for segment in self._table.segments if segment.first_index <= own.first_index
        ]
        return ProbeRow(start, stop, self._table.block_ids, segments, [])

    def _span_row(self, start: int, stop: int, span: Span, scratch: Sequence[int]) -> ProbeRow:
        segments = [segment for segment in self._table.segments if segment.valid_from < start]
        num_before = self._table.index_of(start - 1, self._size) + 1
        segments.append(TableSegment(num_before, start, start, 0))
        block_ids = [*self._table.block_ids[:num_before], *scratch]
        return ProbeRow(
            start, stop, block_ids, segments, self._table.slots(start, stop, self._size)
        )


class QueryProbe(Probe):
    """Attention scores of the span blocks in one table.

    The scores are the attention of the last NUM_QUERY_TOKENS tokens before `stop` to the spans. The
    probe computes only tokens outside spans, and it does not write to reserved blocks.

    Args:
        table: the table.
        block_size: tokens per block.
        stop: position after the last token to compute. It is after all spans and at most at the
            prompt's end.
        layer_share: fraction of the model's layers that a scoring pass runs.

    Attributes:
        stored: stored keys of the whole blocks in spans.
    """

    def __init__(
        self, table: BlockTable, block_size: int, stop: int, layer_share: float = 1.0
    ) -> None:
        self._stop = stop
        super().__init__(table, block_size, layer_share)
        spans = [
            (np.arange(span.start, _whole(span, block_size)), span.delta) for span in table.spans
        ]
        positions = np.concatenate([one for one, _ in spans])
        slots = [
            table.slots(int(one[0]), int(one[-1]) + 1, block_size) for one, _ in spans if len(one)
        ]
        deltas = np.concatenate([np.full(len(one), delta) for one, delta in spans])
        self.stored = StoredKeys(
            np.array([slot for some in slots for slot in some], np.int64), positions, deltas
        )
        self._weights = dict.fromkeys(positions[::block_size].tolist(), 0.0)

    def query_indices(self, rows: Sequence[ProbeRow]) -> Longs:
        """Return the indices of the scored query tokens among the tokens of these rows, int64."""
        positions = np.concatenate([np.arange(row.start, row.stop) for row in rows])
        return np.flatnonzero(
            positions >= max(self._stop - NUM_QUERY_TOKENS, self._table.spans[-1].stop)
        )

    def take(self, rows: Sequence[ProbeRow], masses: Floats) -> None:
        """Add the attention of computed rows to the scores.

        Args:
            rows: rows from `next_rows`.
            masses: attention to each stored key, float32 [len(stored.slots)].
        """
        of_blocks = masses.reshape(-1, self._size).sum(axis=1).tolist()
        for start, mass in zip(self._weights, of_blocks, strict=True):
            self._weights[start] += mass

    def _stretches(self) -> list[tuple[int, int, Span | None]]:
        """Return the stretches outside spans, last one first, as (start, stop, None)."""
        position = self._table.num_computed_tokens
        found = list[tuple[int, int, Span | None]]()
        for span in self._table.spans:
            if span.start > position:
                found.append((position, span.start, None))
            position = span.stop
        return [(position, self._stop, None), *found[::-1]]


def _whole(span: Span, block_size: int) -> int:
    """Return the end position of the whole blocks in a span."""
    return span.start + (span.stop - span.start) // block_size * block_size
