"""Paged attention of a sparse prefill over float32, float16 and bfloat16 blocks.

Rows of the sparse ranges (`PagedBatch.sparse`) attend to the key blocks that block_selection.py
selects, and to all tokens of their own tile. The kept key blocks take the place of consecutive
strips in tiles of 64 tokens. All other rows are computed exactly as in float_attend.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvboost_edge.kernels.attention.block_selection import (
    BlockSelection,
    dense_start,
    kept_position,
    kept_unit,
    no_selection,
    selector,
)
from kvboost_edge.kernels.attention.call import AttentionCall, Job, RotationPointers, Unit
from kvboost_edge.kernels.attention.float_attend import (
    attend_tile,
    attend_tiles,
    locate,
    place_strip,
)
from kvboost_edge.kernels.attention.float_tiles import STRIPS, fill, stage_rows
from kvboost_edge.kernels.attention.paged import PARTITION, Ints
from kvboost_edge.kernels.attention.units import after, clear_state, unit_loop
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.tuples import addresses_of
from kvboost_edge.kernels.vectors import KIND_F32, LANES

__all__ = ["SparseCall", "SparseJob", "attend_sparse", "attend_sparse_units"]


class SparseCall(NamedTuple):
    """Arguments of a call with sparse ranges.

    Attributes:
        plain: the call.
        sparse: int32 [num_seqs, 2]; see `PagedBatch`.
    """

    plain: AttentionCall
    sparse: Ints


class SparseJob(NamedTuple):
    """A SparseCall with addresses instead of arrays; `sparse` is 0 without sparse ranges."""

    plain: Job
    sparse: int


@kernel
def _stage(job: SparseJob, unit: Unit, position: int, out: int, zeros: int, steps: int) -> None:
    shape = job.plain.shape
    size = 4 if shape.kind == KIND_F32 else 2
    keys, _ = locate(job.plain, unit, position)
    step = shape.block_size * size
    stage_rows(out, keys, keys, shape.head_dim, step, 0, LANES, shape.kind)
    padding = shape.padded_dim - shape.head_dim
    fill(out + 4 * LANES * shape.head_dim, LANES * padding, np.float32(0.0))


_select = selector("select_blocks", False, _stage)


@kernel
def _lay_out(job: SparseJob, unit: Unit) -> Any:
    start = dense_start(job.sparse, job.plain.shape, unit)
    if start == 0:
        return no_selection(0)
    scratch = after(unit.table + 8 * 6 * STRIPS, 0)
    return _select(job, job.plain.shape, unit, 0, start, scratch)


@kernel
def _attend_kept(job: Job, unit: Unit, selection: BlockSelection, state: int) -> None:
    """Add the kept key blocks to the softmax state, four per tile."""
    index = 0
    while index < selection.num_kept:
        count = min(STRIPS, selection.num_kept - index)
        for strip in range(STRIPS):
            place_strip(job, unit, strip, kept_position(selection, index + strip, unit), False)
        attend_tile(job.shape, kept_unit(unit, count), 0, state, False)
        index += STRIPS


@kernel
def _attend_partition(
    job: SparseJob, unit: Unit, selection: BlockSelection, partition: int, state: int
) -> None:
    """Compute the softmax state of one partition; its first tile may follow the kept blocks."""
    clear_state(job.plain.shape, unit.num_rows, state)
    if selection.num_kept > 0 and partition == selection.dense_from // PARTITION:
        _attend_kept(job.plain, unit, selection, state)
    attend_tiles(job.plain, unit, partition, max(unit.low, selection.dense_from), state)


@kernel
def _add_nothing(
    job: SparseJob, unit: Unit, selection: BlockSelection, merged: int, state: int
) -> None:
    """Do nothing, because all tokens of a unit are in its partitions."""


attend_sparse_units = unit_loop("attend_sparse_units", _lay_out, _attend_partition, _add_nothing)


@kernel
def attend_sparse(call: SparseCall) -> None:
    """Process units until all are taken, as `attend` does."""
    job = addresses_of(SparseJob, call)
    attend_sparse_units(job.plain, addresses_of(RotationPointers, call.plain), job)
