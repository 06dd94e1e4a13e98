"""Row kernels in a fixed 16-lane order: sum of squares, scaling by a norm, activation, int8 quantization of a row.

Addresses are int64, in bytes. Counts that are not multiples of 16 are handled lane by lane; where a row is padded to
groups of 32 its padding is written as zeros and never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.linear_dot import V16I, int_constant
from kvboost_edge.kernels.linear_tiles import GROUP
from kvboost_edge.kernels.vectors import (
    F32,
    I64,
    LANES,
    V16,
    emit_exp,
    emit_fma,
    emit_lanes_in,
    emit_load,
    emit_max,
    emit_shuffle,
    emit_splat,
    emit_store,
    load_f32,
    store_f32,
)

__all__ = [
    "ACT_GELU_TANH",
    "ACT_SILU",
    "activate_vectors",
    "fma_f32",
    "norm_row",
    "quantize_groups",
    "sqrt_f32",
    "sum_squares",
]

ACT_SILU, ACT_GELU_TANH = 0, 1
_VECTOR = 4 * LANES
_TINY = 1e-30  # a group whose largest magnitude is below is all zeros: its scale would not be a normal number
_GELU_INNER, _GELU_CUBIC = 0.7978845608028654, 0.044715
_MAX_EXPONENT = 88.0

Value = Any
Builder = Any
_I32 = ir.IntType(32)
_V16B = ir.VectorType(ir.IntType(8), LANES)


def _splat(value: float) -> ir.Constant:
    return ir.Constant(V16, [value] * LANES)


def _unary(b: Builder, name: str, x: Value) -> Value:
    suffix = "v16f32" if isinstance(x.type, ir.VectorType) else "f32"
    kind = ir.FunctionType(x.type, [x.type])
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.{name}.{suffix}"), [x])


def _fold(b: Builder, vector: Value, combine: Any) -> Value:
    """Fold the 16 lanes in the fixed order 8 + 8, 4 + 4, 2 + 2, 1 + 1; returns a scalar."""
    for half in (8, 4, 2, 1):
        vector = combine(vector, emit_shuffle(b, vector, vector, [(lane + half) % LANES for lane in range(LANES)]))
    return b.extract_element(vector, _I32(0))


@intrinsic
def fma_f32(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z rounded once, float32."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        return emit_fma(b, *arguments)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def sqrt_f32(typing: Any, x: Any) -> Any:
    """Square root of a float32, correctly rounded."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        return _unary(b, "sqrt", arguments[0])

    return types.float32(types.float32), codegen


@intrinsic
def _sum_squares_vectors(typing: Any, address: Any, vectors: Any) -> Any:
    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        address, vectors = arguments
        slot = cgutils.alloca_once(b, V16)
        b.store(_splat(0.0), slot)
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            x = emit_load(b, V16, b.add(address, b.mul(loop.index, int_constant(_VECTOR))))
            b.store(emit_fma(b, x, x, b.load(slot)), slot)
        return _fold(b, b.load(slot), b.fadd)

    return types.float32(types.int64, types.int64), codegen


@kernel
def sum_squares(address: int, count: int) -> Any:
    """Sum of squares of `count` float32: 16 fma chains folded 8 + 8, 4 + 4, 2 + 2, 1 + 1, then the rest in order."""
    total = _sum_squares_vectors(address, count // LANES)
    for index in range(count // LANES * LANES, count):
        x = load_f32(address + 4 * index)
        total = fma_f32(x, x, total)
    return total


@intrinsic
def _scale_vectors(typing: Any, x: Any, weight: Any, factor: Any, vectors: Any, out: Any) -> Any:
    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        x, weight, factor, vectors, out = arguments
        factors = emit_splat(b, factor)
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.mul(loop.index, int_constant(_VECTOR))
            scaled = b.fmul(emit_load(b, V16, b.add(x, at)), factors)
            emit_store(b, b.fmul(scaled, emit_load(b, V16, b.add(weight, at))), b.add(out, at))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64, types.int64), codegen


@kernel
def norm_row(x: int, weight: int, count: int, eps: float, out: int) -> None:
    """RMS norm of `count` float32: out = (x / sqrt(mean(x^2) + eps)) * weight. `out` may be `x`."""
    mean = sum_squares(x, count) / np.float32(count)
    factor = np.float32(1.0) / sqrt_f32(mean + eps)
    _scale_vectors(x, weight, factor, count // LANES, out)
    for index in range(count // LANES * LANES, count):
        store_f32(out + 4 * index, load_f32(x + 4 * index) * factor * load_f32(weight + 4 * index))


def _emit_quantize(b: Builder, vectors: Sequence[Value], out: Value, scale_at: Value, sum_at: Value) -> None:
    """One group of 32: q = rint(x * (127 / max|x|)), scale = max|x| / 127, and the sum of q."""
    absolute = [_unary(b, "fabs", vector) for vector in vectors]
    top = _fold(b, emit_max(b, absolute[0], absolute[1]), lambda x, y: emit_max(b, x, y))
    empty = b.fcmp_ordered("<", top, F32(_TINY))
    scale = b.select(empty, F32(0.0), b.fdiv(top, F32(127.0)))
    inverse = emit_splat(b, b.select(empty, F32(0.0), b.fdiv(F32(127.0), top)))
    total = None
    for index, vector in enumerate(vectors):
        rounded = b.fptosi(_unary(b, "rint", b.fmul(vector, inverse)), V16I)
        b.store(b.trunc(rounded, _V16B), b.inttoptr(b.add(out, int_constant(LANES * index)), ir.PointerType()), align=1)
        total = rounded if total is None else b.add(total, rounded)
    kind = ir.FunctionType(_I32, [V16I])
    add = cgutils.get_or_insert_function(b.module, kind, "llvm.vector.reduce.add.v16i32")
    emit_store(b, scale, scale_at)
    b.store(b.call(add, [total]), b.inttoptr(sum_at, ir.PointerType()), align=4)


@intrinsic
def quantize_groups(typing: Any, x: Any, groups: Any, out: Any, scales: Any, sums: Any) -> Any:
    """Quantize `groups` whole groups of 32 float32: int8 into `out`, float32 scales, int32 sums of the int8."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        x, groups, out, scales, sums = arguments
        with cgutils.for_range(b, groups, intp=I64) as loop:
            at = b.add(x, b.mul(loop.index, int_constant(2 * _VECTOR)))
            vectors = [emit_load(b, V16, at), emit_load(b, V16, b.add(at, int_constant(_VECTOR)))]
            four = b.mul(loop.index, int_constant(4))
            to = b.add(out, b.mul(loop.index, int_constant(GROUP)))
            _emit_quantize(b, vectors, to, b.add(scales, four), b.add(sums, four))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def activate_vectors(typing: Any, gate: Any, up: Any, kind: Any, count: Any, vectors: Any, out: Any) -> Any:
    """out = act(gate) * up, `vectors` vectors; outputs from `count` on are 0 (their inputs are read)."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        gate, up, kind, count, vectors, out = arguments
        is_silu = b.icmp_signed("==", kind, int_constant(ACT_SILU))
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.mul(loop.index, int_constant(_VECTOR))
            x = emit_load(b, V16, b.add(gate, at))
            cubed = b.fmul(b.fmul(x, x), b.fmul(x, _splat(_GELU_CUBIC)))
            inner = b.fmul(b.fadd(x, cubed), _splat(2.0 * _GELU_INNER))
            exponent = b.fsub(_splat(0.0), b.select(is_silu, x, inner))
            exponent = b.select(b.fcmp_ordered(">", exponent, _splat(_MAX_EXPONENT)), _splat(_MAX_EXPONENT), exponent)
            activated = b.fdiv(x, b.fadd(_splat(1.0), emit_exp(b, exponent)))
            value = b.fmul(activated, emit_load(b, V16, b.add(up, at)))
            left = b.sub(count, b.mul(loop.index, int_constant(LANES)))
            inside = emit_lanes_in(b, 0, int_constant(0), _clamp(b, left))
            emit_store(b, b.select(inside, value, _splat(0.0)), b.add(out, at))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


def _clamp(b: Builder, left: Value) -> Value:
    """At least 0 and at most 16, so that it fits the lane index type."""
    left = b.select(b.icmp_signed("<", left, int_constant(0)), int_constant(0), left)
    return b.select(b.icmp_signed(">", left, int_constant(LANES)), int_constant(LANES), left)
