"""Spans of sequences: found and placed when one is let in, and probed before its tokens are
computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Several

import numpy as np

from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.config import RecomputeStrategy
from kvboost_edge.engine.offload.prefetch import Load, Loads
from kvboost_edge.engine.schedule.sequence import Sequence, SequenceStatus
from kvboost_edge.kernels.attention.parts import Part
from kvboost_edge.kvcache.block_table import BlockTable, TablePart
from kvboost_edge.kvcache.hashing import decode_tokens
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.reuse.harvest import Harvest
from kvboost_edge.reuse.probe import Probe, ProbeRow, QueryProbe, num_probed_blocks
from kvboost_edge.runners.base import ForwardBatch, Runner

__all__ = ["Prober", "SpanSharing"]


class SpanSharing:
    """Lets sequences share what their tokens have at other positions; runs of `min_chunk_tokens` at
    least.
    """

    def __init__(
        self, manager: KVCacheManager, min_chunk_tokens: int, *, remembers: bool = False
    ) -> None:
        self._manager = manager
        self.harvest = Harvest(manager, min_chunk_tokens, remembers=remembers)

    def bring(self, sequence: Sequence, loads: Loads, spare: int) -> Load | None:
        """The load of the next run that the sequence could share if it were in the pool; each is
        tried once. What was loaded for it before is in the cache.
        """
        if sequence.request.repair is None or not loads.has_shelf:
            return None
        if sequence.lost_runs is None:
            sequence.lost_runs = self.harvest.lost(sequence.cacheable_ids, sequence.request.root)[
                ::-1
            ]
        while sequence.lost_runs:
            chain = sequence.lost_runs.pop()
            load = loads.begin_run(sequence, decode_tokens(chain.tokens), chain.root, spare)
            if load is not None:
                return load
        return None

    def place(self, sequence: Sequence, table: BlockTable, spare: int) -> bool | None:
        """Whether a sequence shares spans now: all its blocks are taken then. False, and no change,
        where `spare` free blocks do not suffice; None where there is nothing to share.
        """
        request = sequence.request
        size = self._manager.block_size
        if request.repair is None:
            return None
        found = self.harvest.find(
            sequence.cacheable_ids, len(table) * size, request.root, request.repair
        )
        if not found.spans:
            return None
        num_probed = num_probed_blocks(found.spans, request.repair.block_ratio, size)
        spans = self._manager.spans
        if not spans.place(table, found.spans, sequence.num_tokens, spare, num_reserved=num_probed):
            return False
        sequence.found = found.runs
        sequence.probe = None
        if num_probed:
            asks = request.repair.strategy is RecomputeStrategy.QUERY
            sequence.probe = (
                QueryProbe(table, size, len(sequence.cacheable_ids)) if asks else Probe(table, size)
            )
        return True


class Prober:
    """Looks at about `limit` tokens of a sequence at a time: whole blocks, in some layers of the
    model.
    """

    def __init__(self, runner: Runner, manager: KVCacheManager, limit: int) -> None:
        self._runner = runner
        self._manager = manager
        self._limit = limit

    def look(self, sequences: Several[Sequence]) -> list[tuple[Sequence, Exception]]:
        """Compute the next piece of each, into blocks of its own; those that failed, and why."""
        failed: list[tuple[Sequence, Exception]] = []
        for sequence in sequences:
            try:
                self._look(sequence)
            except Exception as error:
                failed.append((sequence, error))
        return failed

    def end(self, sequences: Several[Sequence]) -> None:
        """Take out of the spans of each what is to be computed, once all was looked at."""
        for sequence in sequences:
            probe = sequence.probe
            if probe is not None and probe.is_done and sequence.status is SequenceStatus.RUNNING:
                self._manager.spans.cut(sequence.blocks, probe.spans())
                sequence.end_probe(probe.seconds)

    def _look(self, sequence: Sequence) -> None:
        probe = sequence.probe
        assert probe is not None
        started = time.perf_counter()
        rows = probe.next_rows(self._limit)
        batch = _batch_of(sequence.token_ids, rows, self._manager.block_size)
        if isinstance(probe, QueryProbe):
            probe.take(rows, self._runner.masses(batch, probe.asking(rows), probe.stored))
        else:
            starts = batch.layout.cu_seqlens_q
            compared = [
                np.arange(starts[i], starts[i + 1]) for i, row in enumerate(rows) if row.stored
            ]
            stored = np.array([slot for row in rows for slot in row.stored], np.int64)
            where = np.concatenate([np.empty(0, np.int64), *compared])
            probe.take(rows, self._runner.deviations(batch, where, stored))
        probe.seconds += time.perf_counter() - started


def _batch_of(token_ids: Several[int], rows: Several[ProbeRow], block_size: int) -> ForwardBatch:
    lengths = [row.stop - row.start for row in rows]
    block_tables = np.full((len(rows), max(len(row.block_ids) for row in rows)), -1, np.int32)
    for i, row in enumerate(rows):
        block_tables[i, : len(row.block_ids)] = row.block_ids
    positions = [np.arange(row.start, row.stop, dtype=np.int64) for row in rows]
    layout = BatchLayout(
        cu_seqlens_q=np.cumsum([0, *lengths]).astype(np.int32),
        seq_lens=np.array([row.stop for row in rows], np.int32),
        block_tables=block_tables,
        slot_mapping=np.concatenate([_slots(row, row.parts[-1], block_size) for row in rows]),
        parts=np.array(
            [Part(i, *part) for i, row in enumerate(rows) for part in row.parts], np.int32
        ),
    )
    tokens = [np.array(token_ids[row.start : row.stop], np.int64) for row in rows]
    return ForwardBatch(
        np.concatenate(tokens), np.concatenate(positions), layout, np.empty(0, np.int64)
    )


def _slots(
    row: ProbeRow, own: TablePart, block_size: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    places = np.arange(row.start, row.stop, dtype=np.int64) - own.first_position
    blocks = np.array(row.block_ids, np.int64)[own.first_index + places // block_size]
    return blocks * block_size + places % block_size
