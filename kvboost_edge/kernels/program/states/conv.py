"""Short causal convolutions along a sequence, and their conv state.

The inputs are rows of the pass. Inputs before the first row come from the conv state. Rows are not
overwritten, so tokens can be computed in any order. `KeepConvOp` writes the state after all tokens
are done. The inputs of draft tokens are stored separately; see sequences.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvboost_edge.kernels.attention.rope import copy_floats
from kvboost_edge.kernels.integers import int_constant
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import emit_silu
from kvboost_edge.kernels.program.states import sequences as ls
from kvboost_edge.kernels.program.table import ConvInputs, ConvOp, ProgramJob, row_at
from kvboost_edge.kernels.signature import INT64, Tuple, numba_type
from kvboost_edge.kernels.vectors import (
    F32,
    I64,
    LANES,
    V16,
    emit_fma,
    emit_load,
    emit_splat,
    emit_store,
    store_f32,
)

__all__ = ["conv_gated", "conv_silu", "keep_draft", "store_tails", "tail_units", "window_of"]

_RUN = 512  # channels per unit of `KeepConvOp`
_LINE = 4 * LANES

Value = Any
Builder = Any


class Window(NamedTuple):
    """Inputs of one token's convolution.

    Attributes:
        tail: address of the oldest input in the conv state; inputs are `width` bytes apart.
        num_tail: number of inputs from the conv state.
        rows: address of the oldest input in a row of the pass; rows are `step` bytes apart.
        num_rows: number of inputs from rows.
        weights: address of the weights for the oldest input in the state; `width` bytes apart.
        rows_weights: address of the weights for the oldest row.
        bias: address of all channels' biases, or 0.
        step: bytes from one row to the next.
        width: size of all channels in bytes.
    """

    tail: int
    num_tail: int
    rows: int
    num_rows: int
    weights: int
    rows_weights: int
    bias: int
    step: int
    width: int


_WINDOW = Tuple(Window, (INT64,) * len(Window._fields))


@kernel
def window_of(job: ProgramJob, conv: ConvInputs, token: int) -> Window:
    """Return the `Window` of a token: the inputs and weights of its convolution."""
    sequence = ls.sequence_of(job, token)
    step = 4 * conv.rows.step
    width = 4 * conv.channels
    row = token - ls.of_sequence(job, sequence, ls.S_FIRST)
    before = ls.of_sequence(job, sequence, ls.S_IN)
    missing = max(conv.width - row, 0)
    tail = before + conv.state + row * width
    num_rows = conv.width + 1 - missing
    rows = row_at(job, conv.rows, token + 1 - num_rows)
    num_tail = missing if before != 0 else 0
    rows_weights = conv.weights + missing * width
    return Window(
        tail, num_tail, rows, num_rows, conv.weights, rows_weights, conv.bias, step, width
    )


def _emit_taps(
    b: Builder, total: Value, x: Value, weights: Value, apart: tuple[Value, Value], count: Value
) -> Any:
    """Add weight * x for `count` inputs to `total`, one fma each.

    Args:
        b: the builder.
        total: stack slot of 16 float32.
        x: function that takes a byte offset and loads an input.
        weights: address of the first weight.
        apart: bytes from one input to the next, and from one weight to the next.
        count: number of inputs.
    """
    with cgutils.for_range(b, count, intp=I64) as loop:
        value = x(b.mul(loop.index, apart[0]))
        weight = emit_load(b, V16, b.add(weights, b.mul(loop.index, apart[1])))
        b.store(emit_fma(b, weight, value, b.load(total)), total)


def _emit_conv(b: Builder, window: Value, place: tuple[Value, ...], behind: Value | None) -> None:
    """Emit the convolution of some vectors of channels, oldest input first, then silu or a gate.

    Args:
        b: the builder.
        window: a `Window`.
        place: byte offset of the first channel, number of vectors, address of the result, and bytes
            between its vectors.
        behind: None for plain inputs, followed by silu. Otherwise the bytes of each part of a row
            [B | C | x]: the input is B * x, and the result is C times the sum.
    """
    w = Window(*cgutils.unpack_tuple(b, window))
    first, vectors, out, out_step = place
    total = cgutils.alloca_once(b, V16)
    zero = emit_splat(b, F32(0.0))
    no = int_constant(0)
    with cgutils.for_range(b, vectors, intp=I64) as loop:
        at = b.add(first, b.mul(loop.index, int_constant(_LINE)))
        tail = b.add(w.tail, at)
        rows = b.add(w.rows, at)

        def of_row(offset: Value, rows: Value = rows) -> Value:
            x = emit_load(b, V16, b.add(rows, offset))
            if behind is None:
                return x
            return b.fmul(x, emit_load(b, V16, b.add(b.add(rows, offset), b.add(behind, behind))))

        b.store(zero, total)
        with b.if_then(b.icmp_signed("!=", w.bias, no)):
            b.store(emit_load(b, V16, b.add(w.bias, at)), total)
        of_tail = lambda offset, tail=tail: emit_load(b, V16, b.add(tail, offset))  # noqa: E731
        _emit_taps(b, total, of_tail, b.add(w.weights, at), (w.width, w.width), w.num_tail)
        _emit_taps(b, total, of_row, b.add(w.rows_weights, at), (w.step, w.width), w.num_rows)
        result = b.load(total)
        if behind is None:
            result = emit_silu(b, result)
        else:
            last = b.add(rows, b.mul(w.step, b.sub(w.num_rows, int_constant(1))))
            result = b.fmul(result, emit_load(b, V16, b.add(last, behind)))
        emit_store(b, result, b.add(out, b.mul(loop.index, out_step)))


@intrinsic
def conv_silu(typing: Any, window: Any, first: Any, vectors: Any, out: Any, step: Any) -> Any:
    """Set out = silu(convolution) for `vectors` vectors of channels.

    Args:
        window: a `Window`.
        first: byte offset of the first channel.
        vectors: number of vectors.
        out: address of the first result.
        step: bytes from one result vector to the next.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        window, *place = arguments
        _emit_conv(b, window, tuple(place), None)
        return context.get_dummy_value()

    return types.void(numba_type(_WINDOW), *[types.int64] * 4), codegen


@intrinsic
def _conv_gated(typing: Any, window: Any, vectors: Any, out: Any) -> Any:
    """Set out = C * convolution of B * x, for all channels."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        window, vectors, out = arguments
        width = Window(*cgutils.unpack_tuple(b, window)).width
        _emit_conv(b, window, (int_constant(0), vectors, out, int_constant(_LINE)), width)
        return context.get_dummy_value()

    return types.void(numba_type(_WINDOW), *[types.int64] * 2), codegen


@intrinsic
def _multiply(typing: Any, x: Any, y: Any, vectors: Any, out: Any) -> Any:
    """Set out = x * y, for 16 * vectors float32 at addresses `x`, `y` and `out`."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        x, y, vectors, out = arguments
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.mul(loop.index, int_constant(_LINE))
            product = b.fmul(emit_load(b, V16, b.add(x, at)), emit_load(b, V16, b.add(y, at)))
            emit_store(b, product, b.add(out, at))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@kernel
def conv_gated(job: ProgramJob, op: ConvOp, token: int) -> None:
    """Compute a token's result from its row [B | C | x]; store the input of a draft token."""
    out = row_at(job, op.out, token)
    _conv_gated(window_of(job, op.conv, token), op.conv.channels // LANES, out)
    keep_draft(job, op.conv, token, 0, 0)


@kernel
def keep_draft(job: ProgramJob, conv: ConvInputs, token: int, gates: int, num_gates: int) -> None:
    """Store a draft token's conv input, followed by `num_gates` float32 at address `gates`.

    `Runner.accept_drafts` processes these inputs again if the draft tokens are accepted. For other
    tokens, nothing is stored.
    """
    sequence = ls.sequence_of(job, token)
    ahead = (
        token
        - ls.of_sequence(job, sequence, ls.S_FIRST)
        - ls.of_sequence(job, sequence, ls.S_CERTAIN)
    )
    drafts = ls.of_sequence(job, sequence, ls.S_DRAFTS)
    channels = conv.channels
    if drafts == 0 or ahead < 0:
        return
    row = row_at(job, conv.rows, token)
    out = drafts + ahead * conv.draft_step + conv.draft
    if conv.gated != 0:
        _multiply(row, row + 8 * channels, channels // LANES, out)
    else:
        copy_floats(row, channels, out)
    copy_floats(gates, num_gates, out + 4 * channels)


@kernel
def tail_units(job: ProgramJob, conv: ConvInputs) -> Any:
    """Return the number of units of a `KeepConvOp`; a unit is a run of channels of one sequence."""
    return job.buffers[lt.B_SEQUENCES] * ((conv.channels + _RUN - 1) // _RUN)


@kernel
def _store_tail(
    job: ProgramJob, conv: ConvInputs, sequence: int, rows: int, first: int, slot: int
) -> None:
    """Store the conv state after `rows` rows of a sequence in a slot, oldest input first.

    Args:
        job: the call.
        conv: the inputs and the location of the conv state.
        sequence: index of the sequence.
        rows: number of rows of the sequence to include.
        first: first channel of the run.
        slot: address of the state slot, written; may be the slot that holds the earlier inputs.
    """
    channels = conv.channels
    step = 4 * conv.rows.step
    width = min(_RUN, channels - first)
    place = conv.state + 4 * first
    start = row_at(job, conv.rows, ls.of_sequence(job, sequence, ls.S_FIRST)) + 4 * first
    before = ls.of_sequence(job, sequence, ls.S_IN)
    for tap in range(conv.width):
        row = rows - conv.width + tap
        out = slot + place + 4 * tap * channels
        if row >= 0 and conv.gated != 0:
            _multiply(start + row * step, start + row * step + 8 * channels, width // LANES, out)
        elif row >= 0:
            copy_floats(start + row * step, width, out)
        elif before != 0:
            copy_floats(before + place + 4 * (conv.width + row) * channels, width, out)
        else:
            for index in range(width):
                store_f32(out + 4 * index, np.float32(0.0))


@kernel
def store_tails(job: ProgramJob, conv: ConvInputs, unit: int) -> None:
    """Store the conv state after a sequence's last non-draft row, for one run of channels."""
    # Store the snapshots first, because the last write may overwrite the initial state.
    runs = (conv.channels + _RUN - 1) // _RUN
    sequence = unit // runs
    first = unit % runs * _RUN
    for index in range(ls.of_sequence(job, sequence, ls.S_NUM_SAVES)):
        rows = ls.saved_rows(job, sequence, index)
        _store_tail(job, conv, sequence, rows, first, ls.saved_at(job, sequence, index))
    rows = ls.of_sequence(job, sequence, ls.S_CERTAIN)
    out = ls.of_sequence(job, sequence, ls.S_OUT)
    _store_tail(job, conv, sequence, rows, first, out)
