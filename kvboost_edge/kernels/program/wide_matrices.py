"""Matrix products of a layer program in wide arithmetic; see linear/wide.py.

A unit multiplies some pairs of weight tiles, or a wide group of inner channels, by all tokens of
the pass. Its weights are quantized again once for each run of _TOKENS tokens. All pairs of a unit
are multiplied by a slab's part of the panels before the next slab, so that this part stays in the
L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvboost_edge.kernels.integers import int_constant
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.linear.weight_formats import (
    GROUP,
    group_bytes,
    minima_bytes,
    scale_bytes,
)
from kvboost_edge.kernels.linear.wide import (
    CELL,
    GROUP_BYTES,
    LINES,
    SLAB_BYTES,
    SLAB_GROUPS,
    SLAB_SCALES,
    WIDE,
    multiply_slab,
    quantize_wide,
    requantize,
)
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import emit_activate, matrices_in
from kvboost_edge.kernels.program.table import ProgramJob, row_at
from kvboost_edge.kernels.tuples import load_row
from kvboost_edge.kernels.vectors import (
    I64,
    LANES,
    V16,
    emit_fma,
    emit_load,
    emit_scratch,
    emit_splat,
    emit_store,
)

__all__ = ["run_wide", "wide_units"]

_LINE = 4 * LANES
_PAIR = 2 * LANES  # rows of a pair of tiles
_PAIRS = WIDE // _PAIR  # pairs of tiles in a unit, at most
_TOKENS = 512  # tokens for which weights are quantized once
_PANEL_TOKENS = 16  # tokens per unit of `WidePanelOp`
_ROW = 4 * WIDE  # bytes of a token's sums
# Scratch of a thread: sums of the tokens in a run, sums of their up projection, and a slab.
_UP_AT = _TOKENS * _ROW
_SLAB_AT = 2 * _UP_AT
_SCRATCH = _SLAB_AT + SLAB_BYTES + SLAB_SCALES
_FLIP = 0x80808080  # makes codes unsigned


@intrinsic
def _scratch(typing: Any) -> Any:
    """Return the address of _SCRATCH bytes on the kernel's stack, aligned to 64."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return emit_scratch(b, _SCRATCH)

    return types.int64(), codegen


@intrinsic
def _clear(typing: Any, at: Any, lines: Any) -> Any:
    """Set 16 * lines floats to 0."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        at, lines = arguments
        zero = emit_splat(b, V16.element(0.0))
        with cgutils.for_range(b, lines, intp=I64) as loop:
            emit_store(b, zero, b.add(at, b.mul(loop.index, int_constant(_LINE))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _with_bias(b: Any, at: Any, bias: Any) -> Any:
    """Load 16 sums and add 16 biases at an address that is not 0."""
    # Adding -0.0 changes no number.
    sums = emit_load(b, V16, at)
    slot = cgutils.alloca_once(b, V16)
    b.store(sums, slot)
    with b.if_then(b.icmp_signed("!=", bias, int_constant(0))):
        b.store(b.fadd(sums, emit_load(b, V16, bias)), slot)
    return b.load(slot)


@intrinsic
def _finish(typing: Any, sums: Any, bias: Any, add: Any, factor: Any, out: Any) -> Any:
    """Store (sums + bias) * factor for 16 outputs, or add it to them if `add` is not 0."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        sums, bias, add, factor, out = arguments
        value = _with_bias(b, sums, bias)
        factors = emit_splat(b, factor)
        with b.if_else(b.icmp_signed("!=", add, int_constant(0))) as (adds, stores):
            with adds:
                emit_store(b, emit_fma(b, value, factors, emit_load(b, V16, out)), out)
            with stores:
                emit_store(b, b.fmul(value, factors), out)
        return context.get_dummy_value()

    kinds = (types.int64, types.int64, types.int64, types.float32, types.int64)
    return types.void(*kinds), codegen


@intrinsic
def _activate(typing: Any, gate: Any, up: Any, gate_bias: Any, up_bias: Any, act: Any) -> Any:
    """Replace 16 sums of the gate by act(gate) * up; addresses of biases may be 0."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        gate, up, gate_bias, up_bias, act = arguments
        x = _with_bias(b, gate, gate_bias)
        emit_store(b, emit_activate(b, x, _with_bias(b, up, up_bias), act), gate)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@kernel
def _panel_tokens(fine: int) -> int:
    return LINES // 2 if fine != 0 else LINES


@kernel
def _panel_step(inputs: int) -> int:
    """Return the size of a panel in bytes."""
    return (inputs + WIDE - 1) // WIDE * GROUP_BYTES


@kernel
def _multiply_pairs(
    job: ProgramJob,
    matrix: lt.PackedMatrix,
    tile: int,
    count: int,
    token: int,
    tokens: int,
    sums: int,
    slab: int,
) -> None:
    """Multiply tiles by some tokens.

    Args:
        job: the call.
        matrix: the matrix.
        tile: first tile.
        count: number of tiles, at most WIDE / 16; the sums of missing tiles are arbitrary.
        token: first token, at the start of a panel.
        tokens: number of tokens, at most _TOKENS.
        sums: address of float32 [tokens][WIDE], written for whole panels.
        slab: address of room for a slab and its scales.
    """
    kind = matrix.kind
    groups = (matrix.inputs + GROUP - 1) // GROUP
    codes = matrix.weights + tile * groups * group_bytes(kind)
    scales = matrix.scales + tile * scale_bytes(kind, groups)
    minima = matrix.minima + tile * minima_bytes(kind, groups)
    each = _panel_tokens(matrix.fine)
    panels = (tokens + each - 1) // each
    panel_step = _panel_step(matrix.inputs)
    panel = job.buffers[matrix.panel] + token // each * panel_step
    flip = 0 if job.matrix != 0 else _FLIP
    factors = slab + SLAB_BYTES
    _clear(sums, panels * each * (_ROW // _LINE))
    first = 0
    while first < groups:
        some = min(SLAB_GROUPS * WIDE // GROUP, groups - first)
        for pair in range(0, count, 2):
            for index in range(pair, min(count, pair + 2)):
                requantize(
                    job.kernels[lt.K_REQUANTIZE + kind],
                    (
                        codes + index * groups * group_bytes(kind),
                        scales + index * scale_bytes(kind, groups),
                        minima + index * minima_bytes(kind, groups),
                        first,
                        some,
                        slab + index % 2 * (SLAB_BYTES // 2),
                        factors + index % 2 * (SLAB_SCALES // 2),
                        flip,
                    ),
                )
            multiply_slab(
                slab,
                factors,
                panel + first * GROUP // WIDE * GROUP_BYTES,
                panel_step,
                panels,
                (some * GROUP + WIDE - 1) // WIDE,
                (some * GROUP + CELL - 1) // CELL,
                sums + pair * _LINE,
                _ROW,
                matrix.fine,
                job.matrix,
            )
        first += some


@kernel
def _pairs(matrix: lt.PackedMatrix) -> int:
    """Return the number of pairs of tiles in a unit: fewer if threads would get unequal shares."""
    if matrix.unit >= 8 * _PAIRS:
        return _PAIRS
    return 2 if matrix.unit >= 4 else 1


@kernel
def _linear(job: ProgramJob, op: lt.WideLinearOp, unit: int) -> None:
    """Run a unit of a `WideLinearOp`: some pairs of tiles."""
    most = 2 * _pairs(op.matrix)
    tile = most * unit
    count = min(most, (op.size + LANES - 1) // LANES - tile)
    scratch = _scratch()
    token = 0
    while token < job.tokens:
        tokens = min(_TOKENS, job.tokens - token)
        _multiply_pairs(job, op.matrix, tile, count, token, tokens, scratch, scratch + _SLAB_AT)
        for index in range(tokens):
            out = row_at(job, op.out, token + index) + _LINE * tile
            for part in range(count):
                bias = op.matrix.bias
                if bias != 0:
                    bias += _LINE * (tile + part)
                at = scratch + index * _ROW + part * _LINE
                _finish(at, bias, op.add, op.factor, out + part * _LINE)
        token += tokens


@kernel
def _gated(job: ProgramJob, op: lt.WideGatedOp, unit: int) -> None:
    """Run a unit of a `WideGatedOp`: a wide group of inner channels."""
    channels = min(WIDE, op.inner.size - unit * WIDE)
    count = channels // LANES
    tile = unit * (WIDE // LANES)
    up_tile = tile + op.inner.size // LANES
    bias = op.matrix.bias
    scratch = _scratch()
    slab = scratch + _SLAB_AT
    panel_step = _panel_step(op.inner.size)
    token = 0
    while token < job.tokens:
        tokens = min(_TOKENS, job.tokens - token)
        _multiply_pairs(job, op.matrix, tile, count, token, tokens, scratch, slab)
        up = scratch
        if matrices_in(op.inner.act) == 2:
            up = scratch + _UP_AT
            _multiply_pairs(job, op.matrix, up_tile, count, token, tokens, up, slab)
        for index in range(tokens):
            for part in range(count):
                at = index * _ROW + part * _LINE
                _activate(
                    scratch + at,
                    up + at,
                    bias + _LINE * (tile + part) if bias != 0 else 0,
                    bias + _LINE * (up_tile + part) if bias != 0 else 0,
                    op.inner.act,
                )
            place = token + index
            block = job.buffers[op.out] + place // LINES * panel_step + unit * GROUP_BYTES
            quantize_wide(scratch + index * _ROW, count, block, place % LINES, 0)
        token += tokens


@kernel
def _panel(job: ProgramJob, op: lt.WidePanelOp, unit: int) -> None:
    """Run a unit of a `WidePanelOp`: some tokens."""
    each = _panel_tokens(op.panel.fine)
    step = _panel_step(op.size)
    count = (op.size + GROUP - 1) // GROUP * GROUP
    first = unit * _PANEL_TOKENS
    for token in range(first, min(job.tokens, first + _PANEL_TOKENS)):
        source = row_at(job, op.source, token)
        block = job.buffers[op.panel.buffer] + token // each * step
        for start in range(0, count, WIDE):
            vectors = min(WIDE, count - start) // LANES
            quantize_wide(source + 4 * start, vectors, block, token % each, op.panel.fine)
            block += GROUP_BYTES


@kernel
def wide_units(job: ProgramJob, at: int) -> Any:
    """Return the number of units of an operation in wide arithmetic."""
    if lt.is_op(lt.WideLinearOp, at):
        linear = load_row(lt.WideLinearOp, at)
        rows = _PAIR * _pairs(linear.matrix)
        return (linear.size + rows - 1) // rows
    if lt.is_op(lt.WideGatedOp, at):
        return (load_row(lt.WideGatedOp, at).inner.size + WIDE - 1) // WIDE
    return (job.tokens + _PANEL_TOKENS - 1) // _PANEL_TOKENS


@kernel
def run_wide(job: ProgramJob, at: int, unit: int) -> None:
    """Run a unit of an operation in wide arithmetic."""
    if lt.is_op(lt.WideLinearOp, at):
        _linear(job, load_row(lt.WideLinearOp, at), unit)
    elif lt.is_op(lt.WideGatedOp, at):
        _gated(job, load_row(lt.WideGatedOp, at), unit)
    else:
        _panel(job, load_row(lt.WidePanelOp, at), unit)
