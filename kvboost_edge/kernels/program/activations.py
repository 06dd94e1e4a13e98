"""MLP activations on vectors of 16 lanes: act(gate) * up, or act(up) for MLPs without a gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from kvboost_edge.kernels.integers import int_constant
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.vectors import (
    I64,
    LANES,
    V16,
    emit_exp,
    emit_lanes_in,
    emit_load,
    emit_store,
)

__all__ = [
    "ACT_CLAMPED_SWIGLU",
    "ACT_GATED_RELU2",
    "ACT_GELU_TANH",
    "ACT_RELU2",
    "ACT_SIGMOID",
    "ACT_SILU",
    "activate_vectors",
    "emit_activate",
    "emit_silu",
    "matrices_in",
]

ACT_SILU, ACT_GELU_TANH, ACT_CLAMPED_SWIGLU, ACT_SIGMOID, ACT_RELU2, ACT_GATED_RELU2 = range(6)
_VECTOR = 4 * LANES
_GELU_INNER = 0.7978845608028654
_GELU_CUBIC = 0.044715
_SWIGLU_ALPHA = 1.702
_SWIGLU_LIMIT = 7.0
_MAX_EXPONENT = 88.0

Value = Any
Builder = Any


def _splat(value: float) -> ir.Constant:
    return ir.Constant(V16, [value] * LANES)


@kernel
def matrices_in(act: int) -> Any:
    """Return how many input matrices an MLP with this activation has: 2 (gate and up) or 1 (up)."""
    return 1 if act == ACT_RELU2 else 2


def _emit_limit(b: Builder, x: Value, limit: float) -> Value:
    """Clip at a limit: an upper limit if positive, a lower limit if negative; NaN stays NaN."""
    return b.select(b.fcmp_ordered(">" if limit > 0 else "<", x, _splat(limit)), _splat(limit), x)


def emit_activate(b: Builder, x: Value, up: Value, act: Value) -> Value:
    """Return act(x) * up, for an activation that is selected at run time.

    - ACT_SILU: x / (1 + exp(-x)) * up.
    - ACT_GELU_TANH: the tanh form of GELU, computed as x / (1 + exp(-2 * inner)), times up.
    - ACT_CLAMPED_SWIGLU: x / (1 + exp(-1.702 * x)) * (up + 1), with x <= 7 and -7 <= up <= 7
      (gpt-oss).
    - ACT_SIGMOID: 1 / (1 + exp(-x)) * up.
    - ACT_RELU2: max(x, 0) squared; `up` is ignored.
    - ACT_GATED_RELU2: max(x, 0) squared, times up.
    """
    is_squared, is_gated_square = (
        b.icmp_signed("==", act, int_constant(kind)) for kind in (ACT_RELU2, ACT_GATED_RELU2)
    )
    factor = up
    raw = x
    kinds = (ACT_SILU, ACT_CLAMPED_SWIGLU, ACT_SIGMOID)
    is_silu, is_clamped, is_sigmoid = (
        b.icmp_signed("==", act, int_constant(kind)) for kind in kinds
    )
    is_silu = b.or_(is_silu, is_sigmoid)
    x = b.select(is_clamped, _emit_limit(b, x, _SWIGLU_LIMIT), x)
    both = _emit_limit(b, _emit_limit(b, up, _SWIGLU_LIMIT), -_SWIGLU_LIMIT)
    up = b.select(is_clamped, b.fadd(both, _splat(1.0)), up)
    cubed = b.fmul(b.fmul(x, x), b.fmul(x, _splat(_GELU_CUBIC)))
    inner = b.fmul(b.fadd(x, cubed), _splat(2.0 * _GELU_INNER))
    inner = b.select(is_clamped, b.fmul(x, _splat(_SWIGLU_ALPHA)), inner)
    one_and_power = _emit_one_and_power(b, b.select(is_silu, x, inner))
    gated = b.fmul(b.fdiv(b.select(is_sigmoid, _splat(1.0), x), one_and_power), up)
    above = b.select(b.fcmp_ordered("<", raw, _splat(0.0)), _splat(0.0), raw)
    square = b.fmul(above, above)
    gated = b.select(is_gated_square, b.fmul(square, factor), gated)
    return b.select(is_squared, square, gated)


def _emit_one_and_power(b: Builder, x: Value) -> Value:
    """Return 1 + exp(-x)."""
    exponent = b.fsub(_splat(0.0), x)
    exponent = b.select(
        b.fcmp_ordered(">", exponent, _splat(_MAX_EXPONENT)), _splat(_MAX_EXPONENT), exponent
    )
    return b.fadd(_splat(1.0), emit_exp(b, exponent))


def emit_silu(b: Builder, x: Value) -> Value:
    """Return x / (1 + exp(-x)) for 16 lanes, bit-identical to ACT_SILU."""
    return b.fdiv(x, _emit_one_and_power(b, x))


@intrinsic
def activate_vectors(
    typing: Any, gate: Any, up: Any, kind: Any, count: Any, vectors: Any, out: Any
) -> Any:
    """Set out = act(gate) * up for `vectors` vectors of float32.

    Args:
        gate: address of float32 [16 * vectors].
        up: address of float32 [16 * vectors].
        kind: the activation, an ACT_* number.
        count: number of outputs to keep. Later outputs are set to 0, but their inputs are still
            read.
        vectors: number of vectors.
        out: address of float32 [16 * vectors], written; may be `gate`.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        gate, up, kind, count, vectors, out = arguments
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.mul(loop.index, int_constant(_VECTOR))
            x = emit_load(b, V16, b.add(gate, at))
            y = emit_load(b, V16, b.add(up, at))
            value = emit_activate(b, x, y, kind)
            left = b.sub(count, b.mul(loop.index, int_constant(LANES)))
            inside = emit_lanes_in(b, 0, int_constant(0), _clamp(b, left))
            emit_store(b, b.select(inside, value, _splat(0.0)), b.add(out, at))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


def _clamp(b: Builder, left: Value) -> Value:
    """Clip an index to 0..16, so it fits the type of a lane index."""
    left = b.select(b.icmp_signed("<", left, int_constant(0)), int_constant(0), left)
    return b.select(b.icmp_signed(">", left, int_constant(LANES)), int_constant(LANES), left)
