"""Register-blocked attention microkernels: four query rows x one tile of 64 tokens.

A tile consists of four strips of 16 tokens. The tile table, int64 [6, 4] in memory with one column
per strip, holds their locations:

    row  content
      0  address of the keys, [head_dim, 16]: a lane is a token
      1  bytes from one dim of the keys to the next
      2  address of the values, [16, padded_dim]: a lane is a channel
      3  bytes from one token of the values to the next
      4  address of the next tile's keys, to prefetch
      5  address of the next tile's values, to prefetch

The inner loop broadcasts one float of a query (or weight) and multiplies it with a vector of 16
keys (or values) by `fma`. Each lane of each accumulator is one fma chain in a fixed order, over
dims for scores and over tokens for values. A row's result therefore does not depend on the other
rows in the registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from kvboost_edge.kernels.integers import dot_form, emit_loop
from kvboost_edge.kernels.jit import intrinsic
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.vectors import (
    F32,
    I64,
    KIND_BF16,
    KIND_F16,
    KIND_F32,
    LANES,
    V16,
    emit_exp,
    emit_exp2,
    emit_exp2s,
    emit_fma,
    emit_lanes_in,
    emit_load,
    emit_load_as_f32,
    emit_max,
    emit_prefetch,
    emit_reduce_rows,
    emit_scratch,
    emit_shuffle,
    emit_splat,
    emit_store,
)

__all__ = [
    "AT_ONCE",
    "ROWS",
    "STRIPS",
    "TILE",
    "fill",
    "half_scores_tile",
    "half_values_tile",
    "hide_row",
    "mix_row",
    "scale_row",
    "scores_strip",
    "scores_tile",
    "softcap_row",
    "softmax_rows",
    "stage_rows",
    "values_strip",
    "values_tile",
]

STRIPS = 4
TILE = STRIPS * LANES
ROWS = 4
_VECTOR_BYTES = 4 * LANES
_TABLE_ROW_BYTES = 8 * STRIPS
# Number of vectors of 16 that are multiplied with four rows at once. The accumulators fill 16 of
# the 32 512-bit registers, or 8 of the 16 256-bit registers.
AT_ONCE = 4 if dot_form() == "vnni512" else 1

Value = Any
Builder = Any


def _int(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _table(b: Builder, table: Value, row: int, strips: int) -> list[Value]:
    return [
        emit_load(b, I64, b.add(table, _int(row * _TABLE_ROW_BYTES + 8 * strip)))
        for strip in range(strips)
    ]


def _accumulators(b: Builder, count: int) -> list[Value]:
    slots = [cgutils.alloca_once(b, V16) for _ in range(count)]
    for slot in slots:
        b.store(ir.Constant(V16, [0.0] * LANES), slot)
    return slots


def _accumulate(b: Builder, slot: Value, x: Value, y: Value) -> None:
    b.store(emit_fma(b, x, y, b.load(slot)), slot)


def _emit_scores(b: Builder, arguments: Sequence[Value], strips: int, kind: int) -> None:
    query, table, head_dim, scores = arguments
    at_once = min(strips, AT_ONCE)
    with emit_loop(b, _int(strips // at_once)) as part:
        first = b.mul(part, _int(at_once))
        here = b.add(table, b.mul(first, _int(8)))
        out = b.add(scores, b.mul(first, _int(_VECTOR_BYTES)))
        _emit_strips(b, (query, here, head_dim, out), at_once, kind)


def _emit_strips(b: Builder, arguments: Sequence[Value], strips: int, kind: int) -> None:
    """Emit `scores_tile` for `strips` strips, with 4 * strips accumulators."""
    query, table, head_dim, scores = arguments
    keys, steps, ahead = (_table(b, table, row, strips) for row in (0, 1, 4))
    row_bytes = b.mul(head_dim, _int(4))
    sums = _accumulators(b, ROWS * strips)
    with cgutils.for_range(b, head_dim, intp=I64) as loop:
        for strip in range(strips):
            emit_prefetch(b, b.add(ahead[strip], b.mul(loop.index, steps[strip])))
        places = [b.add(keys[g], b.mul(loop.index, steps[g])) for g in range(strips)]
        vectors = [emit_load_as_f32(b, kind, place) for place in places]
        at = b.add(query, b.mul(loop.index, _int(4)))
        for row in range(ROWS):
            splat = emit_splat(b, emit_load(b, F32, b.add(at, b.mul(row_bytes, _int(row)))))
            for strip in range(strips):
                _accumulate(b, sums[row * strips + strip], splat, vectors[strip])
    for row in range(ROWS):
        for strip in range(strips):
            place = b.add(scores, _int((row * STRIPS + strip) * _VECTOR_BYTES))
            emit_store(b, b.load(sums[row * strips + strip]), place)


def _scores_tile(strips: int, kind: int = KIND_F32) -> Any:
    @intrinsic
    def scores_tile(typing: Any, query: Any, table: Any, head_dim: Any, scores: Any) -> Any:
        """Compute scores of four rows for the first 16 * strips tokens of the tile.

        Args:
            query: address of float32 [4, head_dim], contiguous.
            table: address of the tile table; the keys have dtype `kind`.
            head_dim: channels per head.
            scores: address of float32 [4, 64]; only the columns of those tokens are written.
        """

        def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
            _emit_scores(b, arguments, strips, kind)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return scores_tile


scores_tile = _scores_tile(STRIPS)
scores_strip = _scores_tile(1)
half_scores_tile = _scores_tile(STRIPS, KIND_F16)


def _emit_values_panel(
    b: Builder, arguments: Sequence[Value], num_vectors: int, strips: int, kind: int
) -> None:
    """Emit `values_tile` for a panel of num_vectors * 16 channels."""
    weights, table, channel, scales, out, out_row_bytes = arguments
    at_once = min(num_vectors, AT_ONCE)
    with emit_loop(b, _int(num_vectors // at_once)) as part:
        first = b.add(channel, b.mul(part, _int(at_once * LANES)))
        _emit_channels(
            b, (weights, table, first, scales, out, out_row_bytes), at_once, strips, kind
        )


def _emit_channels(
    b: Builder, arguments: Sequence[Value], num_vectors: int, strips: int, kind: int
) -> None:
    """Emit `values_tile` for num_vectors * 16 channels, with 4 * num_vectors accumulators."""
    weights, table, channel, scales, out, out_row_bytes = arguments
    size = 4 if kind == KIND_F32 else 2
    offset = b.mul(channel, _int(4))
    stored = b.mul(channel, _int(size))
    places = [
        b.add(
            b.add(out, offset), b.add(b.mul(out_row_bytes, _int(row)), _int(vector * _VECTOR_BYTES))
        )
        for row in range(ROWS)
        for vector in range(num_vectors)
    ]
    sums = [cgutils.alloca_once(b, V16) for _ in places]
    splats = [emit_splat(b, emit_load(b, F32, b.add(scales, _int(4 * row)))) for row in range(ROWS)]
    for index, place in enumerate(places):
        b.store(b.fmul(emit_load(b, V16, place), splats[index // num_vectors]), sums[index])
    with emit_loop(b, _int(strips)) as strip:
        at = b.add(weights, b.mul(strip, _int(_VECTOR_BYTES)))
        column = b.add(table, b.mul(strip, _int(8)))
        (base,), (step,), (ask,) = (_table(b, column, row, 1) for row in (2, 3, 5))
        base = b.add(base, stored)
        ask = b.add(ask, stored)
        with cgutils.for_range(b, _int(LANES), intp=I64) as loop:
            row_at, ask_at = (b.add(start, b.mul(loop.index, step)) for start in (base, ask))
            for line in range(0, num_vectors * LANES * size, _VECTOR_BYTES):
                emit_prefetch(b, b.add(ask_at, _int(line)))
            vectors = [
                emit_load_as_f32(b, kind, b.add(row_at, _int(v * LANES * size)))
                for v in range(num_vectors)
            ]
            for row in range(ROWS):
                scalar_at = b.add(at, b.add(b.mul(loop.index, _int(4)), _int(row * TILE * 4)))
                splat = emit_splat(b, emit_load(b, F32, scalar_at))
                for vector in range(num_vectors):
                    _accumulate(b, sums[row * num_vectors + vector], splat, vectors[vector])
    for index, place in enumerate(places):
        emit_store(b, b.load(sums[index]), place)


def _values_tile(num_vectors: int, strips: int, kind: int = KIND_F32) -> Any:
    @intrinsic
    def values_tile(
        typing: Any, weights: Any, table: Any, channel: Any, scales: Any, out: Any, row_bytes: Any
    ) -> Any:
        """Set out[row] = out[row] * scale[row] + sum over tokens of weight[row] * value.

        The sum covers the first 16 * strips tokens of the tile.

        Args:
            weights: address of float32 [4, 64].
            table: address of the tile table; the values have dtype `kind`.
            channel: first channel of the panel.
            scales: address of float32 [4].
            out: address of float32 [4, row_bytes / 4]; only the panel's columns are updated.
            row_bytes: bytes per row of `out`.
        """

        def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
            _emit_values_panel(b, arguments, num_vectors, strips, kind)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return values_tile


values_tile = {vectors: _values_tile(vectors, STRIPS) for vectors in (4, 2, 1)}
half_values_tile = {vectors: _values_tile(vectors, STRIPS, KIND_F16) for vectors in (4, 2, 1)}
values_strip = {vectors: _values_tile(vectors, 1) for vectors in (4, 1)}


@intrinsic
def softcap_row(typing: Any, scores: Any, cap: Any) -> Any:
    """Apply s -> cap * tanh(s / cap) in place to float32 [64]."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        scores, cap = arguments
        zero = ir.Constant(V16, [0.0] * LANES)
        one = ir.Constant(V16, [1.0] * LANES)
        cap_splat = emit_splat(b, cap)
        for strip in range(STRIPS):
            at = b.add(scores, _int(strip * _VECTOR_BYTES))
            x = b.fdiv(emit_load(b, V16, at), cap_splat)
            negative = b.fcmp_ordered("<", x, zero)
            minus_abs = b.select(negative, x, b.fsub(zero, x))
            # Compute tanh from exp(-2 |x|), which cannot overflow.
            decay = emit_exp(b, b.fadd(minus_abs, minus_abs))
            tanh = b.fdiv(b.fsub(one, decay), b.fadd(one, decay))
            tanh = b.select(negative, b.fsub(zero, tanh), tanh)
            emit_store(b, b.fmul(tanh, cap_splat), at)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def hide_row(typing: Any, scores: Any, low: Any, high: Any) -> Any:
    """Set the elements of float32 [64] outside [low, high) to -inf, in place."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        scores, low, high = arguments
        hidden = ir.Constant(V16, [float("-inf")] * LANES)
        for strip in range(STRIPS):
            at = b.add(scores, _int(strip * _VECTOR_BYTES))
            visible = emit_lanes_in(b, strip * LANES, low, high)
            emit_store(b, b.select(visible, emit_load(b, V16, at), hidden), at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def softmax_rows(typing: Any, scores: Any, maxima: Any, totals: Any, rescale: Any) -> Any:
    """Do one online-softmax step for four rows over one tile.

    Args:
        scores: address of float32 [4, 64], replaced by 2^(score - new maximum). A score of -inf
            hides a token and becomes exactly 0.
        maxima: address of float32 [4], updated: running maxima, -inf before the first visible
            token.
        totals: address of float32 [4], updated: running sums of the powers.
        rescale: address of float32 [4], written: factor of the earlier sums, 1 if the maximum did
            not change.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        _emit_softmax(b, *arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def _emit_softmax(b: Builder, scores: Value, maxima: Value, totals: Value, rescale: Value) -> None:
    """Emit `softmax_rows`: fold each row to 16 lanes, then reduce all four rows at once.

    Maxima, powers and sums have loops of their own, so that the rows of a loop overlap.
    """
    quad = ir.VectorType(F32, ROWS)
    spread = [lane // ROWS for lane in range(LANES)]

    def load_quad(address: Value) -> Value:
        return emit_shuffle(b, four := emit_load(b, quad, address), four, spread)

    def store_quad(vector: Value, address: Value) -> None:
        emit_store(b, emit_shuffle(b, vector, vector, range(0, LANES, ROWS)), address)

    def fold(vectors: Sequence[Value], combine: Any) -> Value:
        return combine(combine(vectors[0], vectors[1]), combine(vectors[2], vectors[3]))

    def largest(x: Value, y: Value) -> Value:
        return emit_max(b, x, y)

    def row_places(row: Value) -> list[Value]:
        at = b.add(scores, b.mul(row, _int(TILE * 4)))
        return [b.add(at, _int(strip * _VECTOR_BYTES)) for strip in range(STRIPS)]

    def reduced(combine: Any) -> Value:
        rows = [emit_load(b, V16, b.add(folded, _int(row * _VECTOR_BYTES))) for row in range(ROWS)]
        return emit_reduce_rows(b, rows, combine)

    # Process one row at a time. All four at once would need more registers than there are, and more
    # code than the other parts of a tile together.
    folded = emit_scratch(b, ROWS * _VECTOR_BYTES)
    bases = emit_scratch(b, _VECTOR_BYTES)
    with emit_loop(b, _int(ROWS)) as row:
        top = fold([emit_load(b, V16, place) for place in row_places(row)], largest)
        emit_store(b, top, b.add(folded, b.mul(row, _int(_VECTOR_BYTES))))
    old = load_quad(maxima)
    new = largest(reduced(largest), old)
    lowest = ir.Constant(V16, [float("-inf")] * LANES)
    zero = ir.Constant(V16, [0.0] * LANES)
    base = b.select(b.fcmp_ordered("==", new, lowest), zero, new)
    emit_store(b, base, bases)
    with emit_loop(b, _int(ROWS)) as row:
        own_base = emit_splat(b, emit_load(b, F32, b.add(bases, b.mul(row, _int(4 * ROWS)))))
        places = row_places(row)
        shifted = [b.fsub(emit_load(b, V16, place), own_base) for place in places]
        weights = []
        for first in range(0, STRIPS, AT_ONCE):
            weights += emit_exp2s(b, shifted[first : first + AT_ONCE])
        for weight, place in zip(weights, places, strict=True):
            emit_store(b, weight, place)
    with emit_loop(b, _int(ROWS)) as row:
        total = fold([emit_load(b, V16, place) for place in row_places(row)], b.fadd)
        emit_store(b, total, b.add(folded, b.mul(row, _int(_VECTOR_BYTES))))
    factor = emit_exp2(b, b.fsub(old, base))
    store_quad(emit_fma(b, load_quad(totals), factor, reduced(b.fadd)), totals)
    store_quad(new, maxima)
    store_quad(factor, rescale)


def _emit_stage(b: Builder, arguments: Sequence[Value], kind: int) -> None:
    out, source, ahead, rows, step, low, high = arguments[:7]
    visible = emit_lanes_in(b, 0, low, high)
    with cgutils.for_range(b, rows, intp=I64) as loop:
        offset = b.mul(loop.index, step)
        emit_prefetch(b, b.add(ahead, offset))
        row = emit_load_as_f32(b, kind, b.add(source, offset))
        shown = b.select(visible, row, ir.Constant(V16, [0.0] * LANES))
        emit_store(b, shown, b.add(out, b.mul(loop.index, _int(_VECTOR_BYTES))))


@intrinsic
def stage_rows(
    typing: Any,
    out: Any,
    source: Any,
    ahead: Any,
    rows: Any,
    step: Any,
    low: Any,
    high: Any,
    kind: Any,
) -> Any:
    """Widen rows of 16 stored values to contiguous float32 rows, and prefetch the next rows.

    Args:
        out: address of float32 [rows, 16], written.
        source: address of the first row.
        ahead: address of the rows to prefetch, laid out like `source`.
        rows: number of rows.
        step: bytes from one row of `source` to the next.
        low: first lane to keep; earlier lanes become 0.
        high: end of the lanes to keep; later lanes become 0.
        kind: dtype of `source`: KIND_F32, KIND_F16 or KIND_BF16.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        for stored in (KIND_F32, KIND_F16, KIND_BF16):
            with b.if_then(b.icmp_signed("==", arguments[7], _int(stored))):
                _emit_stage(b, arguments, stored)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


def _emit_by_vectors(b: Builder, count: Value, emit: Any) -> None:
    """Emit `emit(type, byte offset)` for `count` floats: for whole vectors, then for single floats.

    The emitted code does nothing if count <= 0.
    """
    vectors = b.sdiv(count, _int(LANES))
    with cgutils.for_range(b, vectors, intp=I64) as loop:
        emit(V16, b.mul(loop.index, _int(_VECTOR_BYTES)))
    done = b.mul(vectors, _int(LANES))
    with cgutils.for_range(b, b.sub(count, done), intp=I64) as loop:
        emit(F32, b.mul(b.add(done, loop.index), _int(4)))


def _row_intrinsic(num_floats: int, combine: Any) -> Any:
    """Return the signature and code generator of an intrinsic f(out, source, count, *floats).

    The intrinsic sets out[i] = combine(b, out[i], source[i], *floats) for i < count.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        out, source, count = arguments[:3]
        splats = [emit_splat(b, value) for value in arguments[3:]]

        def emit(kind: ir.Type, offset: Value) -> None:
            place = b.add(out, offset)
            old = emit_load(b, kind, place)
            new = emit_load(b, kind, b.add(source, offset))
            emit_store(b, combine(b, old, new, *(splats if kind is V16 else arguments[3:])), place)

        _emit_by_vectors(b, count, emit)
        return context.get_dummy_value()

    kinds = [types.int64] * 3 + [types.float32] * num_floats
    return types.void(*kinds), codegen


@intrinsic
def mix_row(typing: Any, out: Any, source: Any, count: Any, keep: Any, add: Any) -> Any:
    """Set out = out * keep + source * add, for `count` float32 at addresses `out` and `source`."""
    return _row_intrinsic(
        2, lambda b, old, new, keep, add: emit_fma(b, new, add, b.fmul(old, keep))
    )


@intrinsic
def scale_row(typing: Any, out: Any, source: Any, count: Any, factor: Any) -> Any:
    """Set out = source * factor, for `count` float32 at addresses `out` and `source`."""
    return _row_intrinsic(1, lambda b, old, new, factor: b.fmul(new, factor))


@intrinsic
def fill(typing: Any, out: Any, count: Any, value: Any) -> Any:
    """Set `count` float32 at address `out` to `value`; do nothing if count <= 0."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        out, count, value = arguments
        splat = emit_splat(b, value)
        _emit_by_vectors(
            b,
            count,
            lambda kind, offset: emit_store(b, splat if kind is V16 else value, b.add(out, offset)),
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen
