"""Paged attention over quantized blocks in integers, and over a query's own block in float16.

Units, partitions, tiles and merging are the same as in float attention (attention/units.py). A row
attends to the codes before its own block, partition by partition. The float16 copy of its own block
is merged last. A row's bits therefore depend on its sequence and position, not on which blocks a
pass completes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvboost_edge.kernels.attention.call import AttentionCall, Job, RotationPointers, Unit
from kvboost_edge.kernels.attention.float_attend import place_strip
from kvboost_edge.kernels.attention.float_tiles import (
    ROWS,
    STRIPS,
    TILE,
    fill,
    hide_row,
    scale_row,
    scores_strip,
    softcap_row,
    softmax_rows,
    stage_rows,
    values_strip,
)
from kvboost_edge.kernels.attention.paged import PARTITION, Ints
from kvboost_edge.kernels.attention.units import after, clear_state, merge_partition, unit_loop
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.quantized_kv.code_layout import CodeLayout
from kvboost_edge.kernels.quantized_kv.code_rows import (
    decode_keys,
    divide_row,
    fold_rows,
    prefetch_lines,
)
from kvboost_edge.kernels.quantized_kv.code_tiles import coded_scores, coded_values, weigh_rows
from kvboost_edge.kernels.tuples import addresses_of
from kvboost_edge.kernels.vectors import KIND_F16, LANES, load_i32, store_f32, store_i64

__all__ = [
    "CodedCall",
    "CodedJob",
    "CodedScratch",
    "add_own",
    "attend_coded",
    "attend_coded_tiles",
    "attend_coded_units",
    "coded_scratch_floats",
    "coded_tile",
    "codes_at",
    "lay_out_coded",
    "place_coded",
]

_SCORES_8 = coded_scores[8]
_SCORES_4 = coded_scores[4]
_V8_4 = coded_values[8, 4]
_V8_1 = coded_values[8, 1]
_V4_4 = coded_values[4, 4]
_V4_1 = coded_values[4, 1]
_OWN_4 = values_strip[4]
_OWN_1 = values_strip[1]


class CodedCall(NamedTuple):
    """Arguments of a call on a quantized pool.

    Attributes:
        plain: a call whose pool is the float16 copies of own blocks, located by its block tables.
        codes: address of uint8 [num_blocks, num_kv_heads, layout.nbytes].
        layout: sizes and offsets of the codes of one block and KV head.
        block_tables: int32 [num_seqs, max_blocks], tables of the quantized blocks.
        max_blocks: number of columns of block_tables.
        first: int32 [num_seqs], position of slot 0 of each sequence's first own block.
    """

    plain: AttentionCall
    codes: int
    layout: CodeLayout
    block_tables: Ints
    max_blocks: int
    first: Ints


class CodedJob(NamedTuple):
    """A CodedCall with addresses instead of arrays; `codes` is 0 if the pool is not quantized."""

    plain: Job
    codes: int
    layout: CodeLayout
    block_tables: int
    max_blocks: int
    first: int


class CodedScratch(NamedTuple):
    """Addresses of a unit's scratch for quantized tiles.

    Attributes:
        rows: float32 [padded_rows / 4, dim / 16, 4, 16], queries scaled to the integer range; see
            `fold_rows`.
        row_steps: float32 [padded_rows], the value that corresponds to 1 in `rows`; see
            `divide_row`.
        zeros: float32 [4 strips, dim], key zeros.
        steps: float32 [4 strips, dim], key steps divided by the strip's largest step.
        tops: float32 [4 strips], largest key step.
        scales: float32 [64], value scales.
        middles: float32 [64], value middles.
        planes: int8 [dim / 16, 4 strips, 4, 32], integer queries.
        dots: float32 [4 strips, 4], query . zeros.
        weight_codes: uint8 [4, 64], quantized softmax weights.
        numbers: float32 [3, 4]: rescale, factor and shift of each row.
        blank: zero bytes, which take the place of the codes of a strip without visible tokens.
    """

    rows: int
    row_steps: int
    zeros: int
    steps: int
    tops: int
    scales: int
    middles: int
    planes: int
    dots: int
    weight_codes: int
    numbers: int
    blank: int


def coded_scratch_floats(padded_rows: int, dim: int) -> int:
    """Return how many floats of scratch each thread needs besides those of float attention."""
    # Sizes of the sections of `lay_out_coded`, rounded up.
    sections = (
        padded_rows * dim,
        padded_rows,
        2 * STRIPS * dim,
        2 * TILE,
        2 * ROWS * dim,
        2 * TILE,
        dim,
    )
    return sum(sections) + 16 * 2 * LANES


@kernel
def lay_out_coded(job: CodedJob, unit: Unit) -> CodedScratch:
    """Lay out the scratch after the tile table, and prepare the unit's query rows."""
    shape = job.plain.shape
    dim = job.layout.dim
    rows = after(unit.table + 8 * 6 * STRIPS, 0)
    row_steps = after(rows, shape.padded_rows * dim)
    zeros = after(row_steps, shape.padded_rows)
    steps = after(zeros, STRIPS * dim)
    tops = after(steps, STRIPS * dim)
    scales = after(tops, STRIPS)
    middles = after(scales, TILE)
    planes = after(middles, TILE)
    dots = after(planes, 2 * ROWS * dim)
    weight_codes = after(dots, STRIPS * ROWS)
    numbers = after(weight_codes, TILE)
    blank = after(numbers, 3 * ROWS)
    for row in range((unit.num_rows + ROWS - 1) // ROWS * ROWS):
        offset = 4 * (row // ROWS * ROWS * dim + row % ROWS * LANES)
        for channel in range(0, dim, LANES):
            at = rows + offset + 4 * ROWS * channel
            count = min(LANES, shape.head_dim - channel)
            scale_row(at, unit.query + 4 * (row * shape.head_dim + channel), count, np.float32(1.0))
            fill(at + 4 * count, LANES - count, np.float32(0.0))
        store_f32(row_steps + 4 * row, divide_row(rows + offset, dim))
    fill(blank, dim, np.float32(0.0))
    return CodedScratch(
        rows=rows,
        row_steps=row_steps,
        zeros=zeros,
        steps=steps,
        tops=tops,
        scales=scales,
        middles=middles,
        planes=planes,
        dots=dots,
        weight_codes=weight_codes,
        numbers=numbers,
        blank=blank,
    )


@kernel
def place_coded(
    job: CodedJob, unit: Unit, coded: CodedScratch, strip: int, position: int, high: int
) -> None:
    """Fill a column of the tile table for the 16 tokens at `position`, and decode their scales.

    Args:
        job: the call.
        unit: the rows that attend.
        coded: scratch; zeros, steps, tops, scales and middles of the strip are written.
        strip: index of the strip, 0 to 3.
        position: first token of the strip.
        high: end of the tokens that are read as codes.
    """
    layout = job.layout
    at = unit.table + 8 * strip
    zeros = coded.zeros + 4 * strip * layout.dim
    steps = coded.steps + 4 * strip * layout.dim
    scales = coded.scales + 4 * strip * LANES
    middles = coded.middles + 4 * strip * LANES
    if position >= high or position + LANES <= unit.low:
        store_i64(at, coded.blank)
        store_i64(at + 8 * STRIPS, 0)
        store_i64(at + 16 * STRIPS, coded.blank)
        store_i64(at + 24 * STRIPS, 0)
        fill(zeros, layout.dim, np.float32(0.0))
        fill(steps, layout.dim, np.float32(1.0))
        store_f32(coded.tops + 4 * strip, np.float32(1.0))
        fill(scales, LANES, np.float32(0.0))
        fill(middles, LANES, np.float32(0.0))
        return
    here = codes_at(job, unit, position)
    offset = position % layout.block_size
    store_i64(at, here + 4 * offset)
    store_i64(at + 8 * STRIPS, 4 * layout.block_size)
    store_i64(at + 16 * STRIPS, here + layout.values + offset * layout.dim * layout.v_bits // 8)
    store_i64(at + 24 * STRIPS, 4 * layout.dim)
    top = decode_keys(here + layout.key_zeros, here + layout.key_steps, layout.dim, zeros, steps)
    store_f32(coded.tops + 4 * strip, top)
    scales_at = here + layout.value_scales + 2 * offset
    stage_rows(scales, scales_at, scales_at, 1, 0, 0, LANES, KIND_F16)
    if layout.v_bits == 4:
        middles_at = here + layout.value_middles + 2 * offset
        stage_rows(middles, middles_at, middles_at, 1, 0, 0, LANES, KIND_F16)


@kernel
def codes_at(job: CodedJob, unit: Unit, position: int) -> Any:
    entry = unit.sequence * job.max_blocks + unit.first_index + position // job.layout.block_size
    block = load_i32(job.block_tables + 4 * entry)
    return job.codes + (block * job.plain.shape.num_kv_heads + unit.head) * job.layout.nbytes


@kernel
def _ask_ahead(job: CodedJob, unit: Unit, start: int, part: int) -> None:
    """Prefetch a quarter of the codes that the tile after the next one needs."""
    # Prefetch in parts between computations, because prefetching everything at once would stall
    # this tile.
    few = unit.num_rows <= ROWS
    size = job.layout.nbytes
    strip, half = (part, 0) if few else (part // 2, part % 2)
    position = start + 2 * TILE + strip * LANES
    if position < unit.high:
        prefetch_lines(
            codes_at(job, unit, position) + half * (size // 2), size if few else size // 2
        )


@kernel
def _own_start(unit: Unit, position: int, size: int) -> Any:
    """Return the end of the codes that a query at this position attends to.

    The end is the start of the query's own block or, if `unit.whole` is set, the end of the
    segment.
    """
    return unit.whole if unit.whole > 0 else position // size * size


@kernel
def coded_tile(job: CodedJob, unit: Unit, coded: CodedScratch, start: int, state: int) -> None:
    """Add the 64 tokens at `start` to the softmax state of all rows.

    The tile table gives the location of the tokens.

    Args:
        job: the call.
        unit: the rows that attend.
        coded: scratch, with the strips' scales.
        start: position of the tile's first token.
        state: address of the unit's softmax state; see `Unit`.
    """
    shape = job.plain.shape
    layout = job.layout
    dim = layout.dim
    size = layout.block_size
    maxima = state + 4 * shape.padded_rows * dim
    totals = maxima + 4 * shape.padded_rows
    middles = coded.middles if layout.v_bits == 4 else 0
    hides = start + TILE > _own_start(unit, unit.first_position, size) or start < unit.low
    if (
        shape.window > 0
        and start < unit.first_position + unit.num_rows // shape.heads_per_kv - shape.window
    ):
        hides = True
    for row in range(0, unit.num_rows, ROWS):
        if hides:
            last = unit.first_position + (min(row + ROWS, unit.num_rows) - 1) // shape.heads_per_kv
            if _own_start(unit, last, size) <= start:
                continue
        place = 4 * row * dim
        fold_rows(
            coded.rows + place,
            coded.row_steps + 4 * row,
            dim,
            coded.zeros,
            coded.steps,
            coded.planes,
            coded.dots,
        )
        if row < 2 * ROWS:
            _ask_ahead(job, unit, start, row)
        steps = coded.row_steps + 4 * row
        if layout.k_bits == 8:
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
                position = unit.first_position + (row + each) // shape.heads_per_kv
                low = position - shape.window + 1 - start if shape.window > 0 else 0
                low = max(low, unit.low - start)
                end = _own_start(unit, position, size) - start
                hide_row(unit.scores + each * TILE * 4, low, end)
        softmax_rows(unit.scores, maxima + 4 * row, totals + 4 * row, coded.numbers)
        if row < 2 * ROWS:
            _ask_ahead(job, unit, start, row + 2)
        factors = coded.numbers + 4 * ROWS
        weigh_rows(
            unit.scores, coded.scales, middles, coded.weight_codes, factors, factors + 4 * ROWS
        )
        _add_values(layout, unit, coded, state + 4 * row * dim)
        if row < 2 * ROWS:
            _ask_ahead(job, unit, start, row + 3)


@kernel
def _add_values(layout: CodeLayout, unit: Unit, coded: CodedScratch, out: int) -> None:
    """Add a tile's weighted values to the sums of four rows at `out`, float32 [4, dim]."""
    dim = layout.dim
    channel = 0
    while channel < dim:
        has_64 = dim - channel >= 64
        if layout.v_bits == 8:
            if has_64:
                _V8_4(coded.weight_codes, unit.table, channel, coded.numbers, out, dim * 4)
            else:
                _V8_1(coded.weight_codes, unit.table, channel, coded.numbers, out, dim * 4)
        elif has_64:
            _V4_4(coded.weight_codes, unit.table, channel, coded.numbers, out, dim * 4)
        else:
            _V4_1(coded.weight_codes, unit.table, channel, coded.numbers, out, dim * 4)
        channel += 64 if has_64 else LANES


@kernel
def _attend_partition(
    job: CodedJob, unit: Unit, coded: CodedScratch, partition: int, state: int
) -> None:
    """Compute the softmax state of the unit's rows over the codes of one partition."""
    clear_state(job.plain.shape, unit.num_rows, state)
    attend_coded_tiles(job, unit, coded, partition, unit.low, state)


@kernel
def attend_coded_tiles(
    job: CodedJob, unit: Unit, coded: CodedScratch, partition: int, low: int, state: int
) -> None:
    """Add the tiles of one partition, from the tile at `low` on, to the softmax state."""
    size = job.layout.block_size
    start = max(low, partition * PARTITION) // TILE * TILE
    high = _own_start(unit, unit.high - 1, size)
    end = min(high, partition * PARTITION + PARTITION)
    while start < end:
        for strip in range(STRIPS):
            place_coded(job, unit, coded, strip, start + strip * LANES, high)
        coded_tile(job, unit, coded, start, state)
        start += TILE


@kernel
def _own_tile(job: Job, unit: Unit, start: int, state: int, ones: int) -> None:
    """Add the 64 tokens at `start` to the rows whose own block contains them.

    Args:
        job: the call on the float16 copies.
        unit: the rows, with positions relative to the first own block.
        start: first token, relative to the first own block.
        state: address of the softmax state.
        ones: address of float32 [4], all 1.
    """
    shape = job.shape
    dim = shape.padded_dim
    size = shape.block_size
    maxima = state + 4 * shape.padded_rows * dim
    totals = maxima + 4 * shape.padded_rows
    block = start // size * size
    at = unit.scores
    num_strips = min(STRIPS, (block + size - start) // LANES)
    for row in range(0, unit.num_rows, ROWS):
        first = unit.first_position + row // shape.heads_per_kv
        last = unit.first_position + min(row + ROWS - 1, unit.num_rows - 1) // shape.heads_per_kv
        if last < start or first >= block + size:
            continue
        for strip in range(num_strips):
            query = unit.query + row * shape.head_dim * 4
            scores_strip(query, unit.table + 8 * strip, shape.head_dim, at + 4 * LANES * strip)
        for each in range(ROWS):
            here = at + each * TILE * 4
            if shape.softcap > 0:
                softcap_row(here, np.float32(shape.softcap))
            position = unit.first_position + (row + each) // shape.heads_per_kv
            low = position - shape.window + 1 if shape.window > 0 else block
            high = position + 1 if position // size * size == block else block
            hide_row(here, max(low, block) - start, min(high, block + size) - start)
        softmax_rows(at, maxima + 4 * row, totals + 4 * row, unit.rescale)
        out = state + row * dim * 4
        for strip in range(num_strips):
            table = unit.table + 8 * strip
            weights = at + 4 * LANES * strip
            scales = unit.rescale if strip == 0 else ones
            channel = 0
            while dim - channel >= 64:
                _OWN_4(weights, table, channel, scales, out, dim * 4)
                channel += 64
            while channel < dim:
                _OWN_1(weights, table, channel, scales, out, dim * 4)
                channel += LANES


@kernel
def _attend_own(job: CodedJob, unit: Unit, coded: CodedScratch, state: int) -> None:
    """Compute the softmax state of the unit's rows over their own blocks."""
    fill(coded.dots, ROWS, np.float32(1.0))
    shape = job.plain.shape
    size = shape.block_size
    clear_state(shape, unit.num_rows, state)
    base = load_i32(job.first + 4 * unit.sequence) - unit.shift
    first = unit.first_position - base
    high = first + unit.num_rows // shape.heads_per_kv
    low = first // size * size
    if shape.window > 0:
        low = max(low, first - shape.window + 1)
    own = Unit(
        sequence=unit.sequence,
        first_index=0,
        shift=0,
        whole=0,
        head=unit.head,
        num_rows=unit.num_rows,
        first_position=first,
        low=low,
        high=high,
        query=unit.query,
        scores=unit.scores,
        rescale=unit.rescale,
        stage=unit.stage,
        table=unit.table,
    )
    block = low // size * size
    while block < high:
        start = block
        while start < min(block + size, high):
            for strip in range(STRIPS):
                at = start + strip * LANES
                # A tile must end with its block, because the next block belongs to other rows.
                place_strip(job.plain, own, strip, at if at < block + size else high, False)
            _own_tile(job.plain, own, start, state, coded.dots)
            start += TILE
        block += size


@kernel
def add_own(job: CodedJob, unit: Unit, coded: CodedScratch, merged: int, state: int) -> None:
    """Merge the softmax state of the own blocks, after the last partition."""
    _attend_own(job, unit, coded, state)
    merge_partition(job.plain.shape, unit.num_rows, merged, state)


attend_coded_units = unit_loop("attend_coded_units", lay_out_coded, _attend_partition, add_own)


@kernel
def attend_coded(call: CodedCall) -> None:
    """Process units until all are taken.

    Every thread of a team runs this function on the same call. A thread that starts after the last
    unit is taken returns at once.
    """
    job = addresses_of(CodedJob, call)
    attend_coded_units(job.plain, addresses_of(RotationPointers, call.plain), job)
