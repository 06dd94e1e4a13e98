"""Microkernels of the linear layers: one tile of 16 output rows against 1, 2, 4 or 8 tokens.

A lane is an output row, so there is no horizontal sum. Integer formats: the sum over a group of 32 inputs is exact,
and groups are added in order by one float epilogue; float formats: one fma chain per output in input order. Either
way an output depends on its own row and token only, not on how many tokens share the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from kvboost_edge.kernels.jit import intrinsic
from kvboost_edge.kernels.linear_dot import V16I, dot_form, emit_dot, emit_load_bytes, emit_splat_int, int_constant
from kvboost_edge.kernels.vectors import (
    F32,
    I64,
    KIND_BF16,
    KIND_F16,
    KIND_F32,
    LANES,
    V16,
    emit_fma,
    emit_load,
    emit_load_as_f32,
    emit_prefetch,
    emit_splat,
    emit_store,
)

__all__ = ["GROUP", "KIND_INT4", "KIND_INT8", "TOKENS", "float_tile", "int_tile"]

KIND_INT8, KIND_INT4 = 3, 4
GROUP = 32
TOKENS = (1, 2, 4, 8)
_QUADS = GROUP // 4
_LINE = 64
# Stored weights are unsigned: the signed weight plus this. The sum over a group starts at -offset * sum(x).
_OFFSET = {KIND_INT8: 128, KIND_INT4: 8}
# Bytes ahead of the reading point; measured from DRAM. Larger batches reuse a tile from the cache instead.
_AHEAD = 4096

Value = Any
Builder = Any
_I32 = ir.IntType(32)


def _load_i32(b: Builder, address: Value) -> Value:
    return b.load(b.inttoptr(address, ir.PointerType()), align=4, typ=_I32)


def _slots(b: Builder, count: int) -> list[Value]:
    slots = [cgutils.alloca_once(b, V16) for _ in range(count)]
    for slot in slots:
        b.store(ir.Constant(V16, [0.0] * LANES), slot)
    return slots


def _load_quads(b: Builder, kind: int, at: Value) -> list[Value]:
    """The 8 quads of a group as unsigned bytes, <16 x i32> each."""
    if kind == KIND_INT8:
        return [emit_load_bytes(b, b.add(at, int_constant(_LINE * quad))) for quad in range(_QUADS)]
    mask = ir.Constant(V16I, [0x0F0F0F0F] * LANES)
    four = ir.Constant(V16I, [4] * LANES)
    quads = []
    for line in range(_QUADS // 2):
        both = emit_load_bytes(b, b.add(at, int_constant(_LINE * line)))
        quads += [b.and_(both, mask), b.and_(b.lshr(both, four), mask)]
    return quads


def _emit_epilogue(b: Builder, sums: Sequence[Value], arguments: Sequence[Value]) -> None:
    """Add the bias, then store, or add to what is there: out = out + factor * result."""
    out, out_step, bias, factor, add = arguments
    has_bias = b.icmp_signed("!=", bias, int_constant(0))
    factors = emit_splat(b, factor)
    for token, slot in enumerate(sums):
        with b.if_then(has_bias):
            b.store(b.fadd(b.load(slot), emit_load(b, V16, bias)), slot)
        place = b.add(out, b.mul(out_step, int_constant(token)))
        with b.if_else(b.icmp_signed("!=", add, int_constant(0))) as (adds, stores):
            with adds:
                emit_store(b, emit_fma(b, b.load(slot), factors, emit_load(b, V16, place)), place)
            with stores:
                emit_store(b, b.fmul(b.load(slot), factors), place)


def _emit_int_tile(b: Builder, arguments: Sequence[Value], kind: int, tokens: int) -> None:
    weights, scales, groups, inputs, input_step, input_scales, input_sums, scale_step = arguments[:8]
    form = dot_form()
    group_bytes = _QUADS * _LINE // (1 if kind == KIND_INT8 else 2)
    sums = _slots(b, tokens)
    with cgutils.for_range(b, groups, intp=I64) as loop:
        at = b.add(weights, b.mul(loop.index, int_constant(group_bytes)))
        if tokens <= 2:
            for line in range(group_bytes // _LINE):
                emit_prefetch(b, b.add(at, int_constant(_AHEAD + _LINE * line)))
        quads = _load_quads(b, kind, at)
        row_scales = emit_load_as_f32(b, KIND_F16, b.add(scales, b.mul(loop.index, int_constant(2 * LANES))))
        for token in range(tokens):
            place = b.add(b.mul(scale_step, int_constant(token)), b.mul(loop.index, int_constant(4)))
            start = b.mul(_load_i32(b, b.add(input_sums, place)), _I32(-_OFFSET[kind]))
            dots = emit_splat_int(b, start)
            here = b.add(b.add(inputs, b.mul(input_step, int_constant(token))), b.mul(loop.index, int_constant(GROUP)))
            for quad in range(_QUADS):
                four = emit_splat_int(b, _load_i32(b, b.add(here, int_constant(4 * quad))))
                dots = emit_dot(b, form, dots, quads[quad], four)
            scale = emit_splat(b, emit_load(b, F32, b.add(input_scales, place)))
            scaled = b.fmul(b.sitofp(dots, V16), scale)
            b.store(emit_fma(b, scaled, row_scales, b.load(sums[token])), sums[token])
    _emit_epilogue(b, sums, arguments[8:])


def _emit_float_tile(b: Builder, arguments: Sequence[Value], kind: int, tokens: int) -> None:
    weights, num_inputs, inputs, input_step = arguments[:4]
    size = 4 if kind == KIND_F32 else 2
    sums = _slots(b, tokens)
    with cgutils.for_range(b, num_inputs, intp=I64) as loop:
        row = emit_load_as_f32(b, kind, b.add(weights, b.mul(loop.index, int_constant(size * LANES))))
        at = b.add(inputs, b.mul(loop.index, int_constant(4)))
        for token in range(tokens):
            value = emit_load(b, F32, b.add(at, b.mul(input_step, int_constant(token))))
            b.store(emit_fma(b, row, emit_splat(b, value), b.load(sums[token])), sums[token])
    _emit_epilogue(b, sums, arguments[4:])


def _int_tile(kind: int, tokens: int) -> Any:
    @intrinsic
    def tile(
        typing: Any,
        weights: Any,
        scales: Any,
        groups: Any,
        inputs: Any,
        input_step: Any,
        input_scales: Any,
        input_sums: Any,
        scale_step: Any,
        out: Any,
        out_step: Any,
        bias: Any,
        factor: Any,
        add: Any,
    ) -> Any:
        """out[token, 16 rows] from a tile of quantized weights and quantized tokens.

        weights, scales           addresses of the tile: `groups` groups of quads, of 16 float16
        inputs, input_step        int8 [tokens, groups * 32], bytes from one token to the next
        input_scales, input_sums  float32 and int32 [tokens, groups], both `scale_step` bytes a token
        out, out_step             float32 [tokens, 16], bytes from one token to the next
        bias                      address of float32 [16], or 0
        factor, add               out = factor * result, or out += factor * result where add is not 0
        """

        def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
            _emit_int_tile(b, arguments, kind, tokens)
            return context.get_dummy_value()

        i, f = types.int64, types.float32
        return types.void(i, i, i, i, i, i, i, i, i, i, i, f, i), codegen

    return tile


def _float_tile(kind: int, tokens: int) -> Any:
    @intrinsic
    def tile(
        typing: Any,
        weights: Any,
        num_inputs: Any,
        inputs: Any,
        input_step: Any,
        out: Any,
        out_step: Any,
        bias: Any,
        factor: Any,
        add: Any,
    ) -> Any:
        """out[token, 16 rows] from a tile of float weights [num_inputs, 16] and float32 tokens; else as `int_tile`."""

        def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
            _emit_float_tile(b, arguments, kind, tokens)
            return context.get_dummy_value()

        i, f = types.int64, types.float32
        return types.void(i, i, i, i, i, i, i, f, i), codegen

    return tile


int_tile = {(kind, tokens): _int_tile(kind, tokens) for kind in (KIND_INT8, KIND_INT4) for tokens in TOKENS}
float_tile = {(kind, tokens): _float_tile(kind, tokens) for kind in (KIND_F32, KIND_BF16) for tokens in TOKENS}
