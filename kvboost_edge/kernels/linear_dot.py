"""The integer dot product of the linear kernels: 16 sums of 4 products of an unsigned and a signed byte.

Three forms that give the same integers: 512-bit VNNI, 256-bit VNNI, and plain vectors that LLVM turns into widening
multiply-adds. Which one is compiled is decided by the feature flags that Numba compiles for.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
from llvmlite import binding, ir
from numba.core import cgutils

from kvboost_edge.kernels.vectors import I64, LANES

__all__ = ["V16I", "V64B", "dot_form", "emit_dot", "emit_load_bytes", "emit_splat_int"]

I8, I16, I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
V16I = ir.VectorType(I32, LANES)
V64B = ir.VectorType(I8, 64)
_V8I, _V32B = ir.VectorType(I32, 8), ir.VectorType(I8, 32)
_V32S, _V32I = ir.VectorType(I16, 32), ir.VectorType(I32, 32)
_POINTER = ir.PointerType()

Value = Any
Builder = Any


@functools.cache
def _features() -> frozenset[str]:
    """Feature flags Numba compiles for: its own setting, or the host's."""
    text = numba.config.CPU_FEATURES
    if text is not None:
        return frozenset(flag[1:] for flag in text.split(",") if flag.startswith("+"))
    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)


def dot_form() -> str:
    """ "vnni512", "vnni256" or "plain": the form that kernels of this process use."""
    features = _features()
    if {"avx512vnni", "avx512bw", "avx512f"} <= features:
        return "vnni512"
    if "avxvnni" in features or {"avx512vnni", "avx512vl"} <= features:
        return "vnni256"
    return "plain"


def emit_load_bytes(b: Builder, address: Value) -> Value:
    """64 bytes as <16 x i32>."""
    return b.load(b.inttoptr(address, _POINTER), align=4, typ=V16I)


def emit_splat_int(b: Builder, scalar: Value) -> Value:
    """An i32 in every one of 16 lanes."""
    undefined = ir.Constant(V16I, ir.Undefined)
    return b.shuffle_vector(b.insert_element(undefined, scalar, I32(0)), undefined, ir.Constant(V16I, [0] * LANES))


def emit_dot(b: Builder, form: str, sums: Value, unsigned: Value, signed: Value) -> Value:
    """sums[lane] + the products of the lane's 4 unsigned and 4 signed bytes; all three are <16 x i32>."""
    if form == "vnni512":
        kind = ir.FunctionType(V16I, [V16I, V64B, V64B])
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        return b.call(function, [sums, b.bitcast(unsigned, V64B), b.bitcast(signed, V64B)])
    if form == "vnni256":
        return _dot_halves(b, sums, unsigned, signed)
    return _dot_plain(b, sums, unsigned, signed)


def _dot_halves(b: Builder, sums: Value, unsigned: Value, signed: Value) -> Value:
    kind = ir.FunctionType(_V8I, [_V8I, _V32B, _V32B])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.vpdpbusd.256")
    undefined = ir.Constant(V16I, ir.Undefined)
    halves = []
    for first in (0, 8):
        order = ir.Constant(_V8I, list(range(first, first + 8)))
        parts = [b.shuffle_vector(x, undefined, order) for x in (sums, unsigned, signed)]
        halves.append(b.call(function, [parts[0], b.bitcast(parts[1], _V32B), b.bitcast(parts[2], _V32B)]))
    return b.shuffle_vector(halves[0], halves[1], ir.Constant(V16I, list(range(LANES))))


def _dot_plain(b: Builder, sums: Value, unsigned: Value, signed: Value) -> Value:
    """Bytes 0 and 2 of each lane, then 1 and 3, as 16-bit numbers; each pair is a widening multiply-add."""
    eight = ir.Constant(_V32S, [8] * 32)
    low_mask = ir.Constant(_V32S, [255] * 32)
    u, s = b.bitcast(unsigned, _V32S), b.bitcast(signed, _V32S)
    pairs = ((b.and_(u, low_mask), b.ashr(b.shl(s, eight), eight)), (b.lshr(u, eight), b.ashr(s, eight)))
    undefined = ir.Constant(_V32I, ir.Undefined)
    for x, y in pairs:
        products = b.mul(b.sext(x, _V32I), b.sext(y, _V32I))
        even = b.shuffle_vector(products, undefined, ir.Constant(V16I, list(range(0, 32, 2))))
        odd = b.shuffle_vector(products, undefined, ir.Constant(V16I, list(range(1, 32, 2))))
        sums = b.add(sums, b.add(even, odd))
    return sums


def int_constant(value: int) -> ir.Constant:
    """An i64 constant."""
    return ir.Constant(I64, value)
