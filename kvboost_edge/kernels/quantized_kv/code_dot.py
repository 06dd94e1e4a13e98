"""Integer dot product of attention over codes: 16 sums of 4 products of unsigned x signed bytes.

It uses `vpdpbusd` (AVX512-VNNI, AVX-VNNI), `sdot` (ARM dotprod), or widening multiply-adds. All
variants give equal integers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kvboost_edge.kernels.integers import V16I, dot_form, emit_byte_halves, emit_pair_sums
from kvboost_edge.kernels.lazy import cgutils
from kvboost_edge.kernels.vectors import LANES

# There is no variant with `vpmaddubsw` for AVX2. Both operands use their full range (0 to 255 and
# -128 to 127), so the sum of two products does not fit 16 bits.
__all__ = ["coded_dot_form", "emit_dot"]

_I8 = ir.IntType(8)
_I32 = ir.IntType(32)
_V64B = ir.VectorType(_I8, 64)
_V4I = ir.VectorType(_I32, 4)
_V16B = ir.VectorType(_I8, 16)
_V8I = ir.VectorType(_I32, 8)
_V32B = ir.VectorType(_I8, 32)
_V32I = ir.VectorType(_I32, 32)

Value = Any
Builder = Any


def coded_dot_form() -> str:
    """Return this process's dot-product variant: "vnni512", "vnni256", "neon" or "plain"."""
    form = "neon" if dot_form() == "i8mm" else dot_form()
    return form if form in ("vnni512", "vnni256", "neon") else "plain"


def emit_dot(b: Builder, form: str, sums: Value, unsigned: Value, signed: Value) -> Value:
    """Return sums[lane] plus the dot product of the lane's 4 unsigned and 4 signed bytes.

    All three operands are <16 x i32>.
    """
    if form == "vnni512":
        kind = ir.FunctionType(V16I, [V16I, _V64B, _V64B])
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        return b.call(function, [sums, b.bitcast(unsigned, _V64B), b.bitcast(signed, _V64B)])
    if form == "vnni256":
        return _dot_halves(b, sums, unsigned, signed)
    if form == "neon":
        return _dot_quarters(b, sums, unsigned, signed)
    return _dot_plain(b, sums, unsigned, signed)


def _dot_halves(b: Builder, sums: Value, unsigned: Value, signed: Value) -> Value:
    """Emit `vpdpbusd` twice, on vectors of 256 bits."""
    kind = ir.FunctionType(_V8I, [_V8I, _V32B, _V32B])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.vpdpbusd.256")
    undefined = ir.Constant(V16I, ir.Undefined)
    halves = []
    for first in (0, 8):
        order = ir.Constant(_V8I, list(range(first, first + 8)))
        parts = [b.shuffle_vector(x, undefined, order) for x in (sums, unsigned, signed)]
        halves.append(
            b.call(function, [parts[0], b.bitcast(parts[1], _V32B), b.bitcast(parts[2], _V32B)])
        )
    return b.shuffle_vector(halves[0], halves[1], ir.Constant(V16I, list(range(LANES))))


def _dot_quarters(b: Builder, sums: Value, unsigned: Value, signed: Value) -> Value:
    """Emit `sdot`, which takes two signed operands."""
    # Subtract 128 from the codes to make them signed. Adding 64 times the signed bytes twice
    # compensates.
    kind = ir.FunctionType(_V4I, [_V4I, _V16B, _V16B])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.aarch64.neon.sdot.v4i32.v16i8")
    centred = b.bitcast(b.xor(b.bitcast(unsigned, _V64B), ir.Constant(_V64B, [-128] * 64)), V16I)
    undefined = ir.Constant(V16I, ir.Undefined)
    half = ir.Constant(_V16B, [64] * 16)
    quarters = []
    for first in range(0, LANES, 4):
        order = ir.Constant(_V4I, list(range(first, first + 4)))
        state, codes, signs = (
            b.shuffle_vector(x, undefined, order) for x in (sums, centred, signed)
        )
        signs = b.bitcast(signs, _V16B)
        for factor in (b.bitcast(codes, _V16B), half, half):
            state = b.call(function, [state, factor, signs])
        quarters.append(state)
    eight = ir.Constant(_V8I, list(range(8)))
    low, high = (b.shuffle_vector(quarters[i], quarters[i + 1], eight) for i in (0, 2))
    return b.shuffle_vector(low, high, ir.Constant(V16I, list(range(LANES))))


def _dot_plain(b: Builder, sums: Value, unsigned: Value, signed: Value) -> Value:
    """Emit the dot product as 16-bit multiplications of bytes 0 and 2, then bytes 1 and 3."""
    halves = zip(
        emit_byte_halves(b, unsigned, signed=False),
        emit_byte_halves(b, signed, signed=True),
        strict=True,
    )
    if b.module.triple.startswith(("aarch64", "arm64")):
        # A product fits 16 bits (255 * -128 = -32,640), and `saddlp` adds neighbours into 32 bits.
        # This takes 45 instructions instead of 78.
        for x, y in halves:
            sums = b.add(sums, emit_pair_sums(b, b.mul(x, y)))
        return sums
    undefined = ir.Constant(_V32I, ir.Undefined)
    for x, y in halves:
        products = b.mul(b.sext(x, _V32I), b.sext(y, _V32I))
        even = b.shuffle_vector(products, undefined, ir.Constant(V16I, list(range(0, 32, 2))))
        odd = b.shuffle_vector(products, undefined, ir.Constant(V16I, list(range(1, 32, 2))))
        sums = b.add(sums, b.add(even, odd))
    return sums
