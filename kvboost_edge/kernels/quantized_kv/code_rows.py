"""Queries and block scales of attention over codes, prepared for integer dot products.

The score of a query and a key is `sum(q[d] * step[d] * code[d]) + sum(q[d] * zero[d])`. Each
product q * step is rounded to an integer `256 * high + low`, where `high` and `low` are signed
bytes. Two dot products of bytes then give the exact sum over the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from kvboost_edge.kernels.attention.float_tiles import ROWS, STRIPS
from kvboost_edge.kernels.integers import V16I
from kvboost_edge.kernels.jit import intrinsic
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.quantized_kv.code_layout import STEP_BIAS
from kvboost_edge.kernels.vectors import (
    F32,
    I64,
    KIND_F16,
    LANES,
    V16,
    emit_fma,
    emit_load,
    emit_load_as_f32,
    emit_max,
    emit_prefetch,
    emit_reduce_rows,
    emit_shuffle,
    emit_splat,
    emit_store,
)

__all__ = [
    "I8",
    "LINE",
    "ROUNDER",
    "TINY",
    "V16B",
    "ZERO",
    "decode_key_scales",
    "decode_keys",
    "divide_row",
    "emit_int",
    "emit_load_i32",
    "emit_slots",
    "emit_store_codes",
    "float_lanes",
    "fold_rows",
    "int_lanes",
    "plane_offset",
    "prefetch_lines",
]

Q_TOP = 32512.0  # 127 * 256, so a query's integers fit in two signed bytes
TINY = 1e-30  # avoids a division by 0 if all numbers are 0
ROUNDER = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer in the low bits of the mantissa
LINE = 64
I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
V16B = ir.VectorType(I8, LANES)
ZERO = ir.Constant(V16, [0.0] * LANES)

Value = Any
Builder = Any


def emit_int(value: int) -> ir.Constant:
    """Return an i64 constant."""
    return ir.Constant(I64, value)


def float_lanes(value: float) -> ir.Constant:
    """Return a constant of 16 equal float32 lanes."""
    return ir.Constant(V16, [value] * LANES)


def int_lanes(value: int) -> ir.Constant:
    """Return a constant of 16 equal i32 lanes."""
    return ir.Constant(V16I, [value] * LANES)


def emit_load_i32(b: Builder, address: Value) -> Value:
    """Load four bytes as an i32."""
    return b.load(b.inttoptr(address, ir.PointerType()), align=4, typ=_I32)


def _load_codes(b: Builder, address: Value) -> Value:
    return b.load(b.inttoptr(address, ir.PointerType()), align=1, typ=V16B)


def emit_store_codes(b: Builder, codes: Value, address: Value) -> None:
    """Store a vector of 16 bytes."""
    b.store(codes, b.inttoptr(address, ir.PointerType()), align=1)


def emit_slots(b: Builder, start: Value, count: int) -> list[Value]:
    """Return `count` stack variables that are initialized to a value."""
    slots = [cgutils.alloca_once(b, start.type) for _ in range(count)]
    for slot in slots:
        b.store(start, slot)
    return slots


def _spread_max(b: Builder, x: Value) -> Value:
    """Return a vector whose lanes all hold the largest lane of the input."""
    for step in (8, 4, 2, 1):
        x = emit_max(b, x, emit_shuffle(b, x, x, [lane ^ step for lane in range(LANES)]))
    return x


def _first(b: Builder, x: Value) -> Value:
    return b.extract_element(x, _I32(0))


def _emit_steps(b: Builder, address: Value) -> Value:
    """Load 16 key steps as float32; see code_layout.STEP_BIAS."""
    codes = b.zext(_load_codes(b, address), V16I)
    bits = b.shl(b.add(codes, int_lanes((127 - STEP_BIAS) << 3)), int_lanes(20))
    return b.bitcast(bits, V16)


@intrinsic
def decode_keys(
    typing: Any, zeros: Any, steps: Any, dim: Any, out_zeros: Any, out_steps: Any
) -> Any:
    """Decode a block's key zeros and steps, and return the largest step.

    Args:
        zeros: address of float16 [dim].
        steps: address of uint8 [dim]; see code_layout.STEP_BIAS.
        dim: number of channels, a multiple of 16.
        out_zeros: address of float32 [dim], written.
        out_steps: address of float32 [dim], written: steps divided by the largest step.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        zeros, steps, dim, out_zeros, out_steps = arguments
        (top,) = emit_slots(b, ZERO, 1)
        vectors = b.udiv(dim, emit_int(LANES))
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.mul(loop.index, emit_int(4 * LANES))
            zero = emit_load_as_f32(
                b, KIND_F16, b.add(zeros, b.mul(loop.index, emit_int(2 * LANES)))
            )
            emit_store(b, zero, b.add(out_zeros, at))
            step = _emit_steps(b, b.add(steps, b.mul(loop.index, emit_int(LANES))))
            emit_store(b, step, b.add(out_steps, at))
            b.store(emit_max(b, step, b.load(top)), top)
        largest = _first(b, _spread_max(b, b.load(top)))
        inverse = emit_splat(b, b.fdiv(ir.Constant(F32, 1.0), largest))
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.add(out_steps, b.mul(loop.index, emit_int(4 * LANES)))
            emit_store(b, b.fmul(emit_load(b, V16, at), inverse), at)
        return largest

    return types.float32(*[types.int64] * 5), codegen


@intrinsic
def decode_key_scales(
    typing: Any, zeros: Any, steps: Any, dim: Any, out_zeros: Any, out_steps: Any
) -> Any:
    """Decode a block's key zeros and steps, as `decode_keys` does, without dividing the steps."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        zeros, steps, dim, out_zeros, out_steps = arguments
        with cgutils.for_range(b, b.udiv(dim, emit_int(LANES)), intp=I64) as loop:
            at = b.mul(loop.index, emit_int(4 * LANES))
            halves = b.add(zeros, b.mul(loop.index, emit_int(2 * LANES)))
            emit_store(b, emit_load_as_f32(b, KIND_F16, halves), b.add(out_zeros, at))
            step = _emit_steps(b, b.add(steps, b.mul(loop.index, emit_int(LANES))))
            emit_store(b, step, b.add(out_steps, at))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def divide_row(typing: Any, row: Any, dim: Any) -> Any:
    """Scale a query row to the integer range in place: row * (Q_TOP / largest |row|).

    16 channels are contiguous and the next 16 channels follow after ROWS * 16 floats; see
    `fold_rows`.

    Args:
        row: address of float32 [dim], updated.
        dim: number of channels, a multiple of 16.

    Returns:
        The value before that corresponds to 1 afterwards.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        row, dim = arguments
        (top,) = emit_slots(b, float_lanes(TINY), 1)
        vectors = b.udiv(dim, emit_int(LANES))
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            x = emit_load(b, V16, b.add(row, b.mul(loop.index, emit_int(LINE * ROWS))))
            size = b.select(b.fcmp_ordered("<", x, ZERO), b.fsub(ZERO, x), x)
            b.store(emit_max(b, size, b.load(top)), top)
        largest = _first(b, _spread_max(b, b.load(top)))
        factor = emit_splat(b, b.fdiv(ir.Constant(F32, Q_TOP), largest))
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.add(row, b.mul(loop.index, emit_int(LINE * ROWS)))
            emit_store(b, b.fmul(emit_load(b, V16, at), factor), at)
        one = b.fdiv(ir.Constant(F32, 1.0), ir.Constant(F32, Q_TOP))
        return b.fmul(largest, one)

    return types.float32(types.int64, types.int64), codegen


def plane_offset(row: int, strip: int, plane: int, quad: int) -> int:
    """Return the byte offset of a quad of channels among the integers of 16 channels of queries.

    Plane 0 holds the high bytes, plane 1 the low bytes.
    """
    return (strip * ROWS + row) * 2 * LANES + quad // 2 * LANES + plane * 8 + quad % 2 * 4


def _emit_planes(b: Builder, numbers: Sequence[Value], place: Value) -> None:
    """Store the integers of two rows for one strip, in the order of `plane_offset`.

    Each row is <16 x i32> with 128 added.
    """
    words = ir.VectorType(_I16, 2 * LANES)
    low_halves = ir.Constant(ir.VectorType(_I32, 2 * LANES), list(range(0, 4 * LANES, 2)))
    both = b.shuffle_vector(b.bitcast(numbers[0], words), b.bitcast(numbers[1], words), low_halves)
    order = [
        lane + 2 * byte + 1 - plane
        for lane in range(0, LINE, LANES)
        for plane in range(2)
        for byte in range(8)
    ]
    line = ir.VectorType(I8, LINE)
    planes = b.bitcast(both, line)
    planes = b.shuffle_vector(planes, planes, ir.Constant(ir.VectorType(_I32, LINE), order))
    planes = b.xor(planes, ir.Constant(line, ([0] * 8 + [0x80] * 8) * 4))
    b.store(planes, b.inttoptr(place, ir.PointerType()), align=4)


@intrinsic
def fold_rows(
    typing: Any, rows: Any, row_steps: Any, dim: Any, zeros: Any, steps: Any, planes: Any, dots: Any
) -> Any:
    """Multiply four query rows by the key steps and key zeros of the tile's four strips.

    Args:
        rows: address of float32 [dim / 16, 4 rows, 16], the queries scaled by `divide_row`.
        row_steps: address of float32 [4], the results of `divide_row`.
        dim: number of channels, a multiple of 16.
        zeros: address of float32 [4 strips, dim]; see `decode_keys`.
        steps: address of float32 [4 strips, dim]; see `decode_keys`.
        planes: address of int8 [dim / 16, 4 strips, 4 rows, 32], written: high and low bytes of
            round(row * step).
        dots: address of float32 [4 strips, 4 rows], written: query . zeros.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        rows, row_steps, dim, zeros, steps, planes, dots = arguments
        sums = emit_slots(b, ZERO, ROWS * STRIPS)
        strip_bytes = b.mul(dim, emit_int(4))
        with cgutils.for_range(b, b.udiv(dim, emit_int(LANES)), intp=I64) as loop:
            at = b.mul(loop.index, emit_int(LINE))
            place = b.mul(loop.index, emit_int(ROWS * LINE))
            out = b.add(planes, b.mul(loop.index, emit_int(ROWS * STRIPS * 2 * LANES)))
            queries = [
                emit_load(b, V16, b.add(rows, b.add(place, emit_int(LINE * row))))
                for row in range(ROWS)
            ]
            for strip in range(STRIPS):
                here = b.add(at, b.mul(strip_bytes, emit_int(strip)))
                zero, step = (emit_load(b, V16, b.add(array, here)) for array in (zeros, steps))
                for row in range(ROWS):
                    slot = sums[strip * ROWS + row]
                    b.store(emit_fma(b, queries[row], zero, b.load(slot)), slot)
                # With 128 added, the upper byte is the nearest multiple of 256 and the lower byte
                # is the remainder + 128.
                numbers = [
                    b.bitcast(emit_fma(b, query, step, float_lanes(ROUNDER + 128.0)), V16I)
                    for query in queries
                ]
                for row in range(0, ROWS, 2):
                    _emit_planes(
                        b,
                        numbers[row : row + 2],
                        b.add(out, emit_int(plane_offset(row, strip, 0, 0))),
                    )
        factors = emit_load(b, ir.VectorType(F32, ROWS), row_steps)
        for strip in range(STRIPS):
            parts = [b.load(slot) for slot in sums[strip * ROWS : strip * ROWS + ROWS]]
            total = emit_reduce_rows(b, parts, b.fadd)
            dot = b.fmul(emit_shuffle(b, total, total, range(0, LANES, ROWS)), factors)
            emit_store(b, dot, b.add(dots, emit_int(4 * ROWS * strip)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


@intrinsic
def prefetch_lines(typing: Any, address: Any, num_bytes: Any) -> Any:
    """Prefetch the cache lines of `num_bytes` bytes at an address."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        address, num_bytes = arguments
        with cgutils.for_range(b, b.udiv(num_bytes, emit_int(LINE)), intp=I64) as loop:
            emit_prefetch(b, b.add(address, b.mul(loop.index, emit_int(LINE))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
