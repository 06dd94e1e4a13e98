"""Division of a pass into the tokens whose KV is shared and all other tokens.

In wide arithmetic, the runner computes the first in wide arithmetic and the others exactly. Each
token's result then depends on its sequence and position only, and not on the other tokens of the
pass. See `RunnerInfo.splits_passes`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.runners.base import ForwardBatch

__all__ = ["PassPart", "joined_outputs", "split_pass"]

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]


class PassPart(NamedTuple):
    """A part of a pass.

    Attributes:
        batch: input of the part.
        is_shareable: whether the part computes KV that other sequences may reuse.
        rows: int64, rows of the whole pass that the part computes, ascending.
    """

    batch: ForwardBatch
    is_shareable: bool
    rows: Longs


def split_pass(batch: ForwardBatch, block_size: int) -> list[PassPart]:
    """Return the parts of a pass in the order in which they must run.

    Tokens of a sequence that are shared come before its other tokens, which attend to them.
    """
    if batch.num_shareable is None:
        return [PassPart(batch, True, np.arange(len(batch.token_ids)))]
    layout = batch.layout
    starts = layout.cu_seqlens_q[:-1].astype(np.int64)
    counts = np.diff(layout.cu_seqlens_q).astype(np.int64)
    first = layout.seq_lens - counts
    shared = np.clip(batch.num_shareable - first, 0, counts)
    parts = []
    if shared.any():
        parts.append(_part(batch, starts, shared, first + shared, True, block_size))
    if (shared < counts).any():
        parts.append(
            _part(batch, starts + shared, counts - shared, layout.seq_lens, False, block_size)
        )
    return parts


def _part(
    batch: ForwardBatch,
    starts: Longs,
    counts: Longs,
    lengths: npt.NDArray[np.integer],
    is_shareable: bool,
    block_size: int,
) -> PassPart:
    """Return the part with `counts` rows of each sequence, from row `starts` on.

    `lengths` are the KV lengths of the sequences after the part.
    """
    if counts.sum() == len(batch.token_ids):
        return PassPart(batch, is_shareable, np.arange(len(batch.token_ids)))
    layout = batch.layout
    which = np.flatnonzero(counts)
    rows = np.concatenate([np.arange(starts[i], starts[i] + counts[i]) for i in which])
    tables = layout.block_tables[which]
    used = -(-lengths[which] // block_size)
    tables = np.where(np.arange(tables.shape[1]) < used[:, None], tables, np.int32(-1))
    own = dataclasses.replace(
        layout,
        cu_seqlens_q=np.concatenate([[0], np.cumsum(counts[which])]).astype(np.int32),
        seq_lens=lengths[which].astype(np.int32),
        block_tables=tables,
        slot_mapping=layout.slot_mapping[rows],
    )
    states = np.searchsorted(rows, np.intersect1d(batch.hidden_state_rows, rows))
    part = dataclasses.replace(
        batch,
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        layout=own,
        logit_rows=np.searchsorted(rows, np.intersect1d(batch.logit_rows, rows)),
        hidden_state_rows=states,
        hidden_states=np.empty((len(states), batch.hidden_states.shape[1]), np.float32),
        num_shareable=None,
    )
    return PassPart(part, is_shareable, rows)


def joined_outputs(
    batch: ForwardBatch, parts: Sequence[PassPart], logits: Sequence[Floats]
) -> Floats:
    """Fill `batch.hidden_states` from the parts, and return their logits in order of rows."""
    found = np.empty((len(batch.logit_rows), logits[0].shape[1]), np.float32)
    for part, own in zip(parts, logits, strict=True):
        found[np.isin(batch.logit_rows, part.rows)] = own
        batch.hidden_states[np.isin(batch.hidden_state_rows, part.rows)] = part.batch.hidden_states
    return found
