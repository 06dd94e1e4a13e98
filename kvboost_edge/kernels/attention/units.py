"""Work units of paged attention: threads take units, attend to their partitions and merge results.

A unit is the query rows of one item (a tile of a sequence's query tokens x the query heads of a KV
head) for one KV head. The tokens that it sees are processed in partitions of 512 at absolute
positions. Each partition has its own softmax state, and states merge in order. A row's bits
therefore depend only on its sequence and position.

KV that was computed at other positions is not modified. Instead, the unit's query rows are rotated
back by the segment's delta.

Scores, sinks and running maxima are logarithms to base 2, because 2^x is cheaper than exp(x). The
factor log2(e) is part of the softmax scale; see `AttentionShape`.

Float32 buffers are passed as byte addresses, which need no bounds checks or wraparound code and
produce less IR.
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
from kvboost_edge.kernels.attention.paged import ITEM_COLUMNS, LOG2_E, NO_END, Item
from kvboost_edge.kernels.attention.rope import rotate_head
from kvboost_edge.kernels.jit import kernel, named_kernel
from kvboost_edge.kernels.tuples import load_i32_row
from kvboost_edge.kernels.vectors import (
    LANES,
    exp2_f32,
    fetch_add,
    fma_f32,
    load_f32,
    load_i32,
    store_f32,
)

__all__ = ["after", "clear_state", "merge_partition", "unit_loop"]

_LOWEST = np.float32(-np.inf)
_LOG2_E = np.float32(LOG2_E)
_LN_2 = np.float32(math.log(2.0))


@kernel
def after(address: int, floats: int) -> int:
    """Return the first cache-line address after `floats` floats at an aligned address."""
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
    """Merge the softmax state of a later partition into the merged state."""
    dim = shape.padded_dim
    maxima = 4 * shape.padded_rows * dim
    totals = maxima + 4 * shape.padded_rows
    for row in range(num_rows):
        old = load_f32(merged + maxima + 4 * row)
        new = load_f32(state + maxima + 4 * row)
        top = max(old, new)
        base = np.float32(0.0) if top == _LOWEST else top
        keep = exp2_f32(old - base)
        add = exp2_f32(new - base)
        mix_row(merged + 4 * row * dim, state + 4 * row * dim, dim, keep, add)
        mix_row(merged + totals + 4 * row, state + totals + 4 * row, 1, keep, add)
        store_f32(merged + maxima + 4 * row, top)


@kernel
def _first_row(job: Job, item: Item) -> Any:
    """Return the index of an item's first query row in the flat batch."""
    return load_i32(job.cu_seqlens_q + 4 * item.sequence) + item.first_row


@kernel
def _take_queries(job: Job, item: Item, head: int, query: int) -> None:
    """Copy and scale an item's query rows; set the padding rows to 0."""
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
    """Copy and scale a unit's query rows, rotated to where its keys were computed."""
    # Start from the queries before RoPE. Rotating the other queries back would apply RoPE's factor
    # twice.
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
    """Lay out a thread's scratch for a unit, and copy and scale the unit's query rows."""
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
    """Normalize the unit's rows, including sinks, and write them to `out` and `lse`."""
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
            sink = load_f32(job.sinks + 4 * q_head) * _LOG2_E
            top = max(maximum, sink)
            factor = exp2_f32(maximum - top)
            total = fma_f32(total, factor, exp2_f32(sink - top))
            maximum = top
        scale_row(
            job.out + 4 * target * dim, merged + 4 * row * shape.padded_dim, dim, factor / total
        )
        log_total = np.float32(math.log(total))
        store_f32(job.lse + 4 * target, fma_f32(maximum, _LN_2, log_total))


def unit_loop(name: str, lay_out: Any, attend_partition: Any, add_last: Any) -> Any:
    """Return the kernel `loop(job, turn, whole)`, which processes units until all are taken.

    A unit of a split tile covers one partition and stores its softmax state in `partials`. The
    thread that finishes the tile's last partition merges all states in order.

    Args:
        name: the kernel's name.
        lay_out: kernel (whole, unit) -> more, which returns the buffers that a unit needs besides
            those of `Unit`. `whole` is the job with the arguments of its KV format.
        attend_partition: kernel (whole, unit, more, partition, state), which computes the softmax
            state of the unit's rows over one partition.
        add_last: kernel (whole, unit, more, merged, state), which merges the tokens that come after
            all partitions; `state` is scratch.
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
                    # The tokens merged last belong to the current pass, so they need the queries as
                    # rotated for their own positions.
                    _take_queries(job, item, head, unit.query)
                add_last(whole, unit, more, merged, own_state)
                _store_rows(job, unit, item, merged)
            fetch_add(counters + 8 * UNITS_DONE, 1)

    return loop
