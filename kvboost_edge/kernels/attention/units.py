"""What a thread does in a paged attention call: it takes units, attends their partitions, and
merges them.

Work unit: the query rows of one item (a tile of a sequence's query tokens, times the heads of a kv
head) on one kv head. Its tokens are walked in partitions of 512 at absolute positions; each
partition is a softmax of its own and the partitions are merged in order. So a row's bits depend on
its own sequence and position only. Keys that were computed at other positions stay as they are: the
query rows of a unit over them are rotated to where they would have been there.

Inside, float32 buffers are byte addresses: no bounds or wraparound code, and little for the
compiler to look at.
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
    AttentionShape,
    Job,
    RotationPointers,
    Unit,
)
from kvboost_edge.kernels.attention.float_tiles import ROWS, STRIPS, TILE, fill, mix_row, scale_row
from kvboost_edge.kernels.attention.paged import ITEM_COLUMNS, NO_END, Item
from kvboost_edge.kernels.attention.rope import rotate_head
from kvboost_edge.kernels.jit import kernel, named_kernel
from kvboost_edge.kernels.tuples import load_i32_row
from kvboost_edge.kernels.vectors import LANES, exp_f32, fetch_add, load_f32, load_i32, store_f32

__all__ = ["after", "clear_state", "merge_partition", "unit_loop"]

_LOWEST = np.float32(-np.inf)


@kernel
def after(address: int, floats: int) -> int:
    """The next cache line after `floats` floats at an aligned address."""
    return address + (floats + LANES - 1) // LANES * LANES * 4


@kernel
def clear_state(shape: AttentionShape, num_rows: int, state: int) -> None:
    rows = (num_rows + ROWS - 1) // ROWS * ROWS
    size = shape.padded_rows * shape.padded_dim
    fill(state, rows * shape.padded_dim, np.float32(0.0))
    fill(state + 4 * size, rows, _LOWEST)
    fill(state + 4 * (size + shape.padded_rows), rows, np.float32(0.0))


@kernel
def merge_partition(shape: AttentionShape, num_rows: int, merged: int, state: int) -> None:
    """Merge a later partition's state into the merged state."""
    dim = shape.padded_dim
    maxima = 4 * shape.padded_rows * dim
    totals = maxima + 4 * shape.padded_rows
    for row in range(num_rows):
        old = load_f32(merged + maxima + 4 * row)
        new = load_f32(state + maxima + 4 * row)
        top = max(old, new)
        base = np.float32(0.0) if top == _LOWEST else top
        keep = exp_f32(old - base)
        add = exp_f32(new - base)
        mix_row(merged + 4 * row * dim, state + 4 * row * dim, dim, keep, add)
        mix_row(merged + totals + 4 * row, state + totals + 4 * row, 1, keep, add)
        store_f32(merged + maxima + 4 * row, top)


@kernel
def _first_row(job: Job, item: Item) -> Any:
    """First query row of an item in the flat batch."""
    return load_i32(job.cu_seqlens_q + 4 * item.sequence) + item.first_row


@kernel
def _take_queries(job: Job, item: Item, head: int, query: int) -> None:
    """Copy an item's query rows, scaled; what fills up the last 4 rows is 0."""
    shape = job.shape
    heads = shape.heads_per_kv
    dim = shape.head_dim
    num_rows = item.num_rows * heads
    first = _first_row(job, item) * shape.num_kv_heads * heads
    for row in range(num_rows):
        source = first + (row // heads * shape.num_kv_heads + head) * heads + row % heads
        scale_row(
            query + 4 * row * dim,
            job.queries + 4 * source * dim,
            dim,
            np.float32(shape.softmax_scale),
        )
    fill(query + 4 * num_rows * dim, -num_rows % ROWS * dim, np.float32(0.0))


@kernel
def _turn_queries(job: Job, turn: RotationPointers, item: Item, unit: Unit) -> None:
    """Take a unit's query rows, scaled, as they are at positions so far back as its keys were
    computed.

    They are rotated once, from before rotation: turning the others back would apply a rope's factor
    twice.
    """
    shape = job.shape
    heads = shape.heads_per_kv
    dim = shape.head_dim
    first = _first_row(job, item)
    position = unit.first_position + item.shift - item.delta
    for row in range(unit.num_rows):
        token = row // heads
        at = unit.query + 4 * row * dim
        source = turn.unrotated + 4 * (
            (first + token) * turn.unrotated_step + (unit.head * heads + row % heads) * dim
        )
        place = 4 * (position + token) * turn.half
        rotate_head(source, turn.cos + place, turn.sin + place, turn.half, dim, at)
        scale_row(at, at, dim, np.float32(shape.softmax_scale))


@kernel
def _open_unit(job: Job, item: Item, head: int, scratch: int) -> Unit:
    """Lay out a thread's scratch for a unit and copy the unit's query rows, scaled."""
    shape = job.shape
    heads = shape.heads_per_kv
    dim = shape.head_dim
    num_rows = item.num_rows * heads
    cu_seqlens = job.cu_seqlens_q + 4 * item.sequence
    num_queries = load_i32(cu_seqlens + 4) - load_i32(cu_seqlens)
    seq_len = load_i32(job.seq_lens + 4 * item.sequence) - item.shift
    first_position = seq_len - num_queries + item.first_row
    low = (
        max(item.valid_from, first_position - shape.window + 1)
        if shape.window > 0
        else item.valid_from
    )
    query = scratch
    scores = after(query, shape.padded_rows * dim)
    rescale = after(scores, shape.padded_rows * TILE)
    stage = after(rescale, shape.padded_rows)
    table = after(stage, STRIPS * LANES * (dim + shape.padded_dim) + shape.padded_dim)
    _take_queries(job, item, head, query)
    return Unit(
        sequence=item.sequence,
        first_index=item.first_index,
        shift=item.shift,
        whole=0 if item.valid_to == NO_END else item.valid_to,
        head=head,
        num_rows=num_rows,
        first_position=first_position,
        low=low,
        high=min(item.valid_to, seq_len, first_position + item.num_rows + shape.ahead),
        query=query,
        scores=scores,
        rescale=rescale,
        stage=stage,
        table=table,
    )


@kernel
def _store_rows(job: Job, unit: Unit, item: Item, merged: int) -> None:
    """Add the sinks, divide, and write the unit's rows of out and lse."""
    shape = job.shape
    heads = shape.heads_per_kv
    dim = shape.head_dim
    maxima = merged + 4 * shape.padded_rows * shape.padded_dim
    first = _first_row(job, item) * shape.num_kv_heads * heads
    for row in range(unit.num_rows):
        q_head = unit.head * heads + row % heads
        target = first + row // heads * shape.num_kv_heads * heads + q_head
        maximum = load_f32(maxima + 4 * row)
        total = load_f32(maxima + 4 * (shape.padded_rows + row))
        factor = np.float32(1.0)
        if job.sinks != 0:
            sink = load_f32(job.sinks + 4 * q_head)
            top = max(maximum, sink)
            factor = exp_f32(maximum - top)
            total = total * factor + exp_f32(sink - top)
            maximum = top
        scale_row(
            job.out + 4 * target * dim, merged + 4 * row * shape.padded_dim, dim, factor / total
        )
        store_f32(job.lse + 4 * target, maximum + np.float32(math.log(total)))


def unit_loop(name: str, lay_out: Any, attend_partition: Any, add_last: Any) -> Any:
    """The kernel `loop(job, turn, whole)` of this name: take units of the `Job` until none is left.

    What differs from call to call is in three kernels, which get `whole`, the job with all that
    belongs to it:

    lay_out(whole, unit)                                    what a unit needs beside a `Unit`
    attend_partition(whole, unit, more, partition, state)   softmax of the unit's rows over one
                                                            partition, into a state
    add_last(whole, unit, more, merged, state)              what is merged after all partitions;
                                                            state: to work in

    A unit of a split tile is one partition, whose state goes to `partials`; the thread that
    finishes the tile's last one merges all of them, in order.
    """

    @named_kernel(name)
    def loop(job: Job, turn: RotationPointers, whole: Any) -> None:
        shape = job.shape
        counters = job.counters
        num_units = job.num_items * shape.num_kv_heads
        user = fetch_add(counters + 8 * NUM_SCRATCH_USERS, 1)
        if user >= job.num_threads:
            return
        merged = job.scratch + 4 * user * shape.scratch_floats
        own_state = after(merged, shape.state_floats)
        scratch = after(own_state, shape.state_floats)
        state_bytes = 4 * shape.state_floats
        while True:
            unit_index = fetch_add(counters + 8 * NEXT_UNIT, 1)
            if unit_index >= num_units:
                return
            item = load_i32_row(
                Item, job.items + 4 * ITEM_COLUMNS * (unit_index // shape.num_kv_heads)
            )
            head = unit_index % shape.num_kv_heads
            unit = _open_unit(job, item, head, scratch)
            if item.delta != 0:
                _turn_queries(job, turn, item, unit)
            more = lay_out(whole, unit)
            first_state = item.first_partial * shape.num_kv_heads + head * item.num_partitions
            partials = job.partials + state_bytes * first_state
            last = True
            if item.split < 0:
                clear_state(shape, unit.num_rows, merged)
            for partition in range(item.first_partition, item.end_partition):
                state = own_state if item.split < 0 else partials + state_bytes * item.ordinal
                attend_partition(whole, unit, more, partition, state)
                if item.split < 0:
                    merge_partition(shape, unit.num_rows, merged, state)
            if item.split >= 0:
                counter = counters + 8 * (NUM_COUNTERS + item.split * shape.num_kv_heads + head)
                last = fetch_add(counter, 1) == item.num_partitions - 1
                if last:
                    clear_state(shape, unit.num_rows, merged)
                    for partition in range(item.num_partitions):
                        merge_partition(
                            shape, unit.num_rows, merged, partials + state_bytes * partition
                        )
            if last:
                if item.delta != 0:
                    # What is merged last are keys of this pass: the rows as they were before they
                    # were turned.
                    _take_queries(job, item, head, unit.query)
                add_last(whole, unit, more, merged, own_state)
                _store_rows(job, unit, item, merged)
            fetch_add(counters + 8 * UNITS_DONE, 1)

    return loop
