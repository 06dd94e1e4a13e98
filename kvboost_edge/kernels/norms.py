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
from kvboost_edge.kernels.linear_dot import GROUP, KIND_INT4, KIND_INT4M, KIND_INT8, OFFSET, V16I, int_constant
from kvboost_edge.kernels.linear_panel import COARSE_BYTES, FINE_BASE, FINE_BYTES
from kvboost_edge.kernels.vectors import (
    F32,
    I64,
    LANES,
    V16,
    emit_exp,
    emit_fma,
    emit_lanes_in,
    emit_load,
    emit_shuffle,
    emit_splat,
    emit_store,
    load_f32,
    store_f32,
)

__all__ = [
    "ACT_GELU_TANH",
    "ACT_SILU",
    "activate_group",
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


def _maximum(b: Builder, x: Value, y: Value) -> Value:
    """The larger one, lane by lane; NaN if one of them is."""
    kind = ir.FunctionType(V16, [V16, V16])
    return b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.maximum.v16f32"), [x, y])


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


def _emit_rounded(b: Builder, vectors: Sequence[Value], top: Value, levels: float) -> tuple[list[Value], Value]:
    """rint(x * (levels / top)) of each vector, as float32, and the scale top / levels; zeros where top is tiny."""
    empty = b.fcmp_ordered("<", top, F32(_TINY))
    scale = b.select(empty, F32(0.0), b.fdiv(top, F32(levels)))
    inverse = emit_splat(b, b.select(empty, F32(0.0), b.fdiv(F32(levels), top)))
    return [_unary(b, "rint", b.fmul(vector, inverse)) for vector in vectors], scale


def _emit_codes(b: Builder, codes: Sequence[Value], out: Value) -> None:
    """Two vectors of 16 int32 as 32 int8."""
    for index, vector in enumerate(codes):
        place = b.inttoptr(b.add(out, int_constant(LANES * index)), ir.PointerType())
        b.store(b.trunc(vector, _V16B), place, align=1)


def _emit_quantize(
    b: Builder, vectors: Sequence[Value], out: Sequence[Value], term_at: Value, scale_at: Value, kind: Value
) -> None:
    """One group of 32 (two vectors): codes in one plane, or FINE_BASE * first + second in two; term and scale."""
    absolute = [_unary(b, "fabs", vector) for vector in vectors]
    # NaN wins, and makes the scale NaN: what is not a number must not come out as one.
    top = _fold(b, _maximum(b, absolute[0], absolute[1]), lambda x, y: _maximum(b, x, y))
    rounded, scale = _emit_rounded(b, vectors, top, 127.0 if len(out) == 1 else 127.0 * FINE_BASE)
    codes = [b.fptosi(vector, V16I) for vector in rounded]
    if len(out) == 1:
        _emit_codes(b, codes, out[0])
    else:
        high = [b.fptosi(_unary(b, "rint", b.fmul(vector, _splat(1.0 / FINE_BASE))), V16I) for vector in rounded]
        base = ir.Constant(V16I, [FINE_BASE] * LANES)
        _emit_codes(b, high, out[0])
        _emit_codes(b, [b.sub(code, b.mul(first, base)) for code, first in zip(codes, high, strict=True)], out[1])
    reduce = ir.FunctionType(_I32, [V16I])
    add = cgutils.get_or_insert_function(b.module, reduce, "llvm.vector.reduce.add.v16i32")
    total = b.call(add, [b.add(codes[0], codes[1])])
    offset = _I32(-OFFSET[KIND_INT4])
    offset = b.select(b.icmp_signed("==", kind, int_constant(KIND_INT8)), _I32(-OFFSET[KIND_INT8]), offset)
    taken = b.bitcast(b.fneg(b.fmul(b.sitofp(total, F32), scale)), _I32)
    term = b.select(b.icmp_signed("==", kind, int_constant(KIND_INT4M)), taken, b.mul(total, offset))
    b.store(term, b.inttoptr(term_at, ir.PointerType()), align=4)
    emit_store(b, scale, scale_at)


@intrinsic
def quantize_groups(typing: Any, x: Any, groups: Any, record: Any, size: Any, place: Any, kind: Any, fine: Any) -> Any:
    """Quantize `groups` whole groups of 32 float32 at address x for weights of a kind.

    record       address of the first group's record in a panel of `size` tokens, of which this one is number `place`
    kind, fine   of the weights that will read the panel; whether its codes have two planes (not 0) or one
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        x, groups, record, size, place, kind, fine = arguments
        four = b.mul(place, int_constant(4))
        with b.if_else(b.icmp_signed("!=", fine, int_constant(0))) as (two, one):
            for branch, planes, bytes_each in ((two, 2, FINE_BYTES), (one, 1, COARSE_BYTES)):
                with branch, cgutils.for_range(b, groups, intp=I64) as loop:
                    here = b.add(record, b.mul(loop.index, b.mul(size, int_constant(bytes_each))))
                    rows = [
                        b.mul(b.add(place, size) if plane else place, int_constant(GROUP)) for plane in range(planes)
                    ]
                    term = b.add(b.add(here, b.mul(size, int_constant(GROUP * planes))), four)
                    scale = b.add(term, b.mul(size, int_constant(4)))
                    source = b.add(x, b.mul(loop.index, int_constant(2 * _VECTOR)))
                    vectors = [emit_load(b, V16, source), emit_load(b, V16, b.add(source, int_constant(_VECTOR)))]
                    _emit_quantize(b, vectors, [b.add(here, row) for row in rows], term, scale, kind)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


def _emit_activate(b: Builder, x: Value, up: Value, is_silu: Value) -> Value:
    """act(x) * up: silu, or gelu in its tanh form, which is x / (1 + exp(-2 * inner))."""
    cubed = b.fmul(b.fmul(x, x), b.fmul(x, _splat(_GELU_CUBIC)))
    inner = b.fmul(b.fadd(x, cubed), _splat(2.0 * _GELU_INNER))
    exponent = b.fsub(_splat(0.0), b.select(is_silu, x, inner))
    exponent = b.select(b.fcmp_ordered(">", exponent, _splat(_MAX_EXPONENT)), _splat(_MAX_EXPONENT), exponent)
    return b.fmul(b.fdiv(x, b.fadd(_splat(1.0), emit_exp(b, exponent))), up)


@intrinsic
def activate_group(typing: Any, rows: Any, step: Any, size: Any, act: Any, record: Any, kind: Any) -> Any:
    """act(gate) * up of one group of 32 channels of `size` tokens, quantized into their record of a coarse panel.

    rows, step  address of the first token's 32 float32 of the gate, bytes from one token to the next; the 32 of the way
                up follow half a step behind
    kind        as in `quantize_groups`
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        rows, step, size, act, record, kind = arguments
        half = b.lshr(step, int_constant(1))
        is_silu = b.icmp_signed("==", act, int_constant(ACT_SILU))
        # Two short loops: a processor that looks some 400 instructions ahead has several tokens of one in hand.
        with cgutils.for_range(b, size, intp=I64) as loop:
            at = b.add(rows, b.mul(loop.index, step))
            for gate in (at, b.add(at, int_constant(_VECTOR))):
                x, up = emit_load(b, V16, gate), emit_load(b, V16, b.add(gate, half))
                emit_store(b, _emit_activate(b, x, up, is_silu), gate)
        terms = b.add(record, b.mul(size, int_constant(GROUP)))
        with cgutils.for_range(b, size, intp=I64) as loop:
            at = b.add(rows, b.mul(loop.index, step))
            vectors = [emit_load(b, V16, gate) for gate in (at, b.add(at, int_constant(_VECTOR)))]
            codes = b.add(record, b.mul(loop.index, int_constant(GROUP)))
            term = b.add(terms, b.mul(loop.index, int_constant(4)))
            _emit_quantize(b, vectors, [codes], term, b.add(term, b.mul(size, int_constant(4))), kind)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


@intrinsic
def activate_vectors(typing: Any, gate: Any, up: Any, kind: Any, count: Any, vectors: Any, out: Any) -> Any:
    """out = act(gate) * up, `vectors` vectors; outputs from `count` on are 0 (their inputs are read)."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        gate, up, kind, count, vectors, out = arguments
        is_silu = b.icmp_signed("==", kind, int_constant(ACT_SILU))
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.mul(loop.index, int_constant(_VECTOR))
            x, y = emit_load(b, V16, b.add(gate, at)), emit_load(b, V16, b.add(up, at))
            value = _emit_activate(b, x, y, is_silu)
            left = b.sub(count, b.mul(loop.index, int_constant(LANES)))
            inside = emit_lanes_in(b, 0, int_constant(0), _clamp(b, left))
            emit_store(b, b.select(inside, value, _splat(0.0)), b.add(out, at))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


def _clamp(b: Builder, left: Value) -> Value:
    """At least 0 and at most 16, so that it fits the lane index type."""
    left = b.select(b.icmp_signed("<", left, int_constant(0)), int_constant(0), left)
    return b.select(b.icmp_signed(">", left, int_constant(LANES)), int_constant(LANES), left)
