"""Paged attention on float32, float16 and bfloat16 blocks: one algorithm for decode and for prefill.

Work unit: the query rows of one item (a tile of a sequence's query tokens, times the heads of a group) on one kv head.
Its tokens are walked in tiles of 64 inside spans of 512, both at absolute positions; each span is a softmax of its own
and the spans are merged in order. So a row's bits depend on its own sequence and position only.

A group of 16 tokens is read in place where it is float32, complete, and head_dim a multiple of 16, and for few rows
where its whole tile is so in float16; otherwise it is staged: widened to float32, padded, and zero where no token of
the item's range lies. What was never written is therefore never multiplied by anything.

Inside, float32 buffers are byte addresses: no bounds or wraparound code, and little for the compiler to look at.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvboost_edge.kernels.attention.call import (
    NEXT_UNIT,
    NUM_COUNTERS,
    NUM_SCRATCH_USERS,
    UNITS_DONE,
    AttentionCall,
    Job,
    Shape,
    Unit,
)
from kvboost_edge.kernels.attention.paged import ITEM_COLUMNS, SPAN
from kvboost_edge.kernels.attention.tiles import (
    GROUPS,
    ROWS,
    TILE,
    fill,
    half_scores_tile,
    half_values_tile,
    hide_row,
    mix_row,
    scale_row,
    scores_tile,
    softcap_row,
    softmax_rows,
    stage_rows,
    values_tile,
)
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.vectors import (
    KIND_F16,
    KIND_F32,
    LANES,
    address_of,
    exp_f32,
    fetch_add,
    load_f32,
    load_i32,
    load_scalar,
    store_f32,
    store_i64,
)

__all__ = [
    "after",
    "attend",
    "attend_units",
    "clear_state",
    "job_of",
    "merge_state",
    "open_unit",
    "place_group",
    "store_rows",
]

_VALUES_4, _VALUES_2, _VALUES_1 = values_tile[4], values_tile[2], values_tile[1]
_HALVES_4, _HALVES_2, _HALVES_1 = half_values_tile[4], half_values_tile[2], half_values_tile[1]
_ROWS_IN_PLACE = 2 * ROWS  # for so few rows it is cheaper to widen float16 twice than to store it widened
_LOWEST = np.float32(-np.inf)


@kernel
def after(address: int, floats: int) -> int:
    """The next cache line after `floats` floats at an aligned address."""
    return address + (floats + LANES - 1) // LANES * LANES * 4


@kernel
def place_group(job: Job, unit: Unit, group: int, position: int, in_place: bool) -> None:
    """Fill column `group` of the tile table for the 16 tokens at `position`, staging them where they need it.

    in_place: the tile is read as it is stored, see `_reads_halves`
    """
    shape = job.shape
    at = unit.table + 8 * group
    values_staged = GROUPS * LANES * shape.head_dim
    first, end = max(0, unit.low - position), min(LANES, unit.high - position)
    if first >= end:
        # Nothing to see: one row of zeros stands for all of them.
        zeros = unit.stage + 4 * GROUPS * LANES * (shape.head_dim + shape.padded_dim)
        fill(zeros, shape.padded_dim, np.float32(0.0))
        _set_column(at, zeros, 0, zeros, 0, zeros, zeros)
        return
    keys, values = _locate(job, unit, position)
    next_keys, next_values = keys, values
    if position + TILE < unit.high:
        next_keys, next_values = _locate(job, unit, position + TILE)
    size = 4 if shape.kind == KIND_F32 else 2
    key_step, value_step = shape.block_size * size, shape.head_dim * size
    if in_place or (shape.kind == KIND_F32 and end - first == LANES and shape.head_dim == shape.padded_dim):
        _set_column(at, keys, key_step, values, value_step, next_keys, next_values)
        return
    key_out = unit.stage + 4 * group * LANES * shape.head_dim
    value_out = unit.stage + 4 * (values_staged + group * LANES * shape.padded_dim)
    stage_rows(key_out, keys, next_keys, shape.head_dim, key_step, first, end, shape.kind)
    if end - first < LANES or shape.head_dim != shape.padded_dim:
        fill(value_out, LANES * shape.padded_dim, np.float32(0.0))
    full, row = shape.head_dim // LANES, 4 * shape.padded_dim
    source, out, ahead = values + first * value_step, value_out + first * row, next_values + first * value_step
    if shape.head_dim == shape.padded_dim:
        stage_rows(out, source, ahead, (end - first) * full, LANES * size, 0, LANES, shape.kind)
    else:
        for token in range(end - first):
            at_token = source + token * value_step
            stage_rows(out + token * row, at_token, at_token, full, LANES * size, 0, LANES, shape.kind)
            for channel in range(full * LANES, shape.head_dim):
                value = load_scalar(at_token + channel * size, shape.kind)
                store_f32(out + token * row + 4 * channel, value)
    _set_column(at, key_out, 4 * LANES, value_out, row, key_out, value_out)


@kernel
def _locate(job: Job, unit: Unit, position: int) -> tuple[Any, Any]:
    """Addresses of the keys and values stored for a position."""
    shape = job.shape
    size = 4 if shape.kind == KIND_F32 else 2
    block = load_i32(job.block_tables + 4 * (unit.sequence * job.max_blocks + position // shape.block_size))
    offset = position % shape.block_size
    base = (block * shape.num_kv_heads + unit.head) * shape.head_dim * shape.block_size
    return job.keys + (base + offset) * size, job.values + (base + offset * shape.head_dim) * size


@kernel
def _set_column(at: int, keys: int, key_step: int, values: int, value_step: int, ahead: int, ahead_values: int) -> None:
    store_i64(at, keys)
    store_i64(at + 8 * GROUPS, key_step)
    store_i64(at + 16 * GROUPS, values)
    store_i64(at + 24 * GROUPS, value_step)
    store_i64(at + 32 * GROUPS, ahead)
    store_i64(at + 40 * GROUPS, ahead_values)


@kernel
def _reads_halves(shape: Shape, unit: Unit, start: int) -> Any:
    """Whether the tile at `start` is complete float16 and read where it lies."""
    few = shape.kind == KIND_F16 and unit.num_rows <= _ROWS_IN_PLACE and shape.head_dim == shape.padded_dim
    return few and start >= unit.low and start + TILE <= unit.high


@kernel
def _attend_tile(shape: Shape, unit: Unit, start: int, state: int, in_place: bool) -> None:
    """Add the 64 tokens at `start`, whose places are in the tile table, to the running state of all rows."""
    dim = shape.padded_dim
    maxima = state + 4 * shape.padded_rows * dim
    totals = maxima + 4 * shape.padded_rows
    hides = start + TILE > unit.first_position + 1
    if shape.window > 0 and start < unit.high - shape.window:
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
                end = unit.first_position + (row + each) // shape.heads_per_group + 1 - start
                low = end - shape.window if shape.window > 0 else 0
                hide_row(at + each * TILE * 4, low, end)
        softmax_rows(at, maxima + 4 * row, totals + 4 * row, unit.rescale + 4 * row)
    for row in range(0, unit.num_rows, ROWS):
        at, out, factors = unit.scores + row * TILE * 4, state + row * dim * 4, unit.rescale + row * 4
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
def clear_state(shape: Shape, num_rows: int, state: int) -> None:
    rows = (num_rows + ROWS - 1) // ROWS * ROWS
    size = shape.padded_rows * shape.padded_dim
    fill(state, rows * shape.padded_dim, np.float32(0.0))
    fill(state + 4 * size, rows, _LOWEST)
    fill(state + 4 * (size + shape.padded_rows), rows, np.float32(0.0))


@kernel
def _attend_span(job: Job, unit: Unit, span: int, state: int) -> None:
    """Softmax of the unit's rows over one span, into a state."""
    clear_state(job.shape, unit.num_rows, state)
    start = max(unit.low, span * SPAN) // TILE * TILE
    end = min(unit.high, span * SPAN + SPAN)
    while start < end:
        in_place = _reads_halves(job.shape, unit, start)
        for group in range(GROUPS):
            place_group(job, unit, group, start + group * LANES, in_place)
        _attend_tile(job.shape, unit, start, state, in_place)
        start += TILE


@kernel
def merge_state(shape: Shape, num_rows: int, merged: int, state: int) -> None:
    """Merge a later span's state into the merged state."""
    dim = shape.padded_dim
    maxima = 4 * shape.padded_rows * dim
    totals = maxima + 4 * shape.padded_rows
    for row in range(num_rows):
        old, new = load_f32(merged + maxima + 4 * row), load_f32(state + maxima + 4 * row)
        top = max(old, new)
        base = np.float32(0.0) if top == _LOWEST else top
        keep, add = exp_f32(old - base), exp_f32(new - base)
        mix_row(merged + 4 * row * dim, state + 4 * row * dim, dim, keep, add)
        mix_row(merged + totals + 4 * row, state + totals + 4 * row, 1, keep, add)
        store_f32(merged + maxima + 4 * row, top)


@kernel
def _first_row(job: Job, item: int) -> Any:
    """First query row of an item in the flat batch; `item` is the address of its numbers, see WorkPlan."""
    return load_i32(job.cu_seqlens_q + 4 * load_i32(item)) + load_i32(item + 4)


@kernel
def open_unit(job: Job, item: int, head: int, scratch: int) -> Unit:
    """Lay out a thread's scratch for a unit and copy the unit's query rows, scaled."""
    shape = job.shape
    group, dim = shape.heads_per_group, shape.head_dim
    sequence, num_tokens = load_i32(item), load_i32(item + 8)
    num_rows = num_tokens * group
    cu_seqlens = job.cu_seqlens_q + 4 * sequence
    num_queries = load_i32(cu_seqlens + 4) - load_i32(cu_seqlens)
    first_position = load_i32(job.seq_lens + 4 * sequence) - num_queries + load_i32(item + 4)
    low = max(0, first_position - shape.window + 1) if shape.window > 0 else 0
    query = scratch
    scores = after(query, shape.padded_rows * dim)
    rescale = after(scores, shape.padded_rows * TILE)
    stage = after(rescale, shape.padded_rows)
    table = after(stage, GROUPS * LANES * (dim + shape.padded_dim) + shape.padded_dim)
    first = _first_row(job, item) * shape.num_kv_heads * group
    for row in range(num_rows):
        source = first + (row // group * shape.num_kv_heads + head) * group + row % group
        scale_row(query + 4 * row * dim, job.queries + 4 * source * dim, dim, np.float32(shape.softmax_scale))
    fill(query + 4 * num_rows * dim, -num_rows % ROWS * dim, np.float32(0.0))
    high = first_position + num_tokens
    return Unit(sequence, head, num_rows, first_position, low, high, query, scores, rescale, stage, table)


@kernel
def store_rows(job: Job, unit: Unit, item: int, merged: int) -> None:
    """Add the sinks, divide, and write the unit's rows of out and lse."""
    shape = job.shape
    group, dim = shape.heads_per_group, shape.head_dim
    maxima = merged + 4 * shape.padded_rows * shape.padded_dim
    first = _first_row(job, item) * shape.num_kv_heads * group
    for row in range(unit.num_rows):
        q_head = unit.head * group + row % group
        target = first + row // group * shape.num_kv_heads * group + q_head
        maximum, total = load_f32(maxima + 4 * row), load_f32(maxima + 4 * (shape.padded_rows + row))
        factor = np.float32(1.0)
        if job.sinks != 0:
            sink = load_f32(job.sinks + 4 * q_head)
            top = max(maximum, sink)
            factor = exp_f32(maximum - top)
            total = total * factor + exp_f32(sink - top)
            maximum = top
        scale_row(job.out + 4 * target * dim, merged + 4 * row * shape.padded_dim, dim, factor / total)
        store_f32(job.lse + 4 * target, maximum + np.float32(math.log(total)))


@kernel
def attend_units(job: Job) -> None:
    """Take units until none is left.

    A unit of a split sequence is one span, whose state goes to `parts`; the thread that finishes the last span of a
    group merges all of them, in order.
    """
    shape = job.shape
    counters = job.counters
    num_units = job.num_items * shape.num_kv_heads
    user = fetch_add(counters + 8 * NUM_SCRATCH_USERS, 1)
    if user >= job.num_threads:
        return
    merged = job.scratch + 4 * user * shape.scratch_floats
    own_state = after(merged, shape.state_floats)
    scratch = after(own_state, shape.state_floats)
    part_bytes = 4 * shape.state_floats
    while True:
        unit_index = fetch_add(counters + 8 * NEXT_UNIT, 1)
        if unit_index >= num_units:
            return
        item = job.items + 4 * ITEM_COLUMNS * (unit_index // shape.num_kv_heads)
        head = unit_index % shape.num_kv_heads
        unit = open_unit(job, item, head, scratch)
        first_span, end_span, group = load_i32(item + 12), load_i32(item + 16), load_i32(item + 20)
        num_spans = load_i32(item + 28)
        parts = job.parts + part_bytes * (load_i32(item + 32) * shape.num_kv_heads + head * num_spans)
        last = True
        if group < 0:
            clear_state(shape, unit.num_rows, merged)
        for span in range(first_span, end_span):
            state = own_state if group < 0 else parts + part_bytes * (span - load_i32(item + 24))
            _attend_span(job, unit, span, state)
            if group < 0:
                merge_state(shape, unit.num_rows, merged, state)
        if group >= 0:
            counter = counters + 8 * (NUM_COUNTERS + group * shape.num_kv_heads + head)
            last = fetch_add(counter, 1) == num_spans - 1
            if last:
                clear_state(shape, unit.num_rows, merged)
                for span in range(num_spans):
                    merge_state(shape, unit.num_rows, merged, parts + part_bytes * span)
        if last:
            store_rows(job, unit, item, merged)
        fetch_add(counters + 8 * UNITS_DONE, 1)


@kernel
def job_of(call: AttentionCall) -> Job:
    """The call as addresses."""
    sinks = address_of(call.sinks)
    if call.sinks.size == 0:
        sinks = 0
    # By position: so many keywords are more than Numba reads.
    return Job(
        address_of(call.queries),
        address_of(call.out),
        address_of(call.lse),
        call.keys,
        call.values,
        sinks,
        address_of(call.parts),
        address_of(call.scratch),
        address_of(call.counters),
        address_of(call.cu_seqlens_q),
        address_of(call.seq_lens),
        address_of(call.block_tables),
        call.block_tables.shape[1],
        address_of(call.items),
        call.items.shape[0],
        call.scratch.shape[0],
        call.shape,
    )


@kernel
def attend(call: AttentionCall) -> None:
    """Take units until none is left. Every thread of a team runs this on the same call; a late one returns at once."""
    attend_units(job_of(call))
