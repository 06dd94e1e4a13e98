"""Paged attention on float32, float16 and bfloat16 blocks: one algorithm for decode and for prefill.

Work unit: the query rows of one item (a tile of a sequence's query tokens, times the heads of a group) on one kv head.
Its tokens are walked in tiles of 64 inside spans of 512, both at absolute positions; each span is a softmax of its own
and the spans are merged in order. So a row's bits depend on its own sequence and position only.

A group of 16 tokens is read in place where it is float32, complete, and head_dim a multiple of 16; otherwise it is
staged: widened to float32, padded, and zero where no token of the item's range lies. What was never written is
therefore never multiplied by anything.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.paged import SPAN, Floats, Ints
from kvboost_edge.kernels.tiles import (
    GROUPS,
    ROWS,
    TILE,
    scores_tile,
    softcap_row,
    softmax_row,
    stage_rows,
    values_tile,
)
from kvboost_edge.kernels.vectors import KIND_F32, LANES, address_of, exp_f32, fetch_add, load_scalar

__all__ = ["NEXT_UNIT", "NUM_COUNTERS", "NUM_SCRATCH_USERS", "UNITS_DONE", "AttentionJob", "Shape", "attend"]

_VALUES_4, _VALUES_2, _VALUES_1 = values_tile[4], values_tile[2], values_tile[1]
_LOWEST = np.float32(-np.inf)

# Counters of a job, int64; one per (split group, kv head) follows, the number of its finished spans.
NEXT_UNIT, NUM_SCRATCH_USERS, UNITS_DONE, NUM_COUNTERS = 0, 1, 2, 3


class Shape(NamedTuple):
    """Sizes of one layer's attention. `padded_rows` is a multiple of 4, `padded_dim` of 16."""

    num_kv_heads: int
    heads_per_group: int
    head_dim: int
    padded_dim: int
    padded_rows: int
    block_size: int
    kind: int
    window: int
    softcap: float
    softmax_scale: float


class AttentionJob(NamedTuple):
    """All that the threads of one call share.

    queries, out  float32 [num_tokens, num_q_heads, head_dim];  lse float32 [num_tokens, num_q_heads]
    keys, values  addresses of the pool's arrays
    items         as in WorkPlan
    sinks         float32 [num_q_heads], or [0] for none
    counters      int64, see NUM_COUNTERS
    scratch       float32 [num_threads, `scratch_floats`]; a thread takes a row when it joins
    parts         float32 [num_parts * num_kv_heads, `part_floats`]: sums, maxima and totals of split spans
    """

    queries: Floats
    out: Floats
    lse: Floats
    keys: int
    values: int
    cu_seqlens_q: Ints
    seq_lens: Ints
    block_tables: Ints
    items: Ints
    sinks: Floats
    counters: npt.NDArray[np.int64]
    scratch: Floats
    parts: Floats
    shape: Shape


class _Rows(NamedTuple):
    """The running state of an item's rows, views of a thread's scratch. All float32.

    query [rows * head_dim] scaled; scores [rows * 64]; sums, merged [rows * padded_dim]; the others [rows].
    """

    query: Any
    scores: Any
    sums: Any
    maximum: Any
    total: Any
    rescale: Any
    merged: Any
    merged_maximum: Any
    merged_total: Any
    stage: Any
    table: Any


def part_floats(shape: Shape) -> int:
    """Floats of one partial result: sums, maxima, totals."""
    return shape.padded_rows * (shape.padded_dim + 2)


def scratch_floats(shape: Shape) -> int:
    """Floats of scratch that one thread needs, a multiple of 16."""
    rows = shape.padded_rows * (shape.head_dim + TILE + 2 * shape.padded_dim + 5)
    stage = GROUPS * LANES * (shape.head_dim + shape.padded_dim) + shape.padded_dim + LANES
    return -(-(rows + stage + 11 * LANES) // LANES) * LANES


@kernel
def _take(scratch: Floats, start: int, size: int) -> tuple[Floats, int]:
    """A view of `size` floats and the next 64-byte aligned start."""
    return scratch[start : start + size], start + (size + LANES - 1) // LANES * LANES


@kernel
def _carve(scratch: Floats, table: npt.NDArray[np.int64], shape: Shape) -> _Rows:
    rows, dim = shape.padded_rows, shape.padded_dim
    query, at = _take(scratch, 0, rows * shape.head_dim)
    scores, at = _take(scratch, at, rows * TILE)
    sums, at = _take(scratch, at, rows * dim)
    merged, at = _take(scratch, at, rows * dim)
    maximum, at = _take(scratch, at, rows)
    total, at = _take(scratch, at, rows)
    rescale, at = _take(scratch, at, rows)
    merged_maximum, at = _take(scratch, at, rows)
    merged_total, at = _take(scratch, at, rows)
    stage, at = _take(scratch, at, GROUPS * LANES * (shape.head_dim + dim) + dim)
    return _Rows(query, scores, sums, maximum, total, rescale, merged, merged_maximum, merged_total, stage, table)


@kernel
def _stage_values(out: int, source: int, low: int, high: int, shape: Shape) -> None:
    """Stage tokens [low, high) of 16 at float32 address `out`, rows of padded_dim; the rest becomes 0."""
    size = 4 if shape.kind == KIND_F32 else 2
    row_bytes, out_bytes = shape.head_dim * size, shape.padded_dim * 4
    full = shape.head_dim // LANES
    # An empty lane range zeroes without looking at what the (valid) source address holds.
    stage_rows(out, source, low, 0, out_bytes, full, 0, 0, shape.kind)
    stage_rows(
        out + low * out_bytes, source + low * row_bytes, high - low, row_bytes, out_bytes, full, 0, LANES, shape.kind
    )
    stage_rows(out + high * out_bytes, source, LANES - high, 0, out_bytes, full, 0, 0, shape.kind)


@kernel
def _stage_value_tail(stage: Floats, start: int, source: int, low: int, high: int, shape: Shape) -> None:
    """The channels after the last full 16, one by one."""
    size = 4 if shape.kind == KIND_F32 else 2
    for token in range(LANES):
        for channel in range(shape.head_dim // LANES * LANES, shape.padded_dim):
            value = np.float32(0.0)
            if low <= token < high and channel < shape.head_dim:
                value = load_scalar(source + (token * shape.head_dim + channel) * size, shape.kind)
            stage[start + token * shape.padded_dim + channel] = value


@kernel
def _place_group(
    job: AttentionJob, rows: _Rows, sequence: int, head: int, group: int, position: int, low: int, high: int
) -> None:
    """Fill column `group` of the tile table for the 16 tokens at `position`, of which [low, high) are to be seen."""
    shape = job.shape
    table, stage = rows.table, rows.stage
    key_stage = group * LANES * shape.head_dim
    value_stage = GROUPS * LANES * shape.head_dim + group * LANES * shape.padded_dim
    if high <= position or low >= position + LANES:
        # Nothing to see: one row of zeros stands for all of them.
        zeros = GROUPS * LANES * (shape.head_dim + shape.padded_dim)
        stage[zeros : zeros + shape.padded_dim] = np.float32(0.0)
        at = address_of(stage) + 4 * zeros
        for row in range(6):
            table[row * GROUPS + group] = 0 if row % 2 == 1 and row < 4 else at
        return
    size = 4 if shape.kind == KIND_F32 else 2
    block = np.int64(job.block_tables[sequence, position // shape.block_size])
    offset = position % shape.block_size
    base = (block * shape.num_kv_heads + head) * shape.head_dim * shape.block_size * size
    keys = job.keys + base + offset * size
    values = job.values + base + offset * shape.head_dim * size
    first, end = max(0, low - position), min(LANES, high - position)
    if shape.kind == KIND_F32 and first == 0 and end == LANES and shape.head_dim == shape.padded_dim:
        table[group], table[GROUPS + group] = keys, shape.block_size * size
        table[2 * GROUPS + group], table[3 * GROUPS + group] = values, shape.head_dim * size
    else:
        key_out = address_of(stage) + 4 * key_stage
        value_out = address_of(stage) + 4 * value_stage
        stage_rows(key_out, keys, shape.head_dim, shape.block_size * size, 4 * LANES, 1, first, end, shape.kind)
        _stage_values(value_out, values, first, end, shape)
        if shape.head_dim != shape.padded_dim:
            _stage_value_tail(stage, value_stage, values, first, end, shape)
        table[group], table[GROUPS + group] = key_out, 4 * LANES
        table[2 * GROUPS + group], table[3 * GROUPS + group] = value_out, 4 * shape.padded_dim
    table[4 * GROUPS + group] = keys
    table[5 * GROUPS + group] = values


@kernel
def _attend_tile(job: AttentionJob, rows: _Rows, num_rows: int, start: int, first_position: int) -> None:
    """Add the 64 tokens at `start`, whose places are in the tile table, to the running state of all rows."""
    shape = job.shape
    query, scores, table = address_of(rows.query), address_of(rows.scores), address_of(rows.table)
    sums, rescale = address_of(rows.sums), address_of(rows.rescale)
    maximum, total = address_of(rows.maximum), address_of(rows.total)
    dim = shape.padded_dim
    for row in range(0, num_rows, ROWS):
        at = scores + row * TILE * 4
        scores_tile(query + row * shape.head_dim * 4, table, shape.head_dim, 0, at)
        for each in range(row, min(row + ROWS, num_rows)):
            position = first_position + each // shape.heads_per_group
            low = position - shape.window + 1 - start if shape.window > 0 else 0
            here = scores + each * TILE * 4
            if shape.softcap > 0:
                softcap_row(here, np.float32(shape.softcap))
            softmax_row(here, low, position + 1 - start, maximum + 4 * each, total + 4 * each, rescale + 4 * each)
    for row in range(0, num_rows, ROWS):
        at, out, factors = scores + row * TILE * 4, sums + row * dim * 4, rescale + row * 4
        channel = 0
        while dim - channel >= 64:
            _VALUES_4(at, table, channel, factors, out, dim * 4, 0)
            channel += 64
        if dim - channel >= 32:
            _VALUES_2(at, table, channel, factors, out, dim * 4, 0)
            channel += 32
        if dim - channel >= 16:
            _VALUES_1(at, table, channel, factors, out, dim * 4, 0)


@kernel
def _attend_span(job: AttentionJob, rows: _Rows, item: int, head: int, span: int) -> None:
    """Softmax of the item's rows over one span, into rows.sums, rows.maximum and rows.total."""
    shape = job.shape
    sequence = job.items[item, 0]
    num_rows = job.items[item, 2] * shape.heads_per_group
    num_queries = job.cu_seqlens_q[sequence + 1] - job.cu_seqlens_q[sequence]
    first_position = np.int64(job.seq_lens[sequence] - num_queries + job.items[item, 1])
    low = max(0, first_position - shape.window + 1) if shape.window > 0 else 0
    high = first_position + job.items[item, 2]
    rows.sums[:] = np.float32(0.0)
    rows.maximum[:] = _LOWEST
    rows.total[:] = np.float32(0.0)
    start = max(low, span * SPAN) // TILE * TILE
    end = min(high, span * SPAN + SPAN)
    while start < end:
        for group in range(GROUPS):
            _place_group(job, rows, sequence, head, group, start + group * LANES, low, high)
        _attend_tile(job, rows, num_rows, start, first_position)
        start += TILE


@kernel
def _merge_rows(rows: _Rows, num_rows: int, dim: int, sums: Floats, maximum: Floats, total: Floats) -> None:
    """Merge a later span's (sums, maximum, total) into the rows' merged state."""
    for row in range(num_rows):
        old, new = rows.merged_maximum[row], maximum[row]
        top = max(old, new)
        base = np.float32(0.0) if top == _LOWEST else top
        keep, add = exp_f32(old - base), exp_f32(new - base)
        for at in range(row * dim, row * dim + dim):
            rows.merged[at] = rows.merged[at] * keep + sums[at] * add
        rows.merged_maximum[row] = top
        rows.merged_total[row] = rows.merged_total[row] * keep + total[row] * add


@kernel
def _clear_merged(rows: _Rows) -> None:
    rows.merged[:] = np.float32(0.0)
    rows.merged_maximum[:] = _LOWEST
    rows.merged_total[:] = np.float32(0.0)


@kernel
def _load_queries(job: AttentionJob, rows: _Rows, item: int, head: int) -> None:
    """Copy the item's query rows, scaled; rows that pad to a multiple of 4 become 0."""
    shape = job.shape
    first = job.cu_seqlens_q[job.items[item, 0]] + job.items[item, 1]
    num_rows = job.items[item, 2] * shape.heads_per_group
    scale = np.float32(shape.softmax_scale)
    for row in range(num_rows):
        token, q_head = first + row // shape.heads_per_group, row % shape.heads_per_group + head * shape.heads_per_group
        for dim in range(shape.head_dim):
            rows.query[row * shape.head_dim + dim] = job.queries[token, q_head, dim] * scale
    rows.query[num_rows * shape.head_dim :] = np.float32(0.0)
    rows.scores[num_rows * TILE :] = np.float32(0.0)
    rows.rescale[:] = np.float32(0.0)


@kernel
def _store_rows(job: AttentionJob, rows: _Rows, item: int, head: int) -> None:
    """Add the sinks, divide, and write the item's rows of out and lse."""
    shape = job.shape
    first = job.cu_seqlens_q[job.items[item, 0]] + job.items[item, 1]
    for row in range(job.items[item, 2] * shape.heads_per_group):
        token, q_head = first + row // shape.heads_per_group, row % shape.heads_per_group + head * shape.heads_per_group
        maximum, total, factor = rows.merged_maximum[row], rows.merged_total[row], np.float32(1.0)
        if job.sinks.size > 0:
            top = max(maximum, job.sinks[q_head])
            factor = exp_f32(maximum - top)
            total = total * factor + exp_f32(job.sinks[q_head] - top)
            maximum = top
        inverse = factor / total
        for dim in range(shape.head_dim):
            job.out[token, q_head, dim] = rows.merged[row * shape.padded_dim + dim] * inverse
        job.lse[token, q_head] = maximum + np.float32(math.log(total))


@kernel
def _attend_split(job: AttentionJob, rows: _Rows, item: int, head: int) -> None:
    """One span of a split sequence; the thread that finishes the group's last span merges all of them, in order."""
    shape = job.shape
    group, first_span, num_spans = job.items[item, 5], job.items[item, 6], job.items[item, 7]
    num_rows, dim = job.items[item, 2] * shape.heads_per_group, shape.padded_dim
    base = np.int64(job.items[item, 8]) * shape.num_kv_heads + np.int64(head) * num_spans
    size = shape.padded_rows * dim
    _attend_span(job, rows, item, head, job.items[item, 3])
    part = job.parts[base + job.items[item, 3] - first_span]
    part[: num_rows * dim] = rows.sums[: num_rows * dim]
    part[size : size + num_rows] = rows.maximum[:num_rows]
    part[size + shape.padded_rows : size + shape.padded_rows + num_rows] = rows.total[:num_rows]
    counter = NUM_COUNTERS + np.int64(group) * shape.num_kv_heads + head
    if fetch_add(address_of(job.counters) + 8 * counter, 1) == num_spans - 1:
        _clear_merged(rows)
        for span in range(num_spans):
            part = job.parts[base + span]
            _merge_rows(rows, num_rows, dim, part, part[size:], part[size + shape.padded_rows :])
        _store_rows(job, rows, item, head)


@kernel
def attend(job: AttentionJob) -> None:
    """Take units until none is left. Every thread of a team runs this on the same job."""
    shape = job.shape
    counters = address_of(job.counters)
    num_units = job.items.shape[0] * shape.num_kv_heads
    scratch = job.scratch[fetch_add(counters + 8 * NUM_SCRATCH_USERS, 1)]
    rows = _carve(scratch, np.empty(6 * GROUPS, dtype=np.int64), shape)
    while True:
        unit = fetch_add(counters + 8 * NEXT_UNIT, 1)
        if unit >= num_units:
            return
        item, head = unit // shape.num_kv_heads, unit % shape.num_kv_heads
        _load_queries(job, rows, item, head)
        if job.items[item, 5] >= 0:
            _attend_split(job, rows, item, head)
        else:
            _clear_merged(rows)
            num_rows = job.items[item, 2] * shape.heads_per_group
            for span in range(job.items[item, 3], job.items[item, 4]):
                _attend_span(job, rows, item, head, span)
                _merge_rows(rows, num_rows, shape.padded_dim, rows.sums, rows.maximum, rows.total)
            _store_rows(job, rows, item, head)
        fetch_add(counters + 8 * UNITS_DONE, 1)
