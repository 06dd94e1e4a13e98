"""Integer attention microkernels: four query rows x one tile of 64 tokens of codes.

A tile consists of four strips of 16 tokens, each inside one block (see code_layout.py). The tile
table, int64 [4, 4] in memory with one column per strip, holds their locations:

    row  content
      0  address of the key codes
      1  bytes from one row of key quads to the next
      2  address of the value codes
      3  bytes from one row of value quads to the next

Query rows are integers of two bytes (code_rows.py). The product of a softmax weight and a value
scale becomes one unsigned byte, relative to the row's largest product in the tile. Scores and
weighted values are both computed by `vpdpbusd` or `sdot` (code_dot.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from kvboost_edge.kernels.attention.float_tiles import ROWS, STRIPS, TILE
from kvboost_edge.kernels.integers import V16I, emit_load_bytes, emit_loop, emit_splat_int
from kvboost_edge.kernels.jit import intrinsic
from kvboost_edge.kernels.lazy import types
from kvboost_edge.kernels.quantized_kv.code_dot import coded_dot_form, emit_dot
from kvboost_edge.kernels.quantized_kv.code_rows import (
    I8,
    LINE,
    ROUNDER,
    TINY,
    V16B,
    ZERO,
    emit_int,
    emit_load_i32,
    emit_slots,
    emit_store_codes,
    float_lanes,
    int_lanes,
    plane_offset,
)
from kvboost_edge.kernels.vectors import (
    F32,
    I64,
    LANES,
    V16,
    emit_fma,
    emit_load,
    emit_reduce_rows,
    emit_scratch,
    emit_shuffle,
    emit_splat,
    emit_store,
)

__all__ = ["coded_scores", "coded_values", "weigh_rows"]

_PAIRS = LANES // 8  # pairs of quads in 16 channels or tokens
# Number of strips, planes and vectors that are multiplied with four rows at once. They are chosen
# to keep the sums in registers: 32 of 512 bits, or 16 of 256 bits or less.
_STRIPS_AT_ONCE, _PLANES_AT_ONCE, _VECTORS_AT_ONCE = (
    (2, 2, 4) if coded_dot_form() == "vnni512" else (1, 1, 1)
)

Value = Any
Builder = Any


def _nan_or_max(b: Builder, x: Value, y: Value) -> Value:
    """Return the larger of two non-negative floats, or NaN, which is the largest as an integer."""
    x = b.bitcast(x, V16I)
    y = b.bitcast(y, V16I)
    return b.bitcast(b.select(b.icmp_unsigned(">", x, y), x, y), V16)


def _column(b: Builder, table: Value, row: int, strip: int) -> Value:
    return emit_load(b, I64, b.add(table, emit_int(8 * (row * STRIPS + strip))))


def _quads(b: Builder, bits: int, address: Value, step: Value) -> list[Value]:
    """Load two quads of unsigned codes from an address, as <16 x i32> each."""
    first = emit_load_bytes(b, address)
    if bits == 8:
        return [first, emit_load_bytes(b, b.add(address, step))]
    mask = int_lanes(0x0F0F0F0F)
    return [b.and_(first, mask), b.and_(b.lshr(first, int_lanes(4)), mask)]


def _emit_scores(b: Builder, arguments: Sequence[Value], bits: int) -> None:
    """Emit `scores` in groups of strips and query planes whose sums fit in the registers."""
    planes, table, dim, tops, row_steps, dots, scores = arguments
    with emit_loop(b, emit_int(STRIPS // _STRIPS_AT_ONCE)) as part:
        first = b.mul(part, emit_int(_STRIPS_AT_ONCE))
        at = b.add(planes, b.mul(first, emit_int(plane_offset(0, 1, 0, 0))))
        column = b.add(table, b.mul(first, emit_int(8)))
        sums = _emit_strip_sums(b, (at, column, dim), bits)
        for row in range(ROWS):
            row_step = emit_load(b, F32, b.add(row_steps, emit_int(4 * row)))
            for strip in range(_STRIPS_AT_ONCE):
                high, low = (b.sitofp(sums(row, strip, plane), V16) for plane in range(2))
                number = b.add(first, emit_int(strip))
                top = emit_load(b, F32, b.add(tops, b.mul(number, emit_int(4))))
                dot_at = b.add(b.mul(number, emit_int(4 * ROWS)), emit_int(4 * row))
                factor = emit_splat(b, b.fmul(row_step, top))
                dot = emit_splat(b, emit_load(b, F32, b.add(dots, dot_at)))
                score = emit_fma(b, emit_fma(b, high, float_lanes(256.0), low), factor, dot)
                to = b.add(b.mul(number, emit_int(4 * LANES)), emit_int(4 * row * TILE))
                emit_store(b, score, b.add(scores, to))


def _emit_strip_sums(
    b: Builder, arguments: Sequence[Value], bits: int
) -> Callable[[int, int, int], Value]:
    """Emit integer sums of some strips of a tile, and return a function that loads one of them.

    Its arguments are a row, a strip and a plane of the queries.
    """
    planes, table, dim = arguments
    strips = range(_STRIPS_AT_ONCE)
    keys, steps = ([_column(b, table, row, strip) for strip in strips] for row in (0, 1))
    if _PLANES_AT_ONCE == 2:
        places = [
            (row, strip, plane) for row in range(ROWS) for strip in strips for plane in (0, 1)
        ]
        slots = _emit_plane_sums(b, (planes, keys, steps, dim), bits, places)
        # The sums of both planes stay in registers.
        return lambda *place: b.load(slots[places.index(place)])
    sums = emit_scratch(b, 2 * ROWS * _STRIPS_AT_ONCE * LINE)
    places = [(row, strip, 0) for row in range(ROWS) for strip in strips]
    with emit_loop(b, emit_int(2)) as plane:
        at = b.add(planes, b.mul(plane, emit_int(plane_offset(0, 0, 1, 0))))
        out = b.add(sums, b.mul(plane, emit_int(ROWS * _STRIPS_AT_ONCE * LINE)))
        for index, slot in enumerate(_emit_plane_sums(b, (at, keys, steps, dim), bits, places)):
            to = b.inttoptr(b.add(out, emit_int(LINE * index)), ir.PointerType())
            b.store(b.load(slot), to, align=4)
    return lambda row, strip, plane: emit_load_bytes(
        b, b.add(sums, emit_int(((plane * ROWS + row) * _STRIPS_AT_ONCE + strip) * LINE))
    )


def _emit_plane_sums(
    b: Builder, arguments: Sequence[Any], bits: int, places: Sequence[tuple[int, int, int]]
) -> list[Value]:
    """Emit the sums at some places (row, strip, plane), and return their stack variables."""
    planes, keys, steps, dim = arguments
    form = coded_dot_form()
    slots = emit_slots(b, int_lanes(0), len(places))
    with (
        emit_loop(b, b.udiv(dim, emit_int(LANES))) as group,
        emit_loop(b, emit_int(_PAIRS)) as pair,
    ):
        line = b.mul(b.add(b.mul(group, emit_int(_PAIRS)), pair), emit_int(bits // 4))
        codes = [
            _quads(b, bits, b.add(key, b.mul(step, line)), step)
            for key, step in zip(keys, steps, strict=True)
        ]
        at = b.add(planes, b.mul(group, emit_int(ROWS * STRIPS * 2 * LANES)))
        at = b.add(at, b.mul(pair, emit_int(plane_offset(0, 0, 0, 2))))
        for quad in range(2):
            for slot, (row, strip, plane) in zip(slots, places, strict=True):
                four = emit_load_i32(b, b.add(at, emit_int(plane_offset(row, strip, plane, quad))))
                b.store(
                    emit_dot(b, form, b.load(slot), codes[strip][quad], emit_splat_int(b, four)),
                    slot,
                )
    return slots


def _coded_scores(bits: int) -> Any:
    @intrinsic
    def scores(
        typing: Any,
        planes: Any,
        table: Any,
        dim: Any,
        tops: Any,
        steps: Any,
        dots: Any,
        scores: Any,
    ) -> Any:
        """Compute the scores of four rows for the tile's 64 tokens.

        Args:
            planes: address of int8 [dim / 16, 4 strips, 4, 32]; see `fold_rows`.
            table: address of the tile table.
            dim: channels, a multiple of 16.
            tops: address of float32 [4 strips], largest key step of each strip.
            steps: address of float32 [4]; see `divide_row`.
            dots: address of float32 [4 strips, 4]; see `fold_rows`.
            scores: address of float32 [4, 64], written.
        """

        def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
            _emit_scores(b, arguments, bits)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return scores


coded_scores = {bits: _coded_scores(bits) for bits in (8, 4)}


@intrinsic
def weigh_rows(
    typing: Any, weights: Any, scales: Any, middles: Any, codes: Any, factors: Any, shifts: Any
) -> Any:
    """Quantize the products of softmax weights and value scales of four rows to unsigned bytes.

    Args:
        weights: address of float32 [4, 64].
        scales: address of float32 [64]; ignored where the weight is 0.
        middles: address of float32 [64], or 0 without middles; ignored where the weight is 0.
        codes: address of uint8 [4, 64], written: round(weight * scale / factor).
        factors: address of float32 [4], written: the product that corresponds to 1 in `codes`.
        shifts: address of float32 [4], written: sum of weight * middle.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        weights, scales, middles, codes, factors, shifts = arguments

        def products(row: int, array: Value) -> list[Value]:
            result = []
            for strip in range(STRIPS):
                weight = emit_load(
                    b, V16, b.add(weights, emit_int(4 * (row * TILE + strip * LANES)))
                )
                product = b.fmul(
                    weight, emit_load(b, V16, b.add(array, emit_int(4 * LANES * strip)))
                )
                result.append(b.select(b.fcmp_ordered("==", weight, ZERO), ZERO, product))
            return result

        tops = []
        rows = [products(row, scales) for row in range(ROWS)]
        for row in rows:
            tops.append(
                _nan_or_max(b, _nan_or_max(b, row[0], row[1]), _nan_or_max(b, row[2], row[3]))
            )
        largest = emit_reduce_rows(b, tops, lambda x, y: _nan_or_max(b, x, y))
        largest = _nan_or_max(b, largest, float_lanes(TINY))
        inverse = b.fdiv(float_lanes(255.0), largest)
        for index, row in enumerate(rows):
            own = emit_shuffle(b, inverse, inverse, [index * ROWS] * LANES)
            for strip, vector in enumerate(row):
                bits = b.bitcast(emit_fma(b, vector, own, float_lanes(ROUNDER)), V16I)
                emit_store_codes(
                    b, b.trunc(bits, V16B), b.add(codes, emit_int(index * TILE + strip * LANES))
                )
        one = b.fdiv(ir.Constant(F32, 1.0), ir.Constant(F32, 255.0))
        factor = b.fmul(largest, emit_splat(b, one))
        emit_store(b, emit_shuffle(b, factor, factor, range(0, LANES, ROWS)), factors)
        emit_store(b, ir.Constant(ir.VectorType(F32, ROWS), [0.0] * ROWS), shifts)
        with b.if_then(b.icmp_signed("!=", middles, emit_int(0))):
            parts = [products(row, middles) for row in range(ROWS)]
            folded = [b.fadd(b.fadd(part[0], part[1]), b.fadd(part[2], part[3])) for part in parts]
            total = emit_reduce_rows(b, folded, b.fadd)
            emit_store(b, emit_shuffle(b, total, total, range(0, LANES, ROWS)), shifts)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


def _emit_values(b: Builder, arguments: Sequence[Value], bits: int, num_vectors: int) -> None:
    """Emit `coded_values` in panels whose sums fit in the registers."""
    codes, table, channel, numbers, out, row_bytes = arguments
    at_once = min(num_vectors, _VECTORS_AT_ONCE)
    with emit_loop(b, emit_int(num_vectors // at_once)) as part:
        offset = b.mul(b.add(channel, b.mul(part, emit_int(at_once * LANES))), emit_int(4))
        _emit_channels(
            b, (codes, table, offset, numbers, b.add(out, offset), row_bytes), bits, at_once
        )


def _emit_channels(b: Builder, arguments: Sequence[Value], bits: int, num_vectors: int) -> None:
    """Emit `coded_values` for num_vectors * 16 channels: int32 sums over the tile, then float32."""
    codes, table, offset, numbers, out, row_bytes = arguments
    form = coded_dot_form()
    sums = emit_slots(b, int_lanes(0), ROWS * num_vectors)
    with emit_loop(b, emit_int(STRIPS)) as strip, emit_loop(b, emit_int(_PAIRS)) as pair:
        column = b.add(table, b.mul(strip, emit_int(8)))
        base = b.add(_column(b, column, 2, 0), offset)
        step = _column(b, column, 3, 0)
        base = b.add(base, b.mul(step, b.mul(pair, emit_int(bits // 4))))
        at = b.add(codes, b.add(b.mul(strip, emit_int(LANES)), b.mul(pair, emit_int(8))))
        vectors = [
            _quads(b, bits, b.add(base, emit_int(LINE * vector)), step)
            for vector in range(num_vectors)
        ]
        for quad in range(2):
            for row in range(ROWS):
                weights = emit_splat_int(
                    b, emit_load_i32(b, b.add(at, emit_int(row * TILE + 4 * quad)))
                )
                for vector in range(num_vectors):
                    signed = vectors[vector][quad]
                    if bits == 4:
                        line = ir.VectorType(I8, LINE)
                        signed = b.bitcast(
                            b.sub(b.bitcast(signed, line), ir.Constant(line, [8] * LINE)), V16I
                        )
                    slot = sums[row * num_vectors + vector]
                    b.store(emit_dot(b, form, b.load(slot), weights, signed), slot)
    for row in range(ROWS):
        rescale, factor, shift = (
            emit_splat(b, emit_load(b, F32, b.add(numbers, emit_int(4 * (ROWS * index + row)))))
            for index in range(3)
        )
        for vector in range(num_vectors):
            place = b.add(out, b.add(b.mul(row_bytes, emit_int(row)), emit_int(LINE * vector)))
            old = emit_fma(b, emit_load(b, V16, place), rescale, shift)
            total = b.sitofp(b.load(sums[row * num_vectors + vector]), V16)
            emit_store(b, emit_fma(b, total, factor, old), place)


def _coded_values(bits: int, num_vectors: int) -> Any:
    @intrinsic
    def values(
        typing: Any, codes: Any, table: Any, channel: Any, numbers: Any, out: Any, row_bytes: Any
    ) -> Any:
        """Set out[row] = out[row] * rescale + shift + factor * sum of weight code * value code.

        Args:
            codes: address of uint8 [4, 64]; see `weigh_rows`.
            table: address of the tile table.
            channel: first channel of the panel.
            numbers: address of float32 [3, 4]: rescale, factor and shift of each row.
            out: address of float32 [4, row_bytes / 4]; only the panel's columns are updated.
            row_bytes: bytes per row of `out`.
        """

        def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
            _emit_values(b, arguments, bits, num_vectors)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return values


coded_values = {
    (bits, vectors): _coded_values(bits, vectors) for bits in (8, 4) for vectors in (4, 1)
}
