"""Quantization of groups of 32 weights by least squares, 16 rows at a time (each lane is a row).

The method uses only the weights and needs no calibration data. It starts from several initial
scales (and minima). From each it iterates: round the weights to codes, fit the scale to the codes
by least squares, round the scale to float16. It keeps the codes and scale with the smallest error.
Errors are measured with the scale as stored. reference/weights.py is the NumPy equivalent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from kvboost_edge.kernels.integers import V16I, int_constant
from kvboost_edge.kernels.jit import intrinsic
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.linear.weight_formats import FORMATS, GROUP, WeightFormat
from kvboost_edge.kernels.vectors import I64, LANES, V16, emit_fma, emit_load, emit_max, emit_store

__all__ = ["fit_group"]


_LINE = 64
_HALF_MAX = 65504.0
_VHALF = ir.VectorType(ir.HalfType(), LANES)

Value = Any
Builder = Any


class _Sums(NamedTuple):
    error: Value  # sum of (w - stored w)^2
    code: Value  # sum of q; then sums of q * q and w * q
    square: Value
    product: Value


def _splat(value: float) -> ir.Constant:
    return ir.Constant(V16, [value] * LANES)


def _unary(b: Builder, name: str, x: Value) -> Value:
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(V16, [V16]), f"llvm.{name}.v16f32"
    )
    return b.call(function, [x])


def _min(b: Builder, x: Value, y: Value) -> Value:
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def _slot(b: Builder, value: Value | float) -> Value:
    slot = cgutils.alloca_once(b, V16)
    b.store(_splat(value) if isinstance(value, float) else value, slot)
    return slot


def _half(b: Builder, x: Value) -> Value:
    """Round to float16 and clip to its finite range."""
    inside = emit_max(b, _min(b, x, _splat(_HALF_MAX)), _splat(-_HALF_MAX))
    return b.fpext(b.fptrunc(inside, _VHALF), V16)


def _divide(b: Builder, x: Value, y: Value, otherwise: Value) -> Value:
    """Return x / y, or `otherwise` in lanes where y is 0."""
    nonzero = b.fcmp_ordered("!=", y, _splat(0.0))
    return b.select(nonzero, b.fdiv(x, b.select(nonzero, y, _splat(1.0))), otherwise)


def _weights(b: Builder, at: Value, index: Value) -> Value:
    return emit_load(b, V16, b.add(at, b.mul(index, int_constant(_LINE))))


def _code(
    b: Builder, form: WeightFormat, weight: Value, inverse: Value, minimum: Value | None
) -> Value:
    """Return 16 codes as integral floats: rint((weight + minimum) * inverse), clipped."""
    shifted = weight if minimum is None else b.fadd(weight, minimum)
    rounded = _unary(b, "rint", b.fmul(shifted, inverse))
    return emit_max(b, _min(b, rounded, _splat(float(form.highest))), _splat(float(form.lowest)))


def _evaluate(
    b: Builder, form: WeightFormat, at: Value, count: Value, scale: Value, minimum: Value | None
) -> _Sums:
    """Sum the error and moments of a group's codes for a given scale, 16 rows at once.

    Args:
        b: the builder.
        form: the weight format.
        at: address of float32 [count, 16]: a lane is a row.
        count: number of weights in the group, up to 32.
        scale: <16 x float>.
        minimum: <16 x float>, or None without minima.
    """
    slots = [_slot(b, 0.0) for _ in range(4)]
    inverse = _divide(b, _splat(1.0), scale, _splat(0.0))
    minus = b.fneg(scale)
    with cgutils.for_range(b, count, intp=I64) as loop:
        weight = _weights(b, at, loop.index)
        code = _code(b, form, weight, inverse, minimum)
        shifted = weight if minimum is None else b.fadd(weight, minimum)
        off = emit_fma(b, minus, code, shifted)
        error, total, square, product = (b.load(slot) for slot in slots)
        b.store(emit_fma(b, off, off, error), slots[0])
        b.store(b.fadd(total, code), slots[1])
        b.store(emit_fma(b, code, code, square), slots[2])
        b.store(emit_fma(b, weight, code, product), slots[3])
    return _Sums(*(b.load(slot) for slot in slots))


class _Extent(NamedTuple):
    largest: Value  # first weight with the largest magnitude
    low: Value
    high: Value
    total: Value
    energy: Value


def _extent(b: Builder, at: Value, count: Value) -> _Extent:
    """Return the range, sum and sum of squares of a group's weights, 16 rows at once."""
    first = _weights(b, at, int_constant(0))
    largest, low, high, total, energy = slots = [
        _slot(b, 0.0),
        _slot(b, first),
        _slot(b, first),
        _slot(b, 0.0),
        _slot(b, 0.0),
    ]
    with cgutils.for_range(b, count, intp=I64) as loop:
        weight = _weights(b, at, loop.index)
        top = b.load(largest)
        larger = b.fcmp_ordered(">", _unary(b, "fabs", weight), _unary(b, "fabs", top))
        b.store(b.select(larger, weight, top), largest)
        b.store(_min(b, weight, b.load(low)), low)
        b.store(emit_max(b, weight, b.load(high)), high)
        b.store(b.fadd(b.load(total), weight), total)
        b.store(emit_fma(b, weight, weight, b.load(energy)), energy)
    return _Extent(*(b.load(slot) for slot in slots))


def _fitted(
    b: Builder, sums: _Sums, extent: _Extent, scale: Value, count: Value, minima: bool
) -> tuple[Value, Value | None]:
    """Return the scale and minimum with the least squared error for given codes.

    The scale is unchanged in rows whose codes do not determine it.
    """
    if not minima:
        return _divide(b, sums.product, sums.square, scale), None
    n = cgutils.alloca_once(b, V16)
    b.store(_broadcast(b, b.sitofp(count, ir.FloatType())), n)
    number = b.load(n)
    spread = b.fsub(b.fmul(number, sums.square), b.fmul(sums.code, sums.code))
    covariance = b.fsub(b.fmul(number, sums.product), b.fmul(sums.code, extent.total))
    slope = _divide(b, covariance, spread, scale)
    return slope, b.fdiv(b.fsub(b.fmul(slope, sums.code), extent.total), number)


def _broadcast(b: Builder, scalar: Value) -> Value:
    first = b.insert_element(ir.Constant(V16, ir.Undefined), scalar, ir.IntType(32)(0))
    return b.shuffle_vector(first, first, ir.Constant(V16I, [0] * LANES))


def _first(
    b: Builder, form: WeightFormat, delta: float, extent: _Extent
) -> tuple[Value, Value | None]:
    if not form.minima:
        return b.fdiv(extent.largest, _splat(-(form.offset + delta))), None
    scale = b.fdiv(b.fsub(extent.high, extent.low), _splat(form.highest + delta))
    return scale, b.fsub(b.fmul(scale, _splat(-delta / 2)), extent.low)


class _Best(NamedTuple):
    """Stack slots for the best result so far and for the next candidate."""

    error: Value
    scale: Value
    minimum: Value
    next_scale: Value
    next_minimum: Value


def _search(b: Builder, form: WeightFormat, at: Value, count: Value, extent: _Extent) -> _Best:
    """Search for the scale and minimum with the least squared error.

    From each initial scale of the format's fit, the search repeats two steps a few times: quantize,
    then fit the scale and minimum to the codes.
    """
    fit = form.fit
    assert fit is not None
    minima = form.minima
    best = _Best(_slot(b, float("inf")), *(_slot(b, 0.0) for _ in range(4)))
    for delta in fit.deltas:
        scale, minimum = _first(b, form, delta, extent)
        b.store(scale, best.next_scale)
        if minimum is not None:
            b.store(minimum, best.next_minimum)
        with cgutils.for_range(b, int_constant(fit.rounds), intp=I64):
            scale = _half(b, b.load(best.next_scale))
            minimum = _half(b, b.load(best.next_minimum)) if minima else None
            sums = _evaluate(b, form, at, count, scale, minimum)
            better = b.fcmp_ordered("<", sums.error, b.load(best.error))
            b.store(b.select(better, sums.error, b.load(best.error)), best.error)
            b.store(b.select(better, scale, b.load(best.scale)), best.scale)
            scale, fitted = _fitted(b, sums, extent, scale, count, minima)
            b.store(scale, best.next_scale)
            if minimum is not None and fitted is not None:
                b.store(b.select(better, minimum, b.load(best.minimum)), best.minimum)
                b.store(fitted, best.next_minimum)
    return best


def _store_codes(b: Builder, form: WeightFormat, at: Value, best: _Best, out: Value) -> None:
    """Store codes in quads: byte 4 * row + i of a line is the code of input i of the quad."""
    scale = b.load(best.scale)
    minimum = b.load(best.minimum) if form.minima else None
    inverse = _divide(b, _splat(1.0), scale, _splat(0.0))
    quads = []
    for quad in range(GROUP // 4):
        word = None
        for place in range(4):
            code = _code(b, form, _weights(b, at, int_constant(4 * quad + place)), inverse, minimum)
            byte = b.add(b.fptosi(code, V16I), ir.Constant(V16I, [form.offset] * LANES))
            byte = b.shl(byte, ir.Constant(V16I, [8 * place] * LANES))
            word = byte if word is None else b.or_(word, byte)
        quads.append(word)
    if form.bits == 4:
        four = ir.Constant(V16I, [4] * LANES)
        quads = [
            b.or_(low, b.shl(high, four)) for low, high in zip(quads[::2], quads[1::2], strict=True)
        ]
    for index, line in enumerate(quads):
        b.store(
            line, b.inttoptr(b.add(out, int_constant(_LINE * index)), ir.PointerType()), align=1
        )


def _store_half(b: Builder, value: Value, at: Value) -> None:
    b.store(b.fptrunc(value, _VHALF), b.inttoptr(at, ir.PointerType()), align=2)


def _add_to(b: Builder, value: Value, at: Value) -> None:
    emit_store(b, b.fadd(emit_load(b, V16, at), value), at)


def _fit_group(form: WeightFormat) -> Any:
    @intrinsic
    def fit(
        typing: Any, values: Any, count: Any, codes: Any, scales: Any, minima: Any, totals: Any
    ) -> Any:
        """Quantize one group of 16 rows.

        Args:
            values: address of float32 [32, 16], 0 from input `count` on.
            count: number of inputs in the group, 1 to 32.
            codes: address of the group's lines, written.
            scales: address of float16 [16], written.
            minima: address of float16 [16], written if the format has minima.
            totals: address of float32 [2, 16]; the squared error and the squared weights are added.
        """

        def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
            values, count, codes, scales, minima, totals = arguments
            extent = _extent(b, values, count)
            best = _search(b, form, values, count, extent)
            _store_codes(b, form, values, best, codes)
            _store_half(b, b.load(best.scale), scales)
            if form.minima:
                _store_half(b, b.load(best.minimum), minima)
            _add_to(b, b.load(best.error), totals)
            _add_to(b, extent.energy, b.add(totals, int_constant(_LINE)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return fit


fit_group = {name: _fit_group(form) for name, form in FORMATS.items() if form.fit is not None}
"""Format name -> the intrinsic that quantizes a group."""
