"""Row kernels: RMS norm and int8 quantization of activations, in a fixed order of 16 lanes.

Addresses are int64, in bytes. The elements after the last multiple of 16 are processed one by one.
A row is padded with zeros to whole groups of 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from kvboost_edge.kernels.integers import V16I, emit_splat_int, int_constant
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.linear.panel import COARSE_BYTES, FINE_BASE, FINE_BYTES, SEED_BYTES
from kvboost_edge.kernels.linear.weight_formats import (
    FORMAT_OF,
    GROUP,
    HALF_OFFSET,
    TABLE_OFFSET,
)
from kvboost_edge.kernels.program.activations import emit_activate
from kvboost_edge.kernels.vectors import (
    I64,
    LANES,
    V16,
    emit_fma,
    emit_load,
    emit_reduce_rows,
    emit_shuffle,
    emit_splat,
    emit_store,
    fma_f32,
    load_f32,
    store_f32,
)

__all__ = [
    "activate_group",
    "norm_row",
    "quantize_groups",
    "sqrt_f32",
    "sum_squares",
]

_VECTOR = 4 * LANES
# A group whose largest magnitude is below this is quantized to zeros, because its scale would be
# subnormal.
_TINY = 1e-30
_ROUNDER = 12582912.0  # 1.5 * 2^23; see `_emit_quantize`
_ROUNDER_BITS = 0x4B400000
_AT_ONCE = 4  # groups quantized at once
_WITH_SEEDS = [kind for kind, form in FORMAT_OF.items() if form.shares_panel]
_WITH_MINIMA = [kind for kind, form in FORMAT_OF.items() if form.minima]
# The terms of other formats are sums of codes times the offset.
_OFFSETS = {
    kind: form.offset
    for kind, form in FORMAT_OF.items()
    if not (form.is_float or form.minima or form.shares_panel)
}

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
    """Fold 16 lanes to a scalar in the fixed order 8 + 8, 4 + 4, 2 + 2, 1 + 1."""
    for half in (8, 4, 2, 1):
        vector = combine(
            vector,
            emit_shuffle(b, vector, vector, [(lane + half) % LANES for lane in range(LANES)]),
        )
    return b.extract_element(vector, _I32(0))


@intrinsic
def sqrt_f32(typing: Any, x: Any) -> Any:
    """Return the correctly rounded square root of a float32."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        return _unary(b, "sqrt", arguments[0])

    return types.float32(types.float32), codegen


@intrinsic
def _sum_squares_vectors(typing: Any, address: Any, vectors: Any) -> Any:
    """Return the sum of squares of 16 * vectors float32 at an address, in 16 chains and a fold."""

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
    """Return the sum of squares of `count` float32.

    The order is fixed: 16 fma chains, folded 8 + 8, 4 + 4, 2 + 2, 1 + 1, then the remaining
    numbers.
    """
    total = _sum_squares_vectors(address, count // LANES)
    for index in range(count // LANES * LANES, count):
        x = load_f32(address + 4 * index)
        total = fma_f32(x, x, total)
    return total


@intrinsic
def _scale_vectors(typing: Any, x: Any, weight: Any, factor: Any, vectors: Any, out: Any) -> Any:
    """Set out = x * factor * weight for 16 * vectors float32; x, weight and out are addresses."""

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
    """Compute the RMS norm (Zhang and Sennrich, 2019): out = (x / sqrt(mean(x^2) + eps)) * weight.

    Args:
        x: address of float32 [count].
        weight: address of float32 [count].
        count: number of channels.
        eps: added to the mean square.
        out: address of float32 [count], written; may be `x`.
    """
    mean = sum_squares(x, count) / np.float32(count)
    factor = np.float32(1.0) / sqrt_f32(mean + eps)
    _scale_vectors(x, weight, factor, count // LANES, out)
    for index in range(count // LANES * LANES, count):
        store_f32(out + 4 * index, load_f32(x + 4 * index) * factor * load_f32(weight + 4 * index))


class _Panel(NamedTuple):
    """Addresses in a panel for one group of one token.

    Attributes:
        codes: codes of each plane.
        term: the token's term.
        scale: the token's scale.
        seeds: seeds, for formats that share a panel.
    """

    codes: Sequence[Value]
    term: Value
    scale: Value
    seeds: Sequence[Value]


def _emit_codes(b: Builder, codes: Sequence[Value], out: Value) -> None:
    """Store the low bytes of two vectors of 16 int32 as 32 int8."""
    for index, vector in enumerate(codes):
        place = b.inttoptr(b.add(out, int_constant(LANES * index)), ir.PointerType())
        b.store(b.trunc(vector, _V16B), place, align=1)


def _nan_or_max(b: Builder, x: Value, y: Value) -> Value:
    """Return the larger of two non-negative floats given as bits; NaN counts as the largest."""
    return b.select(b.icmp_unsigned(">", x, y), x, y)


def _reduce_lanes(b: Builder, rows: Sequence[Value], combine: Any) -> Value:
    """Reduce 1, 2 or 4 rows with `emit_reduce_rows`; fewer than four rows are repeated."""
    return emit_reduce_rows(b, list(rows) * (4 // len(rows)), combine)


def _emit_quantize(
    b: Builder, groups: Sequence[Sequence[Value]], panels: Sequence[_Panel], kind: Value
) -> None:
    """Quantize 1, 2 or 4 groups of 32 (two vectors each) to codes, a term and a scale.

    With two planes, a code is FINE_BASE * first + second.
    """
    # Quantize four groups at once, because the maximum and the two divisions take as long for four
    # as for one.
    levels = 127.0 if len(panels[0].codes) == 1 else 127.0 * FINE_BASE
    sign = ir.Constant(V16I, [0x7FFFFFFF] * LANES)
    absolute = [[b.and_(b.bitcast(vector, V16I), sign) for vector in group] for group in groups]
    tops = _reduce_lanes(
        b, [_nan_or_max(b, *pair) for pair in absolute], lambda x, y: _nan_or_max(b, x, y)
    )
    top = b.bitcast(tops, V16)
    empty = b.fcmp_ordered("<", top, _splat(_TINY))
    # `top - top` is 0, or NaN if `top` is infinite. The codes must then be 0, because the variants
    # would compute different codes.
    scales = b.select(empty, _splat(0.0), b.fadd(b.fdiv(top, _splat(levels)), b.fsub(top, top)))
    inverses = b.select(empty, _splat(0.0), b.fdiv(_splat(levels), top))
    totals = []
    firsts = []
    for index, (group, panel) in enumerate(zip(groups, panels, strict=True)):
        inverse = emit_shuffle(b, inverses, inverses, [4 * index] * LANES)
        # Adding _ROUNDER rounds to the nearest integer, ties to even, and leaves it in the low
        # bits.
        shifted = [b.fadd(b.fmul(vector, inverse), _splat(_ROUNDER)) for vector in group]
        codes = [b.bitcast(vector, V16I) for vector in shifted]
        if len(panel.codes) == 2:
            codes = _emit_two_planes(b, shifted, panel)
        else:
            _emit_codes(b, codes, panel.codes[0])
        totals.append(b.add(codes[0], codes[1]))
        firsts.append(codes[0])
    rounders = len(panels[0].codes) == 1
    total = _emit_total(b, totals, GROUP * rounders)
    _emit_terms(b, total, scales, panels, kind)
    with b.if_then(_is_one_of(b, kind, _WITH_SEEDS)):
        first = _emit_total(b, firsts, LANES * rounders)
        _emit_seeds(b, first, total, panels)


def _emit_total(b: Builder, rows: Sequence[Value], rounders: int) -> Value:
    """Return each row's lane sum, minus `rounders` times _ROUNDER's bits, in lane 4 * row."""
    total = _reduce_lanes(b, rows, b.add)
    bits = rounders * _ROUNDER_BITS % 2**32
    return (
        b.sub(total, ir.Constant(V16I, [bits - 2**32 * (bits >= 2**31)] * LANES))
        if rounders
        else total
    )


def _is_one_of(b: Builder, kind: Value, kinds: Sequence[int]) -> Value:
    bits = int_constant(sum(1 << one for one in set(kinds)))
    return b.trunc(b.lshr(bits, kind), ir.IntType(1))


def _emit_seeds(b: Builder, first: Value, total: Value, panels: Sequence[_Panel]) -> None:
    """Store the seeds of a group and of its halves.

    Args:
        b: the builder.
        first: sums of the codes of the first half.
        total: sums of the codes of the group.
        panels: target addresses.
    """
    offsets = (HALF_OFFSET, HALF_OFFSET, TABLE_OFFSET)
    for part, (sums, offset) in enumerate(
        zip((first, b.sub(total, first), total), offsets, strict=True)
    ):
        seeds = b.mul(sums, ir.Constant(V16I, [-offset] * LANES))
        for index, panel in enumerate(panels):
            place = b.inttoptr(panel.seeds[part], ir.PointerType())
            b.store(b.extract_element(seeds, _I32(4 * index)), place, align=4)


def _emit_two_planes(b: Builder, shifted: Sequence[Value], panel: _Panel) -> list[Value]:
    """Store 16-bit codes as two planes of bytes, and return the codes as integers."""
    base = ir.Constant(V16I, [FINE_BASE] * LANES)
    rounded = [b.fsub(vector, _splat(_ROUNDER)) for vector in shifted]
    codes = [b.fptosi(vector, V16I) for vector in rounded]
    high = [
        b.fptosi(_unary(b, "rint", b.fmul(vector, _splat(1.0 / FINE_BASE))), V16I)
        for vector in rounded
    ]
    _emit_codes(b, high, panel.codes[0])
    _emit_codes(
        b,
        [b.sub(code, b.mul(first, base)) for code, first in zip(codes, high, strict=True)],
        panel.codes[1],
    )
    return codes


def _emit_terms(
    b: Builder, total: Value, scales: Value, panels: Sequence[_Panel], kind: Value
) -> None:
    """Store the terms and scales.

    Args:
        b: the builder.
        total: sums of each group's codes, in lanes 4 * group.
        scales: scales of each group, in the same lanes.
        panels: target addresses.
        kind: number of the weight format that reads the panel.
    """
    offset = _I32(0)
    for one, value in _OFFSETS.items():
        is_one = b.icmp_signed("==", kind, int_constant(one))
        offset = b.select(is_one, _I32(-value), offset)
    taken = b.bitcast(b.fneg(b.fmul(b.sitofp(total, V16), scales)), V16I)
    minima = _is_one_of(b, kind, [*_WITH_MINIMA, *_WITH_SEEDS])
    terms = b.select(minima, taken, b.mul(total, emit_splat_int(b, offset)))
    for index, panel in enumerate(panels):
        lane = _I32(4 * index)
        b.store(b.extract_element(terms, lane), b.inttoptr(panel.term, ir.PointerType()), align=4)
        emit_store(b, b.extract_element(scales, lane), panel.scale)


class _PanelRow(NamedTuple):
    """One token's row in a panel; see `quantize_groups` for the fields."""

    cell: Value
    size: Value
    place: Value
    planes: int
    kind: Value

    def at(self, b: Builder, group: Value) -> _Panel:
        """Return the addresses for one group."""
        plain = FINE_BYTES if self.planes == 2 else COARSE_BYTES
        has_seeds = _is_one_of(b, self.kind, _WITH_SEEDS)
        more = b.select(has_seeds, int_constant(SEED_BYTES), int_constant(0))
        here = b.add(self.cell, b.mul(group, b.mul(self.size, b.add(int_constant(plain), more))))
        rows = [self.place, b.add(self.place, self.size)][: self.planes]
        codes = [b.add(here, b.mul(row, int_constant(GROUP))) for row in rows]
        behind = b.add(
            b.mul(self.size, int_constant(GROUP * self.planes)), b.mul(self.place, int_constant(4))
        )
        term, scale, *seeds = (
            b.add(b.add(here, behind), b.mul(self.size, int_constant(4 * index)))
            for index in range(5)
        )
        return _Panel(codes, term, scale, seeds)


def _emit_row_groups(
    b: Builder, x: Value, first: Value, count: int, row: _PanelRow, kind: Value
) -> None:
    """Quantize `count` groups of a token's float32 at address x, starting at group `first`."""
    start = b.add(x, b.mul(first, int_constant(2 * _VECTOR)))
    places = [b.add(start, int_constant(_VECTOR * index)) for index in range(2 * count)]
    vectors = [emit_load(b, V16, place) for place in places]
    groups = [vectors[2 * index : 2 * index + 2] for index in range(count)]
    _emit_quantize(
        b, groups, [row.at(b, b.add(first, int_constant(index))) for index in range(count)], kind
    )


@intrinsic
def quantize_groups(
    typing: Any, x: Any, groups: Any, cell: Any, size: Any, place: Any, kind: Any, fine: Any
) -> Any:
    """Quantize whole groups of 32 float32 of one token into a panel.

    Args:
        x: address of float32 [32 * groups].
        groups: number of groups.
        cell: address of the first group's cell, in a panel of `size` tokens.
        size: tokens of the panel.
        place: index of this token in the panel.
        kind: number of the weight format that reads the panel.
        fine: nonzero if codes have two planes.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        x, groups, cell, size, place, kind, fine = arguments
        whole = b.and_(groups, int_constant(-_AT_ONCE))
        with b.if_else(b.icmp_signed("!=", fine, int_constant(0))) as (two, one):
            for branch, planes in ((two, 2), (one, 1)):
                with branch:
                    row = _PanelRow(cell, size, place, planes, kind)
                    with cgutils.for_range_slice(
                        b, int_constant(0), whole, int_constant(_AT_ONCE), I64
                    ) as (index, _):
                        _emit_row_groups(b, x, index, _AT_ONCE, row, kind)
                    with cgutils.for_range_slice(b, whole, groups, int_constant(1), I64) as (
                        index,
                        _,
                    ):
                        _emit_row_groups(b, x, index, 1, row, kind)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


@intrinsic
def activate_group(
    typing: Any, rows: Any, step: Any, size: Any, act: Any, cell: Any, kind: Any
) -> Any:
    """Compute act(gate) * up for 32 channels of `size` tokens and quantize the result into a cell.

    Args:
        rows: address of the first token's 32 gate values (float32). The values of the up projection
            follow after step / 2 bytes.
        step: bytes from one token to the next.
        size: tokens of the panel.
        act: the activation, an ACT_* number.
        cell: address of the cell, which has one plane of codes.
        kind: number of the weight format that reads the panel.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        rows, step, size, act, cell, kind = arguments
        half = b.lshr(step, int_constant(1))
        # Use two short loops, because a processor with an instruction window of about 400 can then
        # overlap several tokens of one loop.
        with cgutils.for_range(b, size, intp=I64) as loop:
            at = b.add(rows, b.mul(loop.index, step))
            for gate in (at, b.add(at, int_constant(_VECTOR))):
                x = emit_load(b, V16, gate)
                up = emit_load(b, V16, b.add(gate, half))
                emit_store(b, emit_activate(b, x, up, act), gate)
        even = b.and_(size, int_constant(-2))
        for first, end, count in ((int_constant(0), even, 2), (even, size, 1)):
            with cgutils.for_range_slice(b, first, end, int_constant(count), I64) as (token, _):
                tokens = [b.add(token, int_constant(index)) for index in range(count)]
                starts = [b.add(rows, b.mul(token, step)) for token in tokens]
                groups = [
                    [emit_load(b, V16, b.add(at, int_constant(o))) for o in (0, _VECTOR)]
                    for at in starts
                ]
                panels = [
                    _PanelRow(cell, size, token, 1, kind).at(b, int_constant(0)) for token in tokens
                ]
                _emit_quantize(b, groups, panels, kind)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen
