"""Paged attention over float32, float16 and bfloat16 blocks; one kernel serves decode and prefill.

The kernel computes an online softmax (Milakov and Gimelshein, 2018) over tiles of 64 tokens, as in
FlashAttention-2 (Dao, 2023). Partitions of 512 tokens are merged by their log-sum-exp, as in
Flash-Decoding; see units.py. Tiles and partitions start at absolute positions. All query heads of a
KV head share one read of its KV. Decode is bound by reading KV from memory, prefill by fma
throughput. benchmarks/bench/bench_kernels.py compares decode with the bandwidth of a plain read.

A complete strip of 16 float32 tokens is read in place if head_dim is a multiple of 16. A complete
float16 tile is read in place too if there are few rows. Any other strip is staged: widened to
float32, padded, and set to zero at tokens outside the item's range. The kernel therefore never
computes with memory that was never written.

Float32 buffers are passed as byte addresses, which need no bounds checks or wraparound code and
produce less IR.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvboost_edge.kernels.attention.call import (
    AttentionCall,
    AttentionShape,
    Job,
    RotationPointers,
    Unit,
)
from kvboost_edge.kernels.attention.float_tiles import (
    ROWS,
    STRIPS,
    TILE,
    fill,
    half_scores_tile,
    half_values_tile,
    hide_row,
    scores_tile,
    softcap_row,
    softmax_rows,
    stage_rows,
    values_tile,
)
from kvboost_edge.kernels.attention.paged import PARTITION
from kvboost_edge.kernels.attention.units import clear_state, unit_loop
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.tuples import addresses_of
from kvboost_edge.kernels.vectors import (
    KIND_F16,
    KIND_F32,
    LANES,
    load_i32,
    load_scalar,
    store_f32,
    store_i64,
)

__all__ = ["attend", "attend_tile", "attend_tiles", "attend_units", "locate", "place_strip"]

_VALUES_4 = values_tile[4]
_VALUES_2 = values_tile[2]
_VALUES_1 = values_tile[1]
_HALVES_4 = half_values_tile[4]
_HALVES_2 = half_values_tile[2]
_HALVES_1 = half_values_tile[1]
# Up to this many rows, widening float16 twice (for scores and for values) is cheaper than staging
# it.
_ROWS_IN_PLACE = 2 * ROWS


@kernel
def place_strip(job: Job, unit: Unit, strip: int, position: int, in_place: bool) -> None:
    """Fill a column of the tile table for the 16 tokens at `position`, and stage them if needed.

    Args:
        job: the call.
        unit: the rows that attend.
        strip: index of the strip, 0 to 3.
        position: first token of the strip.
        in_place: True if the tile is read in its storage dtype; see `_reads_halves`.
    """
    shape = job.shape
    at = unit.table + 8 * strip
    values_staged = STRIPS * LANES * shape.head_dim
    first = max(0, unit.low - position)
    end = min(LANES, unit.high - position)
    if first >= end:
        # No token of this strip is visible, so all channels read the same row of zeros.
        zeros = unit.stage + 4 * STRIPS * LANES * (shape.head_dim + shape.padded_dim)
        fill(zeros, shape.padded_dim, np.float32(0.0))
        _set_column(at, zeros, 0, zeros, 0, zeros, zeros)
        return
    keys, values = locate(job, unit, position)
    next_keys = keys
    next_values = values
    if position + TILE < unit.high:
        next_keys, next_values = locate(job, unit, position + TILE)
    size = 4 if shape.kind == KIND_F32 else 2
    key_step = shape.block_size * size
    value_step = shape.head_dim * size
    if in_place or (
        shape.kind == KIND_F32 and end - first == LANES and shape.head_dim == shape.padded_dim
    ):
        _set_column(at, keys, key_step, values, value_step, next_keys, next_values)
        return
    key_out = unit.stage + 4 * strip * LANES * shape.head_dim
    value_out = unit.stage + 4 * (values_staged + strip * LANES * shape.padded_dim)
    stage_rows(key_out, keys, next_keys, shape.head_dim, key_step, first, end, shape.kind)
    if end - first < LANES or shape.head_dim != shape.padded_dim:
        fill(value_out, LANES * shape.padded_dim, np.float32(0.0))
    full = shape.head_dim // LANES
    row = 4 * shape.padded_dim
    source = values + first * value_step
    out = value_out + first * row
    ahead = next_values + first * value_step
    if shape.head_dim == shape.padded_dim:
        stage_rows(out, source, ahead, (end - first) * full, LANES * size, 0, LANES, shape.kind)
    else:
        for token in range(end - first):
            at_token = source + token * value_step
            stage_rows(
                out + token * row, at_token, at_token, full, LANES * size, 0, LANES, shape.kind
            )
            for channel in range(full * LANES, shape.head_dim):
                value = load_scalar(at_token + channel * size, shape.kind)
                store_f32(out + token * row + 4 * channel, value)
    _set_column(at, key_out, 4 * LANES, value_out, row, key_out, value_out)


@kernel
def locate(job: Job, unit: Unit, position: int) -> tuple[Any, Any]:
    """Return the addresses of the key and value at a position."""
    shape = job.shape
    size = 4 if shape.kind == KIND_F32 else 2
    entry = unit.sequence * job.max_blocks + unit.first_index + position // shape.block_size
    block = load_i32(job.block_tables + 4 * entry)
    offset = position % shape.block_size
    base = (block * shape.num_kv_heads + unit.head) * shape.head_dim * shape.block_size
    return job.keys + (base + offset) * size, job.values + (base + offset * shape.head_dim) * size


@kernel
def _set_column(
    at: int, keys: int, key_step: int, values: int, value_step: int, ahead: int, ahead_values: int
) -> None:
    """Write the tile-table column at address `at`; float_tiles.py describes its rows."""
    store_i64(at, keys)
    store_i64(at + 8 * STRIPS, key_step)
    store_i64(at + 16 * STRIPS, values)
    store_i64(at + 24 * STRIPS, value_step)
    store_i64(at + 32 * STRIPS, ahead)
    store_i64(at + 40 * STRIPS, ahead_values)


@kernel
def _reads_halves(shape: AttentionShape, unit: Unit, start: int) -> Any:
    """Return whether the tile at `start` is complete float16 that the kernel reads in place."""
    few = (
        shape.kind == KIND_F16
        and unit.num_rows <= _ROWS_IN_PLACE
        and shape.head_dim == shape.padded_dim
    )
    return few and start >= unit.low and start + TILE <= unit.high


@kernel
def attend_tile(shape: AttentionShape, unit: Unit, start: int, state: int, in_place: bool) -> None:
    """Add the 64 tokens at `start` to the softmax state of all rows.

    The tile table gives the location of the tokens.

    Args:
        shape: sizes and options of the call.
        unit: the rows that attend.
        start: position of the tile's first token.
        state: address of the unit's softmax state; see `Unit`.
        in_place: True if the table points to float16 that was not staged.
    """
    dim = shape.padded_dim
    maxima = state + 4 * shape.padded_rows * dim
    totals = maxima + 4 * shape.padded_rows
    hides = start + TILE > min(unit.first_position + 1 + shape.ahead, unit.high) or start < unit.low
    if (
        shape.window > 0
        and start < unit.first_position + unit.num_rows // shape.heads_per_kv - shape.window
    ):
        hides = True
    for row in range(0, unit.num_rows, ROWS):
        at = unit.scores + row * TILE * 4
        if in_place:
            half_scores_tile(unit.query + row * shape.head_dim * 4, unit.table, shape.head_dim, at)
        else:
            scores_tile(unit.query + row * shape.head_dim * 4, unit.table, shape.head_dim, at)
        if shape.softcap > 0:
            for each in range(ROWS):
                softcap_row(at + each * TILE * 4, np.float32(shape.softcap))
        if hides:
            for each in range(ROWS):
                end = unit.first_position + (row + each) // shape.heads_per_kv + 1 - start
                low = end - shape.window if shape.window > 0 else 0
                hide_row(
                    at + each * TILE * 4,
                    max(low, unit.low - start),
                    min(end + shape.ahead, unit.high - start),
                )
        softmax_rows(at, maxima + 4 * row, totals + 4 * row, unit.rescale + 4 * row)
    for row in range(0, unit.num_rows, ROWS):
        at = unit.scores + row * TILE * 4
        out = state + row * dim * 4
        factors = unit.rescale + row * 4
        channel = 0
        if in_place:
            _add_halves(unit, at, factors, out, dim)
            continue
        while dim - channel >= 64:
            _VALUES_4(at, unit.table, channel, factors, out, dim * 4)
            channel += 64
        if dim - channel >= 32:
            _VALUES_2(at, unit.table, channel, factors, out, dim * 4)
            channel += 32
        if dim - channel >= 16:
            _VALUES_1(at, unit.table, channel, factors, out, dim * 4)


@kernel
def _add_halves(unit: Unit, weights: int, factors: int, out: int, dim: int) -> None:
    """Add a tile of float16 values to the sums of four rows, up to 64 channels at a time.

    Args:
        unit: the unit, which holds the tile table.
        weights: address of float32 [4, 64].
        factors: address of float32 [4], factors of the current sums.
        out: address of float32 [4, dim], the sums.
        dim: padded channels, a multiple of 16.
    """
    channel = 0
    while dim - channel >= 64:
        _HALVES_4(weights, unit.table, channel, factors, out, dim * 4)
        channel += 64
    if dim - channel >= 32:
        _HALVES_2(weights, unit.table, channel, factors, out, dim * 4)
        channel += 32
    if dim - channel >= 16:
        _HALVES_1(weights, unit.table, channel, factors, out, dim * 4)


@kernel
def _attend_partition(job: Job, unit: Unit, more: int, partition: int, state: int) -> None:
    """Compute the softmax state of the unit's rows over one partition."""
    clear_state(job.shape, unit.num_rows, state)
    attend_tiles(job, unit, partition, unit.low, state)


@kernel
def attend_tiles(job: Job, unit: Unit, partition: int, low: int, state: int) -> None:
    """Add the tiles of one partition, from the tile at `low` on, to the softmax state."""
    start = max(low, partition * PARTITION) // TILE * TILE
    end = min(unit.high, partition * PARTITION + PARTITION)
    while start < end:
        in_place = _reads_halves(job.shape, unit, start)
        for strip in range(STRIPS):
            place_strip(job, unit, strip, start + strip * LANES, in_place)
        attend_tile(job.shape, unit, start, state, in_place)
        start += TILE


@kernel
def _lay_out(job: Job, unit: Unit) -> int:
    """Return 0, because attention over floats needs no buffers besides those of `Unit`."""
    return 0


@kernel
def _add_nothing(job: Job, unit: Unit, more: int, merged: int, state: int) -> None:
    """Do nothing, because all tokens of a unit are in its partitions."""


attend_units = unit_loop("attend_units", _lay_out, _attend_partition, _add_nothing)


@kernel
def attend(call: AttentionCall) -> None:
    """Process units until all are taken.

    Every thread of a team runs this function on the same call. A thread that starts after the last
    unit is taken returns at once.
    """
    job = addresses_of(Job, call)
    attend_units(job, addresses_of(RotationPointers, call), job)
