"""Loads of codes and scales of the integer kinds from where layout.py says they lie."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kvboost_edge.kernels.integers import V16I, emit_load_bytes, int_constant
from kvboost_edge.kernels.linear.dot import (
    BLOCK_KINDS,
    CODE_BITS,
    GROUP,
    KIND_INT4_ASYM,
    KIND_INT8,
    KIND_Q6K,
)
from kvboost_edge.kernels.linear.layout import (
    BLOCK_GROUPS,
    PARTS,
    SCALE_BYTES,
    has_minima,
    high_shift,
    minima_bytes,
)
from kvboost_edge.kernels.vectors import KIND_F16, LANES, V16, emit_load_as_f32

__all__ = ["emit_load_pair", "emit_scales"]

_LINE = 64
_LINES = GROUP // 8  # of nibbles in a group

Value = Any
Builder = Any


def _at(b: Builder, address: Value, index: Value, size: int) -> Value:
    return b.add(address, b.mul(index, int_constant(size)))


def emit_load_pair(b: Builder, kind: int, at: Value, pair: int) -> tuple[Value, Value]:
    """Quads 2 * pair and 2 * pair + 1 of a group, or of the part of one at address `at`, as unsigned bytes, <16 x i32>
    each."""
    if kind == KIND_INT8:
        first = b.add(at, int_constant(2 * _LINE * pair))
        return emit_load_bytes(b, first), emit_load_bytes(b, b.add(first, int_constant(_LINE)))
    both = emit_load_bytes(b, b.add(at, int_constant(_LINE * pair)))
    mask, four = ir.Constant(V16I, [0x0F0F0F0F] * LANES), ir.Constant(V16I, [4] * LANES)
    low, high = b.and_(both, mask), b.and_(b.lshr(both, four), mask)
    if CODE_BITS[kind] == 4:
        return low, high
    above = emit_load_bytes(b, b.add(at, int_constant(_LINE * (_LINES // PARTS[kind]))))
    first, second = (_emit_above(b, kind, above, 2 * pair + index) for index in range(2))
    return b.or_(low, first), b.or_(high, second)


def _emit_above(b: Builder, kind: int, plane: Value, quad: int) -> Value:
    """The bits of a quad's codes above their nibbles, where they stand in the codes."""
    shift, byte = high_shift(kind, quad), 0x30 if kind == KIND_Q6K else 0x10
    by = ir.Constant(V16I, [abs(shift)] * LANES)
    moved = b.shl(plane, by) if shift < 0 else b.lshr(plane, by) if shift else plane
    return b.and_(moved, ir.Constant(V16I, [byte * 0x01010101] * LANES))


def emit_scales(b: Builder, kind: int, scales: Value, minima: Value, part: Value) -> tuple[Value, Value | None]:
    """Scales of 16 rows, and their minima or None, as float32; `part`: of how many parts of groups (see `PARTS`) those
    of the tile at addresses `scales` and `minima` lie before."""
    if kind not in BLOCK_KINDS:
        low = emit_load_as_f32(b, KIND_F16, _at(b, minima, part, 2 * LANES)) if kind == KIND_INT4_ASYM else None
        return emit_load_as_f32(b, KIND_F16, _at(b, scales, part, 2 * LANES)), low
    at = _at(b, scales, part, SCALE_BYTES // PARTS[kind])
    block = b.udiv(part, int_constant(BLOCK_GROUPS * PARTS[kind]))
    block = _at(b, minima, block, minima_bytes(kind, 1))
    factors = [_emit_bytes_as_f32(b, at, signed=kind == KIND_Q6K)]
    if has_minima(kind):
        factors.append(_emit_bytes_as_f32(b, b.add(at, int_constant(LANES)), signed=False))
    halves = [emit_load_as_f32(b, KIND_F16, b.add(block, int_constant(2 * LANES * i))) for i in range(len(factors))]
    products = [b.fmul(half, factor) for half, factor in zip(halves, factors, strict=True)]
    return products[0], products[1] if has_minima(kind) else None


def _emit_bytes_as_f32(b: Builder, address: Value, *, signed: bool) -> Value:
    """16 bytes as float32."""
    loaded = b.load(b.inttoptr(address, ir.PointerType()), align=1, typ=ir.VectorType(ir.IntType(8), LANES))
    return b.sitofp(b.sext(loaded, V16I) if signed else b.zext(loaded, V16I), V16)
