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
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from kvboost_edge.kernels.attention.call import AttentionShape, Unit
from kvboost_edge.kernels.attention.float_tiles import AT_ONCE, STRIPS, TILE, fill
from kvboost_edge.kernels.integers import V16I
from kvboost_edge.kernels.jit import intrinsic, kernel, named_kernel
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.vectors import (
    F32,
    I32,
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
    store_i32,
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
FULL_MASS = 1 << 22
"""Integer mass that corresponds to all of the softmax."""
_DIGIT = 11  # bits
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
        queries: float32 [heads, dim, 16], in reverse order of tokens.
        keys: float32 [4, dim, 16], the keys of four key blocks.
        zeros: float32 [dim], key zeros of a quantized key block.
        steps: float32 [dim], key steps.
        scores: float32 [heads, blocks], blocks padded to 16.
        masses: int32 [blocks], blocks padded to 16.
        marks: int32 [blocks], -1 for blocks to keep.
        bins: int64 [2048].
        kept: int64 [blocks].
    """

    queries: int
    keys: int
    zeros: int
    steps: int
    scores: int
    masses: int
    marks: int
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
    blocks = _padded(-(-num_tokens // LANES), LANES)
    floats = (heads_per_kv + STRIPS) * dim * LANES + 2 * dim + heads_per_kv * blocks
    return floats + 2 * blocks + 2 * (_BINS + blocks) + 10 * LANES


@kernel
def _after(address: int, num_bytes: int) -> int:
    return address + (num_bytes + _LINE - 1) // _LINE * _LINE


@kernel
def _lay_out(shape: AttentionShape, num_blocks: int, scratch: int) -> _Scratch:
    heads = shape.heads_per_kv
    dim = shape.padded_dim
    blocks = (num_blocks + LANES - 1) // LANES * LANES
    queries = scratch
    keys = _after(queries, 4 * heads * dim * LANES)
    zeros = _after(keys, 4 * STRIPS * dim * LANES)
    steps = _after(zeros, 4 * dim)
    scores = _after(steps, 4 * dim)
    masses = _after(scores, 4 * heads * blocks)
    marks = _after(masses, 4 * blocks)
    bins = _after(marks, 4 * blocks)
    return _Scratch(
        queries=queries,
        keys=keys,
        zeros=zeros,
        steps=steps,
        scores=scores,
        masses=masses,
        marks=marks,
        bins=bins,
        kept=_after(bins, 8 * _BINS),
    )


def _scores_of(num_heads: int) -> Any:
    """Return the intrinsic that computes the antidiagonal scores of 1 to 4 heads."""

    @intrinsic
    def scores(typing: Any, queries: Any, keys: Any, dim: Any, out: Any, row_bytes: Any) -> Any:
        """Sum query x key over channels and lanes, for four key blocks.

        Args:
            queries: address of float32 [num_heads, dim, 16].
            keys: address of float32 [4, dim, 16].
            dim: number of channels.
            out: address of float32 [num_heads, row_bytes / 4]; four columns are written.
            row_bytes: bytes per row of `out`.
        """

        def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
            queries, keys, dim, out, row_bytes = arguments
            sums = [[cgutils.alloca_once(b, V16) for _ in range(STRIPS)] for _ in range(num_heads)]
            for slot in chain.from_iterable(sums):
                b.store(ir.Constant(V16, [0.0] * LANES), slot)
            size = b.mul(dim, ir.Constant(I64, _LINE))
            places = [b.mul(size, ir.Constant(I64, index)) for index in range(STRIPS)]
            for first in range(0, STRIPS, AT_ONCE):
                strips = range(first, first + AT_ONCE)
                with cgutils.for_range(b, dim, intp=I64) as loop:
                    at = b.mul(loop.index, ir.Constant(I64, _LINE))
                    of_keys, of_queries = b.add(keys, at), b.add(queries, at)
                    loaded = [emit_load(b, V16, b.add(of_keys, places[strip])) for strip in strips]
                    for head in range(num_heads):
                        query = emit_load(b, V16, b.add(of_queries, places[head]))
                        for strip, key in zip(strips, loaded, strict=True):
                            slot = sums[head][strip]
                            b.store(emit_fma(b, query, key, b.load(slot)), slot)
            for head in range(num_heads):
                total = emit_reduce_rows(b, [b.load(slot) for slot in sums[head]], b.fadd)
                four_scores = emit_shuffle(b, total, total, range(0, LANES, STRIPS))
                emit_store(b, four_scores, b.add(out, b.mul(row_bytes, ir.Constant(I64, head))))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return scores


_scores_1, _scores_2, _scores_3, _scores_4 = (_scores_of(count) for count in range(1, 5))


@kernel
def _score_strips(shape: AttentionShape, parts: _Scratch, out: int, row_bytes: int) -> None:
    """Compute the antidiagonal scores of the four key blocks in `parts.keys` for all heads."""
    dim = shape.padded_dim
    for head in range(0, shape.heads_per_kv, 4):
        queries = parts.queries + 4 * head * dim * LANES
        to = out + head * row_bytes
        left = shape.heads_per_kv - head
        if left >= 4:
            _scores_4(queries, parts.keys, dim, to, row_bytes)
        elif left == 3:
            _scores_3(queries, parts.keys, dim, to, row_bytes)
        elif left == 2:
            _scores_2(queries, parts.keys, dim, to, row_bytes)
        else:
            _scores_1(queries, parts.keys, dim, to, row_bytes)


def _reduce_lanes(b: Builder, x: Value, combine: Any) -> Value:
    """Return a vector whose lanes all hold the total of the lanes, in a fixed order."""
    for step in (8, 4, 2, 1):
        x = combine(x, emit_shuffle(b, x, x, [lane ^ step for lane in range(LANES)]))
    return x


@intrinsic
def _softmax_masses(typing: Any, scores: Any, vectors: Any, masses: Any) -> Any:
    """Compute the softmax of scores, rounded down to integers that sum to about `FULL_MASS`.

    Args:
        scores: address of float32 [vectors * 16], logarithms to base 2; overwritten.
        vectors: number of vectors of 16 key blocks.
        masses: address of int32 [vectors * 16], written. NaN becomes 0.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        scores, vectors, masses = arguments
        slot = cgutils.alloca_once(b, V16)
        zero = ir.Constant(V16, [0.0] * LANES)
        most = ir.Constant(V16, [float(FULL_MASS - 1)] * LANES)

        def largest(x: Value, y: Value) -> Value:
            return emit_max(b, x, y)

        b.store(ir.Constant(V16, [float("-inf")] * LANES), slot)
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.add(scores, b.mul(loop.index, ir.Constant(I64, _LINE)))
            b.store(largest(emit_load(b, V16, at), b.load(slot)), slot)
        top = _reduce_lanes(b, b.load(slot), largest)
        b.store(zero, slot)
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.add(scores, b.mul(loop.index, ir.Constant(I64, _LINE)))
            weight = emit_exp2(b, b.fsub(emit_load(b, V16, at), top))
            emit_store(b, weight, at)
            b.store(b.fadd(weight, b.load(slot)), slot)
        total = _reduce_lanes(b, b.load(slot), b.fadd)
        factor = b.fdiv(emit_splat(b, ir.Constant(F32, float(FULL_MASS))), total)
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.mul(loop.index, ir.Constant(I64, _LINE))
            mass = b.fmul(emit_load(b, V16, b.add(scores, at)), factor)
            mass = b.select(b.fcmp_ordered(">", mass, zero), mass, zero)
            mass = b.select(b.fcmp_ordered("<", mass, most), mass, most)
            emit_store(b, b.fptosi(mass, V16I), b.add(masses, at))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@kernel
def keep_largest(masses: int, count: int, needed: int, bins: int) -> tuple[Any, Any]:
    """Find the fewest of the largest integers whose sum is at least `needed`.

    Args:
        masses: address of int32 [count], each from 0 to `FULL_MASS` - 1.
        count: number of integers.
        needed: the sum to reach, at most the sum of all integers.
        bins: address of int64 [2048], scratch.

    Returns:
        The smallest integer that is kept, and how many integers equal to it are kept. All larger
        ones are kept.
    """
    smallest = 0
    above = 0  # sum of the integers that are certainly kept
    for level in range(2):
        shift = _DIGIT * (1 - level)
        fill(bins, 2 * _BINS, np.float32(0.0))
        digit = 0
        for index in range(count):
            number = load_i32(masses + 4 * index)
            here = (number >> shift) & (_BINS - 1)
            # The sum of digit 0 is never read.
            if here > 0 and number >> (shift + _DIGIT) == smallest:
                place = bins + 8 * here
                store_i64(place, load_i64(place) + number)
                digit = max(digit, here)
        while digit > 0 and above + load_i64(bins + 8 * digit) < needed:
            above += load_i64(bins + 8 * digit)
            digit -= 1
        smallest = (smallest << _DIGIT) | digit
    equal = 0
    if smallest > 0 and needed > above:
        equal = (needed - above + smallest - 1) // smallest
    return smallest, equal


@kernel
def _optional(num_blocks: int) -> tuple[Any, Any]:
    """Return the first and the end of the key blocks that are neither attention sinks nor local."""
    first = min(SINK_BLOCKS, num_blocks)
    return first, max(first, num_blocks - LOCAL_BLOCKS)


@intrinsic
def _mark_larger(typing: Any, masses: Any, vectors: Any, limit: Any, marks: Any) -> Any:
    """Set the marks of key blocks whose mass is larger than a limit to -1.

    Args:
        masses: address of int32 [vectors * 16].
        vectors: number of vectors of 16 key blocks.
        limit: the limit.
        marks: address of int32 [vectors * 16], updated.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        masses, vectors, limit, marks = arguments
        limits = emit_splat(b, b.trunc(limit, I32), V16I)
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.mul(loop.index, ir.Constant(I64, _LINE))
            here = b.add(marks, at)
            is_larger = b.icmp_signed(">", emit_load(b, V16I, b.add(masses, at)), limits)
            marked = b.or_(emit_load(b, V16I, here), b.sext(is_larger, V16I))
            emit_store(b, marked, here)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@kernel
def _sum_masses(masses: int, first: int, end: int) -> Any:
    total = 0
    for block in range(first, end):
        total += load_i32(masses + 4 * block)
    return total


@kernel
def _mark_blocks(parts: _Scratch, num_blocks: int) -> None:
    """Mark the key blocks that a head needs besides those that are always kept."""
    first, end = _optional(num_blocks)
    always = _sum_masses(parts.masses, 0, first) + _sum_masses(parts.masses, end, num_blocks)
    total = always + _sum_masses(parts.masses, first, end)
    needed = (total * MASS_THRESHOLD + 999) // 1000 - always
    if needed <= 0:
        return
    smallest, equal = keep_largest(parts.masses + 4 * first, end - first, needed, parts.bins)
    _mark_larger(parts.masses, (num_blocks + LANES - 1) // LANES, smallest, parts.marks)
    block = first
    while equal > 0:
        if load_i32(parts.masses + 4 * block) == smallest:
            store_i32(parts.marks + 4 * block, -1)
            equal -= 1
        block += 1


@kernel
def _keep_marked(parts: _Scratch, num_blocks: int) -> Any:
    """Write the indices of marked key blocks to `parts.kept`, and return their number."""
    first, end = _optional(num_blocks)
    count = 0
    for block in range(num_blocks):
        if not first <= block < end or load_i32(parts.marks + 4 * block) != 0:
            store_i64(parts.kept + 8 * count, block)
            count += 1
    return count


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
        fill(out, heads * size, np.float32(0.0))
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
        reverse_queries(shape, unit, parts.queries)
        size = 4 * shape.padded_dim * LANES
        for block in range(0, num_blocks, STRIPS):
            for strip in range(STRIPS):
                keys = parts.keys + strip * size
                stage(whole, unit, (block + strip) * LANES, keys, parts.zeros, parts.steps)
            _score_strips(shape, parts, parts.scores + 4 * block, row_bytes)
        fill(parts.marks, vectors * LANES, np.float32(0.0))
        for head in range(shape.heads_per_kv):
            scores = parts.scores + row_bytes * head
            fill(scores + 4 * num_blocks, vectors * LANES - num_blocks, np.float32(-np.inf))
            _softmax_masses(scores, vectors, parts.masses)
            _mark_blocks(parts, num_blocks)
        return BlockSelection(more, parts.kept, _keep_marked(parts, num_blocks), start)

    return select
