"""Short convolutions along a sequence, channel by channel, with the last inputs of the pass before.

A unit is a run of channels of one sequence. Results take the place of what they are made of, so rows go from the last
to the first, and the inputs that are kept for the next pass are copied before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.core import cgutils, types

from kvboost_edge.kernels.attention.rope import copy_floats
from kvboost_edge.kernels.integers import int_constant
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.program import sequences as ls
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.norms import emit_silu
from kvboost_edge.kernels.program.table import ProgramJob
from kvboost_edge.kernels.program.tiles import SCRATCH_BYTES, tile_scratch
from kvboost_edge.kernels.vectors import F32, I64, LANES, V16, emit_fma, emit_load, emit_splat, emit_store, store_f32

__all__ = ["CONV_GATED", "CONV_SILU", "MOST_TAPS", "conv", "conv_units"]

CONV_SILU, CONV_GATED = 0, 1
"""F_ACT. Silu behind the convolution; or a row is [B | C | x], the input B * x, and the result C times the sum."""
_RUN = 128  # channels of a unit
_LINE = 4 * LANES
MOST_TAPS = SCRATCH_BYTES // (2 * 4 * _RUN)
"""Inputs before a token that a convolution may read: twice as many rows fit into the scratch of a thread."""

Value = Any
Builder = Any


@intrinsic
def _multiply(typing: Any, x: Any, y: Any, vectors: Any) -> Any:
    """y = x * y, `vectors` vectors of float32."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        x, y, vectors = arguments
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.mul(loop.index, int_constant(_LINE))
            place = b.add(y, at)
            emit_store(b, b.fmul(emit_load(b, V16, b.add(x, at)), emit_load(b, V16, place)), place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def _conv_row(
    typing: Any,
    inputs: Any,
    step: Any,
    weights: Any,
    width: Any,
    count: Any,
    bias: Any,
    gate: Any,
    vectors: Any,
    out: Any,
) -> Any:
    """out = act(bias + sum of weights * inputs), the oldest input first, one fma each; `vectors` vectors of channels.

    inputs, step    address of the oldest of `count` inputs, bytes from one to the next
    weights, width  likewise of the weights
    bias            address, or 0 for none;  gate: address of what the sum is multiplied with, or 0 for silu
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        inputs, step, weights, width, count, bias, gate, vectors, out = arguments
        zero, no = emit_splat(b, F32(0.0)), int_constant(0)
        total = cgutils.alloca_once(b, V16)
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.mul(loop.index, int_constant(_LINE))
            b.store(zero, total)
            with b.if_then(b.icmp_signed("!=", bias, no)):
                b.store(emit_load(b, V16, b.add(bias, at)), total)
            with cgutils.for_range(b, count, intp=I64) as taps:
                weight = emit_load(b, V16, b.add(b.add(weights, at), b.mul(taps.index, width)))
                x = emit_load(b, V16, b.add(b.add(inputs, at), b.mul(taps.index, step)))
                b.store(emit_fma(b, weight, x, b.load(total)), total)
            result, place = b.load(total), b.add(out, at)
            with b.if_else(b.icmp_signed("!=", gate, no)) as (gated, plain):
                with gated:
                    emit_store(b, b.fmul(result, emit_load(b, V16, b.add(gate, at))), place)
                with plain:
                    emit_store(b, emit_silu(b, result), place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), codegen


@kernel
def _runs(op: Any) -> Any:
    return (op[lt.F_COUNT] + _RUN - 1) // _RUN


@kernel
def conv_units(job: ProgramJob, op: Any) -> Any:
    """Units of an OP_CONV: those of one sequence, then those of the next."""
    return job.buffers[lt.B_SEQUENCES] * _runs(op)


@kernel
def _store_tail(op: Any, window: int, inputs: int, rows: int, width: int, out: int) -> None:
    """The last inputs behind so many rows, into the state at address `out` whose run of channels begins there."""
    taps = op[lt.F_TAPS]
    for tap in range(taps):
        row = rows - taps + tap
        # The window begins with the tail of the pass before.
        source = inputs + 4 * row * op[lt.F_SRC_STEP] if row >= 0 else window + 4 * (taps + row) * _RUN
        copy_floats(source, width, out + 4 * tap * op[lt.F_COUNT])


@kernel
def _fill_window(op: Any, window: int, before: int, inputs: int, rows: int, width: int) -> None:
    """The tail of the pass before, at address `before` or zeros, then the first rows of this one."""
    taps = op[lt.F_TAPS]
    for tap in range(taps):
        if before != 0:
            copy_floats(before + 4 * tap * op[lt.F_COUNT], width, window + 4 * tap * _RUN)
        else:
            for index in range(width):
                store_f32(window + 4 * (tap * _RUN + index), np.float32(0.0))
    for row in range(min(taps, rows)):
        copy_floats(inputs + 4 * row * op[lt.F_SRC_STEP], width, window + 4 * (taps + row) * _RUN)


@kernel
def conv(job: ProgramJob, op: Any, unit: int) -> None:
    """One sequence's rows of a run of channels, in place."""
    sequence, first = unit // _runs(op), unit % _runs(op) * _RUN
    channels, taps, step = op[lt.F_COUNT], op[lt.F_TAPS], 4 * op[lt.F_SRC_STEP]
    width, rows = min(_RUN, channels - first), ls.of_sequence(job, sequence, ls.S_ROWS)
    start = job.buffers[op[lt.F_SRC]] + ls.of_sequence(job, sequence, ls.S_FIRST) * step + 4 * first
    is_gated = op[lt.F_ACT] == CONV_GATED
    inputs = start + 8 * channels if is_gated else start
    if is_gated:
        for row in range(rows):
            _multiply(start + row * step, inputs + row * step, width // LANES)
    window, place = tile_scratch(), op[lt.F_STATE] + 4 * first
    before = ls.of_sequence(job, sequence, ls.S_IN)
    _fill_window(op, window, before + place if before != 0 else 0, inputs, rows, width)
    _store_tail(op, window, inputs, rows, width, ls.of_sequence(job, sequence, ls.S_OUT) + place)
    for index in range(ls.of_sequence(job, sequence, ls.S_NUM_SAVES)):
        out = ls.saved_at(job, sequence, index) + place
        _store_tail(op, window, inputs, ls.saved_rows(job, sequence, index), width, out)
    bias = op[lt.F_BIAS] + 4 * first if op[lt.F_BIAS] != 0 else 0
    for row in range(rows - 1, -1, -1):
        gate = start + row * step + 4 * channels if is_gated else 0
        oldest, apart = inputs + (row - taps) * step, step
        if row < taps:
            oldest, apart = window + 4 * row * _RUN, 4 * _RUN
        weights, out = op[lt.F_WEIGHT] + 4 * first, start + row * step
        _conv_row(oldest, apart, weights, 4 * channels, taps + 1, bias, gate, width // LANES, out)
