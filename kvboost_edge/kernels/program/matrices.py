"""Units of a layer program's operations: each unit is some tokens or a run of weight tiles."""

from __future__ import annotations

from typing import Any

from kvboost_edge.kernels.entry import caller
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.linear.dispatch import float_rows
from kvboost_edge.kernels.linear.panel import SMALL_TOKENS, TILES_AT_ONCE, panel_tokens
from kvboost_edge.kernels.linear.weight_formats import GROUP, INT_KINDS
from kvboost_edge.kernels.linear.weight_tiles import Target, Tile
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.attention_calls import (
    attention_row,
    close_blocks,
    closing_units,
    continue_block,
    continuing_units,
)
from kvboost_edge.kernels.program.experts import experts_units
from kvboost_edge.kernels.program.matrix_tiles import (
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
from kvboost_edge.kernels.program.states.conv import tail_units
from kvboost_edge.kernels.program.states.scan import scan_units
from kvboost_edge.kernels.program.table import JOB_TYPE, ProgramJob, entry_at, row_at
from kvboost_edge.kernels.program.tokens import run_tokens, token_units
from kvboost_edge.kernels.program.wide_matrices import wide_units
from kvboost_edge.kernels.signature import INT64
from kvboost_edge.kernels.tuples import load_row
from kvboost_edge.kernels.vectors import LANES

__all__ = ["APART", "run_unit", "units_of"]

APART = (JOB_TYPE, INT64, INT64)
"""Argument types of entries for rarely used operations: (job, address of fields, unit)."""
_run_apart = caller(*APART)


@kernel
def _matrix_units(matrix: lt.PackedMatrix, count: int, size: int, tokens: int) -> Any:
    """Return the number of units of a matrix.

    Args:
        matrix: the matrix.
        count: number of rows (or channels).
        size: rows per tile (or channels per group).
        tokens: tokens of the pass.
    """
    unit = size * tiles_in_unit(matrix.unit, tokens)
    return (count + unit - 1) // unit


@kernel
def units_of(job: ProgramJob, at: int) -> Any:
    """Return the number of units of the operation whose fields are at address `at`."""
    if lt.is_op(lt.LinearOp, at):
        linear = load_row(lt.LinearOp, at)
        return _matrix_units(linear.matrix, linear.size, LANES, job.tokens)
    if lt.is_op(lt.GatedOp, at):
        gated = load_row(lt.GatedOp, at)
        return _matrix_units(gated.matrix, gated.inner.size, GROUP, job.tokens)
    if lt.is_op(lt.ContinueOp, at):
        if job.buffers[lt.B_ROWS] == 0:
            return 0
        return continuing_units(attention_row(job, load_row(lt.ContinueOp, at).layer))
    if lt.is_op(lt.CloseOp, at):
        return closing_units(attention_row(job, load_row(lt.CloseOp, at).layer))
    if lt.is_op(lt.KeepConvOp, at):
        return tail_units(job, load_row(lt.KeepConvOp, at).conv)
    if entry_at(at) == lt.K_WIDE:
        return wide_units(job, at)
    if lt.is_op(lt.ScanOp, at):
        return scan_units(job, load_row(lt.ScanOp, at).heads)
    units = experts_units(job, at)
    return units if units > 0 else token_units(job, at)


@kernel
def _operands(job: ProgramJob, matrix: lt.PackedMatrix) -> Any:
    """Return the operands of a product: a matrix and the panel that it reads."""
    groups = (matrix.inputs + GROUP - 1) // GROUP
    return MatmulOperands(
        matrix.kind,
        groups,
        matrix.fine,
        matrix.weights,
        matrix.scales,
        matrix.minima,
        job.buffers[matrix.panel],
        job.tokens,
    )


@kernel
def _linear(job: ProgramJob, op: lt.LinearOp, unit: int) -> None:
    """Run a unit of a linear layer: multiply a run of weight tiles by all tokens."""
    # A tile's weights are read from memory for the first tokens and from the cache for all others.
    matrix = op.matrix
    kind = matrix.kind
    inputs = matrix.inputs
    fine = matrix.fine
    size = tiles_in_unit(matrix.unit, job.tokens)
    end = min((op.size + LANES - 1) // LANES, unit * size + size)
    step = 4 * op.out.step
    source_step = 4 * op.source.step
    is_int = kind in INT_KINDS
    of = _operands(job, matrix)
    most = 1
    if is_int and few_tiles(job.tokens, fine, job.matrix):
        most = size
    elif is_int and job.tokens > SMALL_TOKENS[-1]:
        most = TILES_AT_ONCE
    tile = unit * size
    while tile < end:
        count = min(most, end - tile)
        bias = matrix.bias + 4 * LANES * tile if matrix.bias != 0 else 0
        token = 0
        while token < job.tokens:
            out = row_at(job, op.out, token) + 4 * LANES * tile
            target = Target(out, step, 4 * LANES, bias, op.add, op.factor)
            if is_int:
                n = panel_tokens(job.tokens - token, job.tokens, fine, job.matrix)
                panels = panels_at_once(job.tokens, token, n, job.tokens)
                int_tiles(job, of, tile, count, token, n, panels, target)
                n *= panels
            else:
                n = rows_at_once(job.tokens - token)
                weights = matrix.weights + tile * float_tile_bytes(kind, inputs)
                where = Tile(weights, 0, 0, 0, 0, 0, inputs, 1, 0)
                x = row_at(job, op.source, token)
                float_rows(job.kernels[kind], (n, where, x, source_step, target))
            token += n
        tile += count


@kernel
def _gated(job: ProgramJob, op: lt.GatedOp, unit: int) -> None:
    """Run a unit of a gated MLP: compute a run of groups of 32 inner channels."""
    size = tiles_in_unit(op.matrix.unit, job.tokens)
    first = unit * size
    end = min(op.inner.size // GROUP, unit * size + size)
    of = _operands(job, op.matrix)
    out = job.buffers[op.out]
    gated_groups(job, op.inner, of, op.matrix.bias, job.tokens, first, end, out, tile_scratch())


@kernel
def run_unit(job: ProgramJob, at: int, unit: int) -> None:
    """Run a unit of the operation whose fields are at address `at`."""
    entry = entry_at(at)
    if entry != lt.K_PROGRAM:
        _run_apart(job.kernels[entry], (job, at, unit))
    elif lt.is_op(lt.LinearOp, at):
        _linear(job, load_row(lt.LinearOp, at), unit)
    elif lt.is_op(lt.GatedOp, at):
        _gated(job, load_row(lt.GatedOp, at), unit)
    elif lt.is_op(lt.ContinueOp, at):
        continue_block(attention_row(job, load_row(lt.ContinueOp, at).layer), unit)
    elif lt.is_op(lt.CloseOp, at):
        row = attention_row(job, load_row(lt.CloseOp, at).layer)
        close_blocks(job.kernels[lt.K_CLOSE], (row, unit))
    else:
        run_tokens(job, at, unit)
