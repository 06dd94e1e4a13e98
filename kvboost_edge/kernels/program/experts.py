"""Matrix products of experts; the experts of a layer are stored one after another in one matrix.

Threads divide output rows but never a sum. A thread that computes rows of the down projection
processes the experts in ascending order and adds each weighted result to the outputs of its tokens.
No two threads write the same number, and the order of a token's sum does not depend on the other
tokens of the pass. A share multiplies the result including its bias. expert_routing.py lists the
tokens of each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvboost_edge.kernels.attention.rope import copy_floats
from kvboost_edge.kernels.integers import int_constant
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.linear.dispatch import float_rows
from kvboost_edge.kernels.linear.panel import (
    SMALL_TOKENS,
    TILES_AT_ONCE,
    cell_bytes,
    panel_tokens,
    token_place,
)
from kvboost_edge.kernels.linear.weight_formats import (
    GROUP,
    INT_KINDS,
    group_bytes,
    minima_bytes,
    scale_bytes,
)
from kvboost_edge.kernels.linear.weight_tiles import Target, Tile
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import activate_vectors, matrices_in
from kvboost_edge.kernels.program.expert_routing import (
    active_expert,
    count_active,
    first_slot,
    most_active,
    place_at,
    sigmoid_f32,
)
from kvboost_edge.kernels.program.matrix_tiles import (
    SCRATCH_BYTES,
    MatmulOperands,
    few_tiles,
    float_tile_bytes,
    gated_groups,
    int_tiles,
    panels_at_once,
    rows_at_once,
    tile_scratch,
    tiles_in_unit,
)
from kvboost_edge.kernels.program.norms import quantize_groups
from kvboost_edge.kernels.program.table import ProgramJob, row_at
from kvboost_edge.kernels.tuples import load_row
from kvboost_edge.kernels.vectors import (
    I64,
    LANES,
    V16,
    emit_fma,
    emit_load,
    emit_splat,
    emit_store,
    fma_f32,
    load_f32,
    store_f32,
)

__all__ = ["add_shared", "experts_down", "experts_gated", "experts_units", "spread"]

_LINE = 4 * LANES
# Limit of tiles per unit if there are many tokens. Each unit reads the rows of all experts.
_DOWN_TILES = 16


@intrinsic
def _add_scaled(typing: Any, x: Any, share: Any, vectors: Any, out: Any) -> Any:
    """Set out = fma(x, share, out), for 16 * vectors float32 at addresses `x` and `out`."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        x, share, vectors, out = arguments
        shares = emit_splat(b, share)
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.mul(loop.index, int_constant(_LINE))
            place = b.add(out, at)
            emit_store(
                b,
                emit_fma(b, emit_load(b, V16, b.add(x, at)), shares, emit_load(b, V16, place)),
                place,
            )
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), codegen


@kernel
def _runs(job: ProgramJob, op: lt.ExpertsGatedOp) -> Any:
    """Return the number of units per expert; each unit is a run of groups of inner channels."""
    size = tiles_in_unit(op.matrix.unit, job.tokens)
    return (op.inner.size // GROUP + size - 1) // size


@kernel
def _down_tiles(job: ProgramJob, size: int) -> Any:
    """Return the number of tiles per unit of the down projection: `size` for few tokens."""
    return size if job.tokens <= SMALL_TOKENS[-1] else min(size, _DOWN_TILES)


@kernel
def experts_units(job: ProgramJob, at: int) -> Any:
    """Return the number of units of an operation on experts, or 0 for an operation on tokens."""
    # The number must not depend on the routing, because threads that join late also compute it.
    # Units of experts without tokens do nothing.
    if lt.is_op(lt.DispatchOp, at):
        return 1
    if lt.is_op(lt.SpreadOp, at):
        return most_active(job, load_row(lt.SpreadOp, at).experts)
    if lt.is_op(lt.ExpertsGatedOp, at):
        gated = load_row(lt.ExpertsGatedOp, at)
        return most_active(job, gated.experts) * _runs(job, gated)
    if lt.is_op(lt.ExpertsDownOp, at):
        down = load_row(lt.ExpertsDownOp, at)
        size = LANES * _down_tiles(job, down.matrix.unit)
        return (down.size + size - 1) // size
    return 0


@kernel
def spread(job: ProgramJob, op: lt.SpreadOp, index: int) -> None:
    """Copy the rows of an active expert's tokens to consecutive memory, as panels or float32."""
    if index >= count_active(job):
        return
    experts = op.experts.total
    count = op.size
    kind = op.kind
    first = first_slot(job, experts, index)
    end = first_slot(job, experts, index + 1)
    groups = (count + GROUP - 1) // GROUP
    tokens = end - first
    for slot in range(first, end):
        token = place_at(job, experts, slot) // op.experts.used
        source = row_at(job, op.source, token)
        if kind > 0:
            start, size = token_place(slot - first, tokens, 0, job.matrix)
            cell = job.buffers[lt.B_SPREAD] + (first + start) * groups * cell_bytes(0, kind)
            quantize_groups(source, groups, cell, size, slot - first - start, kind, 0)
        else:
            copy_floats(source, count, job.buffers[lt.B_SPREAD] + 4 * slot * op.source.step)


@kernel
def _matrix_of(
    matrix: lt.PackedMatrix, expert: int, rows: int, panels: int, first: int, tokens: int
) -> Any:
    """Return the operands for one expert's matrix of `rows` rows and its panel of `tokens`."""
    kind = matrix.kind
    groups = (matrix.inputs + GROUP - 1) // GROUP
    tile = expert * (rows // LANES)
    weights = matrix.weights + tile * groups * group_bytes(kind)
    scales = matrix.scales + tile * scale_bytes(kind, groups)
    minima = matrix.minima + tile * minima_bytes(kind, groups)
    panel = panels + first * groups * cell_bytes(0, kind)
    return MatmulOperands(kind, groups, 0, weights, scales, minima, panel, tokens)


@kernel
def _bias_of(bias: int, first: int) -> Any:
    """Return the address of a row's bias, or 0 without biases; rows count over all experts."""
    return bias + 4 * first if bias != 0 else 0


@kernel
def experts_gated(job: ProgramJob, op: lt.ExpertsGatedOp, unit: int) -> None:
    """Run a unit: gate and up (or only up) and activation, for groups of one expert's channels."""
    runs = _runs(job, op)
    matrix = op.matrix
    size = tiles_in_unit(matrix.unit, job.tokens)
    index = unit // runs
    run = unit % runs
    if index >= count_active(job):
        return
    experts = op.experts.total
    inner = op.inner.size
    expert = active_expert(job, index)
    first = first_slot(job, experts, index)
    tokens = first_slot(job, experts, index + 1) - first
    group = run * size
    end = min(inner // GROUP, run * size + size)
    scratch = tile_scratch()
    source = job.buffers[lt.B_SPREAD]
    out = job.buffers[lt.B_EXPERTS_INNER]
    parts = matrices_in(op.inner.act)
    kind = matrix.kind
    if kind in INT_KINDS:
        of = _matrix_of(matrix, expert, parts * inner, source, first, tokens)
        out += first * (inner // GROUP) * cell_bytes(0, op.inner.kind)
        bias = _bias_of(matrix.bias, parts * expert * inner)
        gated_groups(job, op.inner, of, bias, tokens, group, end, out, scratch)
        return
    inputs = matrix.inputs
    step = 4 * op.step
    each = float_tile_bytes(kind, inputs)
    tiles = inner // LANES
    weights = matrix.weights + parts * expert * tiles * each
    slot = first
    while slot < first + tokens:
        n = rows_at_once(first + tokens - slot)
        x = source + slot * step
        for tile in range(group * (GROUP // LANES), end * (GROUP // LANES)):
            for part in range(parts):
                bias = _bias_of(matrix.bias, (parts * expert + part) * inner + tile * LANES)
                target = Target(scratch + part * _LINE, 2 * _LINE, 0, bias, 0, np.float32(1.0))
                where = Tile(weights + (part * tiles + tile) * each, 0, 0, 0, 0, 0, inputs, 1, 0)
                float_rows(job.kernels[kind], (n, where, x, step, target))
            for row in range(n):
                at = scratch + 2 * _LINE * row
                to = out + 4 * ((slot + row) * inner + tile * LANES)
                activate_vectors(at, at + _LINE, op.inner.act, LANES, 1, to)
        slot += n


@kernel
def _add_shares(
    job: ProgramJob,
    op: lt.ExpertsDownOp,
    scratch: int,
    slot: int,
    rows: int,
    tile: int,
    count: int,
) -> None:
    """Multiply rows of result tiles by the tokens' shares and add them to the output.

    Args:
        job: the call.
        op: the operation.
        scratch: address of float32 [rows, count * 16], the results.
        slot: slot of the first row.
        rows: number of rows.
        tile: first tile of the output.
        count: number of tiles.
    """
    for row in range(rows):
        place = place_at(job, op.experts.total, slot + row)
        share = load_f32(job.buffers[lt.B_SHARES] + 4 * place) * op.factor
        out = row_at(job, op.out, place // op.experts.used) + 4 * tile * LANES
        _add_scaled(scratch + row * count * _LINE, share, count, out)


@kernel
def _clear(job: ProgramJob, rows: lt.BufferRows, begin: int, end: int) -> None:
    """Set output tiles [begin, end) to 0 in the rows of all tokens."""
    for token in range(job.tokens):
        row = row_at(job, rows, token)
        for index in range(begin * LANES, end * LANES):
            store_f32(row + 4 * index, np.float32(0.0))


@kernel
def experts_down(job: ProgramJob, op: lt.ExpertsDownOp, unit: int) -> None:
    """Run a unit: some tiles of the down projection, for all experts in ascending order."""
    experts = op.experts.total
    matrix = op.matrix
    kind = matrix.kind
    inputs = matrix.inputs
    size = _down_tiles(job, matrix.unit)
    all_tiles = op.size // LANES
    scratch = tile_scratch()
    begin = unit * size
    end = min(all_tiles, unit * size + size)
    rows_at = job.buffers[lt.B_EXPERTS_INNER]
    if op.add == 0:
        _clear(job, op.out, begin, end)
    for index in range(count_active(job)):
        expert = active_expert(job, index)
        first = first_slot(job, experts, index)
        tokens = first_slot(job, experts, index + 1) - first
        if kind in INT_KINDS:
            of = _matrix_of(matrix, expert, op.size, rows_at, first, tokens)
            one_panel = tokens <= SMALL_TOKENS[-1] and few_tiles(tokens, 0, job.matrix)
            most = SCRATCH_BYTES // (tokens * _LINE) if one_panel else TILES_AT_ONCE
            tile = begin
            while tile < end:
                count = min(most, end - tile)
                token = 0
                while token < tokens:
                    n = panel_tokens(tokens - token, tokens, 0, job.matrix)
                    panels = panels_at_once(tokens, token, n, SCRATCH_BYTES // (n * count * _LINE))
                    bias = _bias_of(matrix.bias, expert * op.size + tile * LANES)
                    target = Target(scratch, count * _LINE, _LINE, bias, 0, np.float32(1.0))
                    int_tiles(job, of, tile, count, token, n, panels, target)
                    _add_shares(job, op, scratch, first + token, n * panels, tile, count)
                    token += n * panels
                tile += count
            continue
        each = float_tile_bytes(kind, inputs)
        for tile in range(begin, end):
            weights = matrix.weights + (expert * all_tiles + tile) * each
            token = 0
            while token < tokens:
                n = rows_at_once(tokens - token)
                x = rows_at + 4 * (first + token) * inputs
                where = Tile(weights, 0, 0, 0, 0, 0, inputs, 1, 0)
                bias = _bias_of(matrix.bias, expert * op.size + tile * LANES)
                target = Target(scratch, _LINE, 0, bias, 0, np.float32(1.0))
                float_rows(job.kernels[kind], (n, where, x, 4 * inputs, target))
                _add_shares(job, op, scratch, first + token, n, tile, 1)
                token += n


@kernel
def add_shared(job: ProgramJob, op: lt.AddSharedOp, token: int) -> None:
    """Add a token's shared-expert result, multiplied by its gate, to the output."""
    gate = load_f32(row_at(job, op.by, token))
    share = sigmoid_f32(gate) * op.factor
    source = row_at(job, op.source, token)
    out = row_at(job, op.out, token)
    for index in range(op.size):
        value = fma_f32(load_f32(source + 4 * index), share, load_f32(out + 4 * index))
        store_f32(out + 4 * index, value)
