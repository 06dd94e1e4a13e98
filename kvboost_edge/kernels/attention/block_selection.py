"""Selection of the key blocks that the query blocks of a sparse prefill attend to.

A query block is the rows of 16 consecutive tokens for all query heads of a KV head. A key block is
16 consecutive tokens, one strip of a tile. Each query block has its own selection, which follows
XAttention (Xu et al., 2025) with a stride of 16:

1. The antidiagonal score of a key block is the mean of q[i] . k[15 - i] over i.
2. The softmax over the key blocks gives each a mass for every query head.
3. The first key blocks (attention sinks) and the last ones before the query block's tile are always
   kept. Of the others, each query head keeps the fewest with which its kept mass reaches the mass
   threshold. The query block attends to what any of its heads keeps.

The number of kept key blocks therefore differs by layer, KV head and query block. With one
threshold for the sum over the heads, fewer would be kept. But if most heads read what is always
kept, a head that reads far away would lose much of its mass.

Masses are rounded to integers before they are summed and compared, so the selection is exact: it
depends only on the tokens and their positions. Equal masses are kept in order of position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from kvboost_edge.kernels.attention.call import AttentionShape, Unit
from kvboost_edge.kernels.attention.float_tiles import ROWS, TILE, fill
from kvboost_edge.kernels.integers import emit_loop
from kvboost_edge.kernels.jit import intrinsic, kernel, named_kernel
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.vectors import (
    F32,
    I64,
    LANES,
    V16,
    emit_exp2,
    emit_fma,
    emit_load,
    emit_max,
    emit_reduce_rows,
    emit_shuffle,
    emit_splat,
    emit_store,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i64,
)

__all__ = [
    "FULL_MASS",
    "LOCAL_BLOCKS",
    "MASS_THRESHOLD",
    "SINK_BLOCKS",
    "BlockSelection",
    "dense_start",
    "keep_largest",
    "kept_position",
    "kept_unit",
    "no_selection",
    "selection_floats",
    "selector",
]

SINK_BLOCKS = 4
"""Key blocks at the start of the text that are always kept."""
LOCAL_BLOCKS = 16
"""Key blocks before the tile of a query block that are always kept."""
MASS_THRESHOLD = 850
"""Mass that the key blocks kept for a query head reach, in thousandths of the head's total."""
FULL_MASS = 1 << 30
"""Integer mass that corresponds to all of the softmax."""
_DIGIT = 10  # bits
_BINS = 1 << _DIGIT
_LINE = 4 * LANES

Value = Any
Builder = Any


class BlockSelection(NamedTuple):
    """The tokens that a unit's rows attend to.

    Attributes:
        more: buffers that the unit needs besides those of `Unit`.
        kept: address of int64 [num_kept], indices of the kept key blocks in ascending order.
        num_kept: number of kept key blocks. 0 if the unit attends to all tokens.
        dense_from: first token from which on the rows attend to all tokens; a multiple of 64.
    """

    more: Any
    kept: int
    num_kept: Any
    dense_from: Any


class _Scratch(NamedTuple):
    """Addresses of the scratch of a selection.

    Attributes:
        queries: float32 [heads, dim, 16], in reverse order of tokens; heads are padded to 4.
        keys: float32 [2, dim, 16], the keys of two key blocks.
        zeros: float32 [dim], key zeros of a quantized key block.
        steps: float32 [dim], key steps.
        scores: float32 [heads, blocks], blocks padded to 16.
        rounded: int64 [blocks], integer masses.
        bins: int64 [1024].
        kept: int64 [blocks].
    """

    queries: int
    keys: int
    zeros: int
    steps: int
    scores: int
    rounded: int
    bins: int
    kept: int


def _padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def selection_floats(heads_per_kv: int, dim: int, num_tokens: int) -> int:
    """Return the scratch that a thread needs for selections, in floats.

    Args:
        heads_per_kv: query heads per KV head.
        dim: channels per head, padded to a multiple of 16.
        num_tokens: largest number of tokens before a row.
    """
    heads = _padded(heads_per_kv, ROWS)
    blocks = _padded(-(-num_tokens // LANES), LANES)
    floats = heads * dim * LANES + 2 * dim * LANES + 2 * dim + heads * blocks
    return floats + 2 * (2 * blocks + _BINS) + 9 * LANES


@kernel
def _after(address: int, num_bytes: int) -> int:
    return address + (num_bytes + _LINE - 1) // _LINE * _LINE


@kernel
def _lay_out(shape: AttentionShape, num_blocks: int, scratch: int) -> _Scratch:
    heads = (shape.heads_per_kv + ROWS - 1) // ROWS * ROWS
    dim = shape.padded_dim
    blocks = (num_blocks + LANES - 1) // LANES * LANES
    queries = scratch
    keys = _after(queries, 4 * heads * dim * LANES)
    zeros = _after(keys, 8 * dim * LANES)
    steps = _after(zeros, 4 * dim)
    scores = _after(steps, 4 * dim)
    rounded = _after(scores, 4 * heads * blocks)
    bins = _after(rounded, 8 * blocks)
    return _Scratch(
        queries=queries,
        keys=keys,
        zeros=zeros,
        steps=steps,
        scores=scores,
        rounded=rounded,
        bins=bins,
        kept=_after(bins, 8 * _BINS),
    )


@intrinsic
def _antidiagonal_scores(
    typing: Any, queries: Any, keys: Any, dim: Any, fours: Any, scores: Any, row_bytes: Any
) -> Any:
    """Compute the scores of two key blocks: sums over channels and lanes of query x key.

    Args:
        queries: address of float32 [fours * 4, dim, 16].
        keys: address of float32 [2, dim, 16].
        dim: number of channels.
        fours: number of heads / 4.
        scores: address of float32 [fours * 4, row_bytes / 4]; two columns are written.
        row_bytes: bytes per row of `scores`.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        queries, keys, dim, fours, scores, row_bytes = arguments
        size = b.mul(dim, ir.Constant(I64, _LINE))
        zero = ir.Constant(V16, [0.0] * LANES)
        sums = [cgutils.alloca_once(b, V16) for _ in range(2 * ROWS)]
        with emit_loop(b, fours) as four:
            first = b.mul(four, ir.Constant(I64, ROWS))
            for slot in sums:
                b.store(zero, slot)
            base = b.add(queries, b.mul(first, size))
            with cgutils.for_range(b, dim, intp=I64) as loop:
                at = b.mul(loop.index, ir.Constant(I64, _LINE))
                pair = [emit_load(b, V16, b.add(place, at)) for place in (keys, b.add(keys, size))]
                for row in range(ROWS):
                    place = b.add(b.add(base, at), b.mul(size, ir.Constant(I64, row)))
                    query = emit_load(b, V16, place)
                    for which, key in enumerate(pair):
                        slot = sums[which * ROWS + row]
                        b.store(emit_fma(b, query, key, b.load(slot)), slot)
            for which in range(2):
                rows = [b.load(slot) for slot in sums[which * ROWS : (which + 1) * ROWS]]
                total = emit_reduce_rows(b, rows, b.fadd)
                for row in range(ROWS):
                    place = b.mul(b.add(first, ir.Constant(I64, row)), row_bytes)
                    place = b.add(b.add(scores, place), ir.Constant(I64, 4 * which))
                    score = b.extract_element(total, ir.Constant(ir.IntType(32), ROWS * row))
                    emit_store(b, score, place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


def _reduce_lanes(b: Builder, x: Value, combine: Any) -> Value:
    """Return a vector whose lanes all hold the total of the lanes, in a fixed order."""
    for step in (8, 4, 2, 1):
        x = combine(x, emit_shuffle(b, x, x, [lane ^ step for lane in range(LANES)]))
    return x


@intrinsic
def _softmax(typing: Any, scores: Any, vectors: Any) -> Any:
    """Replace the scores of one head, logarithms to base 2, by their softmax.

    Args:
        scores: address of float32 [vectors * 16].
        vectors: number of vectors of 16 key blocks.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        scores, vectors = arguments
        lowest = ir.Constant(V16, [float("-inf")] * LANES)
        slot = cgutils.alloca_once(b, V16)

        def largest(x: Value, y: Value) -> Value:
            return emit_max(b, x, y)

        b.store(lowest, slot)
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.add(scores, b.mul(loop.index, ir.Constant(I64, _LINE)))
            b.store(largest(emit_load(b, V16, at), b.load(slot)), slot)
        top = _reduce_lanes(b, b.load(slot), largest)
        b.store(ir.Constant(V16, [0.0] * LANES), slot)
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.add(scores, b.mul(loop.index, ir.Constant(I64, _LINE)))
            weight = emit_exp2(b, b.fsub(emit_load(b, V16, at), top))
            emit_store(b, weight, at)
            b.store(b.fadd(weight, b.load(slot)), slot)
        total = _reduce_lanes(b, b.load(slot), b.fadd)
        inverse = b.fdiv(emit_splat(b, ir.Constant(F32, 1.0)), total)
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.add(scores, b.mul(loop.index, ir.Constant(I64, _LINE)))
            emit_store(b, b.fmul(emit_load(b, V16, at), inverse), at)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@kernel
def keep_largest(masses: int, count: int, needed: int, bins: int) -> tuple[Any, Any]:
    """Find the fewest of the largest integers whose sum is at least `needed`.

    Args:
        masses: address of int64 [count], each from 0 to 2^30 - 1.
        count: number of integers.
        needed: the sum to reach, at most the sum of all integers.
        bins: address of int64 [1024], scratch.

    Returns:
        The smallest integer that is kept, and how many integers equal to it are kept. All larger
        ones are kept.
    """
    smallest = 0
    above = 0  # sum of the integers that are certainly kept
    for level in range(3):
        shift = _DIGIT * (2 - level)
        for each in range(_BINS):
            store_i64(bins + 8 * each, 0)
        for index in range(count):
            number = load_i64(masses + 8 * index)
            if number >> (shift + _DIGIT) == smallest:
                place = bins + 8 * ((number >> shift) & (_BINS - 1))
                store_i64(place, load_i64(place) + number)
        digit = _BINS - 1
        while digit > 0 and above + load_i64(bins + 8 * digit) < needed:
            above += load_i64(bins + 8 * digit)
            digit -= 1
        smallest = (smallest << _DIGIT) | digit
    equal = 0
    if smallest > 0 and needed > above:
        equal = (needed - above + smallest - 1) // smallest
    return smallest, equal


@kernel
def _is_always_kept(block: int, num_blocks: int) -> Any:
    """Return whether a key block is an attention sink or local."""
    return block < SINK_BLOCKS or block >= num_blocks - LOCAL_BLOCKS


@kernel
def _mark_blocks(masses: int, num_blocks: int, bins: int, marks: int) -> None:
    """Mark the key blocks that a head needs, with 1 in int64 [num_blocks].

    The integer masses of those that are always kept are overwritten with 0.
    """
    total = 0
    needed = 0
    for block in range(num_blocks):
        mass = load_i64(masses + 8 * block)
        total += mass
        if _is_always_kept(block, num_blocks):
            needed -= mass
            store_i64(masses + 8 * block, 0)
            store_i64(marks + 8 * block, 1)
    needed += (total * MASS_THRESHOLD + 999) // 1000
    if needed <= 0:
        return
    smallest, equal = keep_largest(masses, num_blocks, needed, bins)
    for block in range(num_blocks):
        mass = load_i64(masses + 8 * block)
        keeps = mass > smallest
        if mass == smallest and equal > 0:
            keeps = True
            equal -= 1
        if keeps:
            store_i64(marks + 8 * block, 1)


@kernel
def _marked(marks: int, num_blocks: int) -> Any:
    """Replace marks by the indices of marked blocks in ascending order, and return their number."""
    count = 0
    for block in range(num_blocks):
        if load_i64(marks + 8 * block) != 0:
            store_i64(marks + 8 * count, block)
            count += 1
    return count


@kernel
def _round_masses(masses: int, rounded: int, num_blocks: int) -> None:
    """Round the masses of all key blocks to integers that sum to about `FULL_MASS`."""
    for block in range(num_blocks):
        mass = load_f32(masses + 4 * block) * np.float32(FULL_MASS)
        number = 0
        if mass >= np.float32(FULL_MASS):
            number = FULL_MASS - 1
        elif mass > np.float32(0.0):  # False for NaN
            number = int(mass)
        store_i64(rounded + 8 * block, number)


@kernel
def dense_start(ranges: int, shape: AttentionShape, unit: Unit) -> Any:
    """Return the first token from which on a unit's rows attend to all tokens.

    Args:
        ranges: address of int32 [num_seqs, 2]; see `PagedBatch.sparse`. 0 without any.
        shape: sizes and options of the layer. Rows with a sliding window attend to all of it.
        unit: the rows.
    """
    if ranges == 0 or shape.window > 0 or unit.whole > 0:
        return 0
    first = load_i32(ranges + 8 * unit.sequence)
    end = load_i32(ranges + 8 * unit.sequence + 4)
    if unit.first_position < first or unit.first_position >= end:
        return 0
    return unit.first_position // TILE * TILE


@kernel
def no_selection(more: Any) -> Any:
    """Return the `BlockSelection` of a unit that attends to all tokens."""
    return BlockSelection(more, 0, 0, 0)


@kernel
def kept_position(selection: BlockSelection, index: int, unit: Unit) -> Any:
    """Return the position of the kept key block with this index, or `unit.high` after the last."""
    if index < selection.num_kept:
        return load_i64(selection.kept + 8 * index) * LANES
    return unit.high


@kernel
def kept_unit(unit: Unit, count: int) -> Unit:
    """Return a unit for a tile of kept key blocks, whose rows all see the first `count` strips.

    The tile is at position 0, and nothing after it is prefetched.
    """
    return Unit(
        sequence=unit.sequence,
        first_index=unit.first_index,
        shift=unit.shift,
        whole=count * LANES,
        head=unit.head,
        num_rows=unit.num_rows,
        first_position=unit.first_position,
        low=0,
        high=count * LANES,
        query=unit.query,
        scores=unit.scores,
        rescale=unit.rescale,
        stage=unit.stage,
        table=unit.table,
    )


def selector(name: str, quads: bool, stage: Any) -> Any:
    """Return the kernel `select(whole, shape, unit, more, start, scratch) -> BlockSelection`.

    The kernel selects among the key blocks before `start`, which is a multiple of 64 and above 0.

    Args:
        name: the kernel's name.
        quads: whether staged keys are [dim / 4, 16 tokens, 4 channels] instead of [dim, 16 tokens].
        stage: kernel (whole, unit, position, out, zeros, steps), which writes the keys of a key
            block as float32 to `out`. `zeros` and `steps` are scratch.
    """

    @named_kernel(f"{name}_reverse")
    def reverse_queries(shape: AttentionShape, unit: Unit, out: int) -> None:
        heads = shape.heads_per_kv
        dim = shape.head_dim
        size = shape.padded_dim * LANES
        fill(out, (heads + ROWS - 1) // ROWS * ROWS * size, np.float32(0.0))
        for row in range(unit.num_rows):
            lane = LANES - 1 - row // heads
            to = out + 4 * (row % heads * size)
            source = unit.query + 4 * row * dim
            for channel in range(dim):
                if quads:
                    place = (channel // 4 * LANES + lane) * 4 + channel % 4
                else:
                    place = channel * LANES + lane
                value = load_f32(source + 4 * channel) * np.float32(1.0 / LANES)
                store_f32(to + 4 * place, value)

    @named_kernel(name)
    def select(
        whole: Any, shape: AttentionShape, unit: Unit, more: Any, start: int, scratch: int
    ) -> Any:
        num_blocks = start // LANES
        parts = _lay_out(shape, num_blocks, scratch)
        vectors = (num_blocks + LANES - 1) // LANES
        row_bytes = _LINE * vectors
        fours = (shape.heads_per_kv + ROWS - 1) // ROWS
        reverse_queries(shape, unit, parts.queries)
        size = 4 * shape.padded_dim * LANES
        for block in range(0, num_blocks, 2):
            stage(whole, unit, block * LANES, parts.keys, parts.zeros, parts.steps)
            stage(whole, unit, (block + 1) * LANES, parts.keys + size, parts.zeros, parts.steps)
            _antidiagonal_scores(
                parts.queries,
                parts.keys,
                shape.padded_dim,
                fours,
                parts.scores + 4 * block,
                row_bytes,
            )
        for block in range(num_blocks):
            store_i64(parts.kept + 8 * block, 0)
        for head in range(shape.heads_per_kv):
            scores = parts.scores + row_bytes * head
            fill(scores + 4 * num_blocks, vectors * LANES - num_blocks, np.float32(-np.inf))
            _softmax(scores, vectors)
            _round_masses(scores, parts.rounded, num_blocks)
            _mark_blocks(parts.rounded, num_blocks, parts.bins, parts.kept)
        num_kept = _marked(parts.kept, num_blocks)
        return BlockSelection(more, parts.kept, num_kept, start)

    return select
