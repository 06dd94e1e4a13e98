"""Paged attention on quantized blocks: full blocks in integers, each query's own block in float16.

Units, spans, tiles and their merging are those of attention.py. A row sees the quantized tokens up to the beginning of
its own block, span by span; then, as a part of its own that is merged last, the float16 copy of that block. So a row's
bits depend on its own sequence and position, not on which blocks a pass happens to fill.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvboost_edge.kernels.attention.attend import (
    after,
    clear_state,
    job_of,
    merge_state,
    open_unit,
    place_group,
    store_rows,
)
from kvboost_edge.kernels.attention.call import (
    NEXT_UNIT,
    NUM_COUNTERS,
    NUM_SCRATCH_USERS,
    UNITS_DONE,
    AttentionCall,
    Job,
    Unit,
)
from kvboost_edge.kernels.attention.paged import ITEM_COLUMNS, SPAN, Ints
from kvboost_edge.kernels.attention.tiles import (
    GROUPS,
    ROWS,
    TILE,
    fill,
    hide_row,
    scale_row,
    scores_group,
    softcap_row,
    softmax_rows,
    stage_rows,
    values_group,
)
from kvboost_edge.kernels.coded.layout import KVRecord
from kvboost_edge.kernels.coded.rows import decode_keys, divide_row, fold_rows, prefetch_lines
from kvboost_edge.kernels.coded.tiles import coded_scores, coded_values, weigh_rows
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.vectors import (
    KIND_F16,
    LANES,
    address_of,
    fetch_add,
    load_i32,
    store_f32,
    store_i64,
)

__all__ = ["CodedCall", "CodedJob", "attend_coded", "attend_coded_units", "coded_scratch_floats"]

_SCORES_8, _SCORES_4 = coded_scores[8], coded_scores[4]
_V8_4, _V8_1, _V4_4, _V4_1 = coded_values[8, 4], coded_values[8, 1], coded_values[4, 4], coded_values[4, 1]
_OWN_4, _OWN_1 = values_group[4], values_group[1]


class CodedCall(NamedTuple):
    """A call on a quantized pool.

    call          its pool is that of the own blocks (float16), its block tables are theirs
    records       address of uint8 [num_blocks, num_kv_heads, record.nbytes]
    block_tables  int32 [num_seqs, max_blocks] of the quantized blocks
    first         int32 [num_seqs]: number of the first block in a row of the own blocks' tables
    """

    call: AttentionCall
    records: int
    record: KVRecord
    block_tables: Ints
    first: Ints


class CodedJob(NamedTuple):
    """A CodedCall as addresses."""

    job: Job
    records: int
    record: KVRecord
    block_tables: int
    max_blocks: int
    first: int


class _Coded(NamedTuple):
    """Where a unit keeps what quantized tiles need, byte addresses.

    rows, units  float32 [padded_rows / 4, dim / 16, 4, 16], see `fold_rows`;  row_steps float32 [padded_rows]
    zeros, steps float32 [4 groups, dim];  tops float32 [4 groups];  scales, middles float32 [64]
    planes       int8 [dim / 16, 4 groups, 4, 32];  dots float32 [4 groups, 4]
    codes        uint8 [4, 64];  numbers float32 [3, 4];  blank bytes of 0, as many as a group of a record
    """

    rows: int
    units: int
    row_steps: int
    zeros: int
    steps: int
    tops: int
    scales: int
    middles: int
    planes: int
    dots: int
    codes: int
    numbers: int
    blank: int


def coded_scratch_floats(padded_rows: int, dim: int) -> int:
    """Floats of scratch a thread needs beside that of attention.py, `_lay_out`'s sections rounded up."""
    sections = (2 * padded_rows * dim, padded_rows, 2 * GROUPS * dim, 2 * TILE, 2 * ROWS * dim, 2 * TILE, dim)
    return sum(sections) + 16 * 2 * LANES


@kernel
def _lay_out(job: CodedJob, unit: Unit, start: int) -> _Coded:
    """Lay out the scratch behind `start` and prepare the unit's query rows."""
    shape, dim = job.job.shape, job.record.dim
    rows = after(start, 0)
    units = after(rows, shape.padded_rows * dim)
    row_steps = after(units, shape.padded_rows * dim)
    zeros = after(row_steps, shape.padded_rows)
    steps = after(zeros, GROUPS * dim)
    tops = after(steps, GROUPS * dim)
    scales = after(tops, GROUPS)
    middles = after(scales, TILE)
    planes = after(middles, TILE)
    dots = after(planes, 2 * ROWS * dim)
    codes = after(dots, GROUPS * ROWS)
    numbers = after(codes, TILE)
    blank = after(numbers, 3 * ROWS)
    for row in range((unit.num_rows + ROWS - 1) // ROWS * ROWS):
        offset = 4 * (row // ROWS * ROWS * dim + row % ROWS * LANES)
        for channel in range(0, dim, LANES):
            at, count = rows + offset + 4 * ROWS * channel, min(LANES, shape.head_dim - channel)
            scale_row(at, unit.query + 4 * (row * shape.head_dim + channel), count, np.float32(1.0))
            fill(at + 4 * count, LANES - count, np.float32(0.0))
        store_f32(row_steps + 4 * row, divide_row(units + offset, rows + offset, dim))
    fill(blank, dim, np.float32(0.0))
    return _Coded(rows, units, row_steps, zeros, steps, tops, scales, middles, planes, dots, codes, numbers, blank)


@kernel
def _place_coded(job: CodedJob, unit: Unit, coded: _Coded, group: int, position: int, high: int) -> None:
    """Fill column `group` of the tile table for the 16 tokens at `position` and decode what belongs to their block."""
    record, at = job.record, unit.table + 8 * group
    zeros, steps = coded.zeros + 4 * group * record.dim, coded.steps + 4 * group * record.dim
    scales, middles = coded.scales + 4 * group * LANES, coded.middles + 4 * group * LANES
    if position >= high or position + LANES <= unit.low:
        store_i64(at, coded.blank)
        store_i64(at + 8 * GROUPS, 0)
        store_i64(at + 16 * GROUPS, coded.blank)
        store_i64(at + 24 * GROUPS, 0)
        fill(zeros, record.dim, np.float32(0.0))
        fill(steps, record.dim, np.float32(1.0))
        store_f32(coded.tops + 4 * group, np.float32(1.0))
        fill(scales, LANES, np.float32(0.0))
        fill(middles, LANES, np.float32(0.0))
        return
    here, offset = _record_at(job, unit, position), position % record.block_size
    store_i64(at, here + 4 * offset)
    store_i64(at + 8 * GROUPS, 4 * record.block_size)
    store_i64(at + 16 * GROUPS, here + record.values + offset * record.dim * record.v_bits // 8)
    store_i64(at + 24 * GROUPS, 4 * record.dim)
    top = decode_keys(here + record.key_zeros, here + record.key_steps, record.dim, zeros, steps)
    store_f32(coded.tops + 4 * group, top)
    scales_at = here + record.value_scales + 2 * offset
    stage_rows(scales, scales_at, scales_at, 1, 0, 0, LANES, KIND_F16)
    if record.v_bits == 4:
        middles_at = here + record.value_middles + 2 * offset
        stage_rows(middles, middles_at, middles_at, 1, 0, 0, LANES, KIND_F16)


@kernel
def _record_at(job: CodedJob, unit: Unit, position: int) -> Any:
    block = load_i32(job.block_tables + 4 * (unit.sequence * job.max_blocks + position // job.record.block_size))
    return job.records + (block * job.job.shape.num_kv_heads + unit.head) * job.record.nbytes


@kernel
def _ask_ahead(job: CodedJob, unit: Unit, start: int, part: int) -> None:
    """Ask for a part of the tile after the next; all of it at once would hold up the work on this one."""
    few, size = unit.num_rows <= ROWS, job.record.nbytes
    group, half = (part, 0) if few else (part // 2, part % 2)
    position = start + 2 * TILE + group * LANES
    if position < unit.high:
        prefetch_lines(_record_at(job, unit, position) + half * (size // 2), size if few else size // 2)


@kernel
def _coded_tile(job: CodedJob, unit: Unit, coded: _Coded, start: int, state: int) -> None:
    """Add the 64 tokens at `start`, whose places are in the tile table, to the running state of all rows."""
    shape, record = job.job.shape, job.record
    dim, size = record.dim, record.block_size
    maxima = state + 4 * shape.padded_rows * dim
    totals = maxima + 4 * shape.padded_rows
    middles = coded.middles if record.v_bits == 4 else 0
    hides = start + TILE > unit.first_position // size * size
    if shape.window > 0 and start < unit.high - shape.window:
        hides = True
    for row in range(0, unit.num_rows, ROWS):
        if hides:
            last = unit.first_position + (min(row + ROWS, unit.num_rows) - 1) // shape.heads_per_group
            if last // size * size <= start:
                continue
        place = 4 * row * dim
        fold_rows(coded.rows + place, coded.units + place, dim, coded.zeros, coded.steps, coded.planes, coded.dots)
        if row < 2 * ROWS:
            _ask_ahead(job, unit, start, row)
        steps = coded.row_steps + 4 * row
        if record.k_bits == 8:
            _SCORES_8(coded.planes, unit.table, dim, coded.tops, steps, coded.dots, unit.scores)
        else:
            _SCORES_4(coded.planes, unit.table, dim, coded.tops, steps, coded.dots, unit.scores)
        if row < 2 * ROWS:
            _ask_ahead(job, unit, start, row + 1)
        if shape.softcap > 0:
            for each in range(ROWS):
                softcap_row(unit.scores + each * TILE * 4, np.float32(shape.softcap))
        if hides:
            for each in range(ROWS):
                position = unit.first_position + (row + each) // shape.heads_per_group
                low = position - shape.window + 1 - start if shape.window > 0 else 0
                hide_row(unit.scores + each * TILE * 4, low, position // size * size - start)
        softmax_rows(unit.scores, maxima + 4 * row, totals + 4 * row, coded.numbers)
        if row < 2 * ROWS:
            _ask_ahead(job, unit, start, row + 2)
        factors = coded.numbers + 4 * ROWS
        weigh_rows(unit.scores, coded.scales, middles, coded.codes, factors, factors + 4 * ROWS)
        _add_values(record, unit, coded, state + 4 * row * dim)
        if row < 2 * ROWS:
            _ask_ahead(job, unit, start, row + 3)


@kernel
def _add_values(record: KVRecord, unit: Unit, coded: _Coded, out: int) -> None:
    dim, channel = record.dim, 0
    while channel < dim:
        wide = dim - channel >= 64
        if record.v_bits == 8:
            if wide:
                _V8_4(coded.codes, unit.table, channel, coded.numbers, out, dim * 4)
            else:
                _V8_1(coded.codes, unit.table, channel, coded.numbers, out, dim * 4)
        elif wide:
            _V4_4(coded.codes, unit.table, channel, coded.numbers, out, dim * 4)
        else:
            _V4_1(coded.codes, unit.table, channel, coded.numbers, out, dim * 4)
        channel += 64 if wide else LANES


@kernel
def _attend_span(job: CodedJob, unit: Unit, coded: _Coded, span: int, state: int) -> None:
    """Softmax of the unit's rows over the quantized tokens of one span, into a state."""
    clear_state(job.job.shape, unit.num_rows, state)
    size = job.record.block_size
    start = max(unit.low, span * SPAN) // TILE * TILE
    high = (unit.high - 1) // size * size
    end = min(high, span * SPAN + SPAN)
    while start < end:
        for group in range(GROUPS):
            _place_coded(job, unit, coded, group, start + group * LANES, high)
        _coded_tile(job, unit, coded, start, state)
        start += TILE


@kernel
def _own_tile(job: Job, unit: Unit, start: int, state: int, ones: int) -> None:
    """Add the 64 tokens at `start`, counted from the first own block, to the rows whose own block holds them.

    ones: address of float32 [4], all 1
    """
    shape = job.shape
    dim, size = shape.padded_dim, shape.block_size
    maxima = state + 4 * shape.padded_rows * dim
    totals = maxima + 4 * shape.padded_rows
    block, at = start // size * size, unit.scores
    num_groups = min(GROUPS, (block + size - start) // LANES)
    for row in range(0, unit.num_rows, ROWS):
        first = unit.first_position + row // shape.heads_per_group
        last = unit.first_position + min(row + ROWS - 1, unit.num_rows - 1) // shape.heads_per_group
        if last < start or first >= block + size:
            continue
        for group in range(num_groups):
            query = unit.query + row * shape.head_dim * 4
            scores_group(query, unit.table + 8 * group, shape.head_dim, at + 4 * LANES * group)
        for each in range(ROWS):
            here = at + each * TILE * 4
            if shape.softcap > 0:
                softcap_row(here, np.float32(shape.softcap))
            position = unit.first_position + (row + each) // shape.heads_per_group
            low = position - shape.window + 1 if shape.window > 0 else block
            high = position + 1 if position // size * size == block else block
            hide_row(here, max(low, block) - start, min(high, block + size) - start)
        softmax_rows(at, maxima + 4 * row, totals + 4 * row, unit.rescale)
        out = state + row * dim * 4
        for group in range(num_groups):
            table, weights = unit.table + 8 * group, at + 4 * LANES * group
            scales = unit.rescale if group == 0 else ones
            channel = 0
            while dim - channel >= 64:
                _OWN_4(weights, table, channel, scales, out, dim * 4)
                channel += 64
            while channel < dim:
                _OWN_1(weights, table, channel, scales, out, dim * 4)
                channel += LANES


@kernel
def _attend_own(job: CodedJob, unit: Unit, coded: _Coded, state: int) -> None:
    """Softmax of the unit's rows over their own blocks, into a state."""
    fill(coded.dots, ROWS, np.float32(1.0))
    shape = job.job.shape
    size = shape.block_size
    clear_state(shape, unit.num_rows, state)
    base = load_i32(job.first + 4 * unit.sequence) * size
    first, high = unit.first_position - base, unit.high - base
    low = max(first // size * size, unit.low - base)
    own = Unit(
        unit.sequence,
        unit.head,
        unit.num_rows,
        first,
        low,
        high,
        unit.query,
        unit.scores,
        unit.rescale,
        unit.stage,
        unit.table,
    )
    block = low // size * size
    while block < high:
        start = block
        while start < min(block + size, high):
            for group in range(GROUPS):
                at = start + group * LANES
                # A tile ends with its block: what follows is another block's business.
                place_group(job.job, own, group, at if at < block + size else high, False)
            _own_tile(job.job, own, start, state, coded.dots)
            start += TILE
        block += size


@kernel
def attend_coded_units(job: CodedJob) -> None:
    """Take units until none is left; as in attention.py, with the own blocks merged after the last span."""
    plain, shape = job.job, job.job.shape
    num_units = plain.num_items * shape.num_kv_heads
    user = fetch_add(plain.counters + 8 * NUM_SCRATCH_USERS, 1)
    if user >= plain.num_threads:
        return
    merged = plain.scratch + 4 * user * shape.scratch_floats
    own_state = after(merged, shape.state_floats)
    scratch = after(own_state, shape.state_floats)
    part_bytes = 4 * shape.state_floats
    while True:
        unit_index = fetch_add(plain.counters + 8 * NEXT_UNIT, 1)
        if unit_index >= num_units:
            return
        item = plain.items + 4 * ITEM_COLUMNS * (unit_index // shape.num_kv_heads)
        head = unit_index % shape.num_kv_heads
        unit = open_unit(plain, item, head, scratch)
        coded = _lay_out(job, unit, unit.table + 8 * 6 * GROUPS)
        first_span, end_span, group = load_i32(item + 12), load_i32(item + 16), load_i32(item + 20)
        num_spans = load_i32(item + 28)
        parts = plain.parts + part_bytes * (load_i32(item + 32) * shape.num_kv_heads + head * num_spans)
        last = True
        if group < 0:
            clear_state(shape, unit.num_rows, merged)
        for span in range(first_span, end_span):
            state = own_state if group < 0 else parts + part_bytes * (span - load_i32(item + 24))
            _attend_span(job, unit, coded, span, state)
            if group < 0:
                merge_state(shape, unit.num_rows, merged, state)
        if group >= 0:
            counter = plain.counters + 8 * (NUM_COUNTERS + group * shape.num_kv_heads + head)
            last = fetch_add(counter, 1) == num_spans - 1
            if last:
                clear_state(shape, unit.num_rows, merged)
                for span in range(num_spans):
                    merge_state(shape, unit.num_rows, merged, parts + part_bytes * span)
        if last:
            _attend_own(job, unit, coded, own_state)
            merge_state(shape, unit.num_rows, merged, own_state)
            store_rows(plain, unit, item, merged)
        fetch_add(plain.counters + 8 * UNITS_DONE, 1)


@kernel
def attend_coded(call: CodedCall) -> None:
    """Take units until none is left. Every thread of a team runs this on the same call; a late one returns at once."""
    tables = call.block_tables
    attend_coded_units(
        CodedJob(
            job_of(call.call), call.records, call.record, address_of(tables), tables.shape[1], address_of(call.first)
        )
    )
