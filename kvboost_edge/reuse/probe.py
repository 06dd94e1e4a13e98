"""Which blocks of a prompt's spans deviate most, found by computing one layer of all its tokens.

After Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion", EuroSys 2025:
tokens whose values of the second layer differ most from the stored ones are those worth computing anew, and they are
much the same in all layers. Here whole blocks are chosen, because whole blocks can be closed and quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.kvcache.block_table import BlockTable, Span, TablePart
from kvboost_edge.reuse.plan import cut_spans

__all__ = ["Probe", "ProbeRow", "num_probed_blocks"]

Floats = npt.NDArray[np.float32]


class ProbeRow(NamedTuple):
    """Consecutive tokens of a prompt whose first layer is computed.

    start, stop     their positions
    block_ids       the table's blocks before them, then those that they are written to
    parts           which positions those hold, the last one their own
    stored          slots of what is stored of them at other positions; empty where nothing is
    """

    start: int
    stop: int
    block_ids: list[int]
    parts: list[TablePart]
    stored: list[int]


def num_probed_blocks(spans: Sequence[Span], ratio: float, block_size: int) -> int:
    """Blocks to choose: this share of the whole ones in the spans, at least one of them where it is above 0."""
    whole = sum((span.stop - span.start) // block_size for span in spans)
    return min(whole, max(1, round(ratio * whole))) if ratio > 0 else 0


class Probe:
    """Of one table: what is still to be looked at, and what was seen. Its reserved blocks, as many as are to be chosen,
    take what the probe writes of the spans."""

    def __init__(self, table: BlockTable, block_size: int) -> None:
        self._table, self._size = table, block_size
        self._num_chosen = len(table.reserve)
        self._deviations: dict[int, float] = {}
        self._ahead = self._stretches()
        self.seconds = 0.0

    @property
    def is_done(self) -> bool:
        """Nothing is left to look at."""
        return not self._ahead

    def next_rows(self, limit: int) -> list[ProbeRow]:
        """The next tokens to compute, in whole blocks, about `limit` (at least one block)."""
        rows: list[ProbeRow] = []
        left = max(1, limit // self._size) * self._size
        spare = list(self._table.reserve)
        while self._ahead and left:
            start, stop, span = self._ahead[-1]
            room = min(left, len(spare) * self._size) if span else left
            if not room:
                break
            end = min(stop, start + room)
            if span is None:
                rows.append(self._own_row(start, end))
            else:
                count = (end - start) // self._size
                rows.append(self._span_row(start, end, span, spare[:count]))
                del spare[:count]
            left -= end - start
            self._ahead[-1] = (end, stop, span)
            if end == stop:
                self._ahead.pop()
        return rows

    def take(self, rows: Sequence[ProbeRow], deviations: Floats) -> None:
        """Note how far the tokens of the rows are from what is stored, float32 [tokens of all rows with something
        stored], squared distances."""
        first = 0
        for row in rows:
            if row.stored:
                count = row.stop - row.start
                sums = deviations[first : first + count].reshape(-1, self._size).sum(axis=1)
                starts = range(row.start, row.stop, self._size)
                self._deviations.update(zip(starts, sums.tolist(), strict=True))
                first += count

    def spans(self) -> list[Span]:
        """What is left of the table's spans without the blocks that deviate most; the earlier one where two are
        equal."""
        ranked = sorted(self._deviations, key=lambda start: (-self._deviations[start], start))
        return cut_spans(self._table.spans, ranked[: self._num_chosen], self._size)

    def _stretches(self) -> list[tuple[int, int, Span | None]]:
        """[start, stop) of what lies before the end of the last span, whole blocks, last first."""
        position, found = self._table.num_computed_tokens, list[tuple[int, int, Span | None]]()
        for span in self._table.spans:
            if span.start > position:
                found.append((position, span.start, None))
            whole = span.start + (span.stop - span.start) // self._size * self._size
            if whole > span.start:
                found.append((span.start, whole, span))
            position = span.stop
        return found[::-1]

    def _own_row(self, start: int, stop: int) -> ProbeRow:
        own = self._table.part_of(start)
        parts = [part for part in self._table.parts if part.first_index <= own.first_index]
        return ProbeRow(start, stop, self._table.block_ids, parts, [])

    def _span_row(self, start: int, stop: int, span: Span, scratch: Sequence[int]) -> ProbeRow:
        parts = [part for part in self._table.parts if part.valid_from < start]
        behind = self._table.index_of(start - 1, self._size) + 1
        parts.append(TablePart(behind, start, start, 0))
        block_ids = [*self._table.block_ids[:behind], *scratch]
        return ProbeRow(start, stop, block_ids, parts, self._table.slots(start, stop, self._size))
