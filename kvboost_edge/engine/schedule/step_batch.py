"""Construction of a step's batch in the flat layout that runners take."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Several

import numpy as np

from kvboost_edge.backends.base import BatchLayout, PassStates
from kvboost_edge.engine.schedule.sequence import Floats, Sequence
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.runners.base import ForwardBatch
from kvboost_edge.segments import Segment, Segments

__all__ = ["build_batch", "split_hidden_states", "split_rows"]


def build_batch(
    work: Several[ScheduledTokens[Sequence]],
    manager: KVCacheManager,
    hidden_size: int = 0,
    is_abandoned: Callable[[], bool] | None = None,
    num_hidden_states: Callable[[ScheduledTokens[Sequence]], int] = lambda work: 0,
    *,
    is_split: bool = False,
) -> ForwardBatch:
    """Build the batch of a step from the tokens of `work`, one sequence after another.

    Each contiguous run of a sequence's tokens is a separate row. Later runs attend to the KV that
    earlier ones store in the same pass.

    Args:
        work: tokens to compute, at least one item. The sequences must have their blocks.
        hidden_size: width of the hidden states that some sequences want.
        is_abandoned: function that tells the runner to abandon the pass, see `ForwardBatch`.
        num_hidden_states: function that returns the number of last tokens of an item whose hidden
            states are needed for drafts. Requests for hidden states need none for drafts.
        is_split: whether the runner divides the pass, see `RunnerInfo.splits_passes`.
    """
    tables = [one.sequence.blocks for one in work]
    block_tables = np.full((len(work), max(map(len, tables))), -1, np.int32)
    # A step has few tokens per sequence, so lists are faster here than many small arrays.
    starts = [0]
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    hidden_state_rows: list[int] = []
    for i, (one, table) in enumerate(zip(work, tables, strict=True)):
        block_tables[i, : len(table)] = table.block_ids
        tokens += one.token_ids
        positions += range(one.start, one.stop)
        slots += manager.slots(table, one.start, one.stop)
        end = len(tokens)
        rows = hidden_state_rows if one.sequence.request.wants_states else logit_rows
        rows += range(end - one.num_rows, end)
        hidden_state_rows += range(end - num_hidden_states(one), end)
        starts.append(end)
    shareable = [one.sequence.request.num_shareable for one in work]
    layout = BatchLayout(
        cu_seqlens_q=np.array(starts, np.int32),
        seq_lens=np.array([one.stop for one in work], np.int32),
        block_tables=block_tables,
        slot_mapping=np.array(slots, np.int64),
        segments=_segments_of(work, tables),
        states=_states_of(work, tables, manager),
        sparse=_sparse_ranges_of(work),
    )
    return ForwardBatch(
        token_ids=np.array(tokens, np.int64),
        positions=np.array(positions, np.int64),
        layout=layout,
        logit_rows=np.array(logit_rows, np.int64),
        hidden_state_rows=np.array(hidden_state_rows, np.int64),
        hidden_states=np.empty((len(hidden_state_rows), hidden_size), np.float32),
        is_abandoned=is_abandoned,
        num_shareable=np.array(shareable, np.int64) if is_split else None,
    )


def split_rows(
    work: Several[ScheduledTokens[Sequence]], batch: ForwardBatch, logits: Floats
) -> list[Floats]:
    """Split the output rows of a forward pass by item of `work`.

    Returns:
        Logits [num_rows, vocab_size] or hidden states [num_rows, hidden_size] per item.
    """
    found: list[Floats] = []
    end = 0
    for one, hidden_states in zip(work, split_hidden_states(batch), strict=True):
        if one.sequence.request.wants_states:
            found.append(hidden_states)
            continue
        first = end
        end += one.num_rows
        found.append(logits[first:end])
    return found


def split_hidden_states(batch: ForwardBatch) -> list[Floats]:
    """Split the hidden states of a forward pass by item.

    Returns:
        Hidden states [num_tokens, hidden_size] per item. An item that wants none has no rows.
    """
    bounds = np.searchsorted(batch.hidden_state_rows, batch.layout.cu_seqlens_q).tolist()
    return [batch.hidden_states[first:end] for first, end in itertools.pairwise(bounds)]


def _states_of(
    work: Several[ScheduledTokens[Sequence]], tables: Several[BlockTable], manager: KVCacheManager
) -> PassStates | None:
    """Return the tables' state slots, or None for a model without recurrent state."""
    if manager.states is None:
        return None
    plans = [
        manager.states.plan(table, one.start, one.certain_stop)
        for one, table in zip(work, tables, strict=True)
    ]
    saves = [(i, rows, slot) for i, plan in enumerate(plans) for rows, slot in plan.saves]
    return PassStates(
        state_in=np.array([plan.read for plan in plans], np.int32),
        state_out=np.array([plan.write for plan in plans], np.int32),
        saves=np.array(saves, np.int32).reshape(-1, 3),
        certain=np.array([one.certain_stop - one.start for one in work], np.int32),
    )


def _sparse_ranges_of(
    work: Several[ScheduledTokens[Sequence]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]] | None:
    """Return the sequences' sparse ranges, or None if the step computes none of their tokens."""
    ranges = [one.sequence.prefill.sparse_range for one in work]
    if not any(
        max(one.start, first) < min(one.stop, end)
        for one, (first, end) in zip(work, ranges, strict=True)
    ):
        return None
    return np.array(ranges, np.int32)


def _segments_of(work: Several[ScheduledTokens[Sequence]], tables: Several[BlockTable]) -> Segments:
    """Return the segments of all tables, up to the segment that holds each row's tokens.

    Returns:
        The segments, or None if every table has a single one.
    """
    if all(len(table.segments) == 1 for table in tables):
        return None
    rows: list[Segment] = []
    for i, (one, table) in enumerate(zip(work, tables, strict=True)):
        own = table.segment_of(one.start)
        seen = [segment for segment in table.segments if segment.first_index <= own.first_index]
        rows += [Segment(sequence=i, **segment._asdict()) for segment in seen]
    return np.array(rows, np.int32)
