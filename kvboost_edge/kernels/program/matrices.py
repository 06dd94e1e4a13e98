"""The operations of a layer program, cut into units that any thread may run: some tokens, or a run
of weight tiles.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from kvboost_edge.kernels.entry import caller
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.linear.dispatch import float_rows
from kvboost_edge.kernels.linear.panel import SMALL_TOKENS, TILES_AT_ONCE, panel_tokens
from kvboost_edge.kernels.linear.weight_tiles import GROUP, INT_KINDS, Target, Tile
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
from kvboost_edge.kernels.program.table import JOB_TYPE, ProgramJob
from kvboost_edge.kernels.program.tokens import run_tokens, token_units
from kvboost_edge.kernels.vectors import LANES

__all__ = ["APART", "run_unit", "units_of"]

APART = (JOB_TYPE, types.int64, types.int64)
"""Arguments of an entry that runs operations of its own: (job, index of the operation, unit)."""
_run_apart = caller(*APART)


@kernel
def units_of(job: ProgramJob, op: Any) -> Any:
    """Units an operation is cut into."""
    code = op[lt.F_OP]
    tokens = job.tokens
    if code in (lt.OP_LINEAR, lt.OP_GATED):
        size = LANES if code == lt.OP_LINEAR else GROUP
        unit = size * tiles_in_unit(op, tokens)
        return (op[lt.F_COUNT] + unit - 1) // unit
    if code == lt.OP_CONTINUE:
        return continuing_units(attention_row(job, op)) if job.buffers[lt.B_ROWS] != 0 else 0
    if code == lt.OP_CLOSE:
        return closing_units(attention_row(job, op))
    if code in (lt.OP_DISPATCH, lt.OP_SPREAD, lt.OP_EXPERTS_GATED, lt.OP_EXPERTS_DOWN):
        return experts_units(job, op)
    if code == lt.OP_TAILS:
        return tail_units(job, op)
    if code == lt.OP_SCAN:
        return scan_units(job, op)
    return token_units(job, op)


@kernel
def _matrix(job: ProgramJob, op: Any) -> Any:
    """An operation's matrix and the panel it reads."""
    groups = (op[lt.F_INPUTS] + GROUP - 1) // GROUP
    panel = job.buffers[op[lt.F_PANEL_IN]]
    return MatmulOperands(
        op[lt.F_KIND],
        groups,
        op[lt.F_FINE_IN],
        op[lt.F_WEIGHT],
        op[lt.F_SCALE],
        op[lt.F_MINIMA],
        panel,
    )


@kernel
def _linear(job: ProgramJob, op: Any, factor: float, unit: int) -> None:
    """A run of tiles against all tokens; a tile's weights are read once from memory and then from
    the cache.
    """
    kind = op[lt.F_KIND]
    inputs = op[lt.F_INPUTS]
    fine = op[lt.F_FINE_IN]
    size = tiles_in_unit(op, job.tokens)
    end = min((op[lt.F_COUNT] + LANES - 1) // LANES, unit * size + size)
    step = 4 * op[lt.F_DST_STEP]
    is_int = kind in INT_KINDS
    of = _matrix(job, op)
    most = 1
    if is_int and few_tiles(job.tokens, fine, job.matrix):
        most = size
    elif is_int and job.tokens > SMALL_TOKENS[-1]:
        most = TILES_AT_ONCE
    tile = unit * size
    while tile < end:
        count = min(most, end - tile)
        bias = op[lt.F_BIAS] + 4 * LANES * tile if op[lt.F_BIAS] != 0 else 0
        token = 0
        while token < job.tokens:
            out = (
                job.buffers[op[lt.F_DST]] + 4 * op[lt.F_DST_FIRST] + token * step + 4 * LANES * tile
            )
            target = Target(out, step, 4 * LANES, bias, op[lt.F_ADD], factor)
            if is_int:
                n = panel_tokens(job.tokens - token, job.tokens, fine, job.matrix)
                panels = panels_at_once(job.tokens, token, n, job.tokens)
                int_tiles(job, of, tile, count, token, n, panels, target)
                n *= panels
            else:
                n = rows_at_once(job.tokens - token)
                weights = op[lt.F_WEIGHT] + tile * float_tile_bytes(kind, inputs)
                x = job.buffers[op[lt.F_SRC]] + 4 * token * op[lt.F_SRC_STEP]
                where = Tile(weights, 0, 0, 0, 0, 0, inputs, 1, 0)
                float_rows(job.kernels[kind], (n, where, x, 4 * op[lt.F_SRC_STEP], target))
            token += n
        tile += count


@kernel
def _gated(job: ProgramJob, op: Any, unit: int) -> None:
    """A run of groups of 32 inner channels."""
    size = tiles_in_unit(op, job.tokens)
    first = unit * size
    end = min(op[lt.F_COUNT] // GROUP, unit * size + size)
    out = job.buffers[op[lt.F_PANEL]]
    gated_groups(
        job, op, _matrix(job, op), op[lt.F_BIAS], job.tokens, first, end, out, tile_scratch()
    )


@kernel
def run_unit(job: ProgramJob, index: int, unit: int) -> None:
    op = job.ops[index]
    params = job.params[index]
    code = op[lt.F_OP]
    apart = lt.ENTRY_OF[code]
    if apart != lt.K_PROGRAM:
        _run_apart(job.kernels[apart], (job, index, unit))
    elif code == lt.OP_LINEAR:
        _linear(job, op, params[lt.P_FACTOR], unit)
    elif code == lt.OP_GATED:
        _gated(job, op, unit)
    elif code == lt.OP_CONTINUE:
        continue_block(attention_row(job, op), unit)
    elif code == lt.OP_CLOSE:
        close_blocks(job.kernels[lt.K_CLOSE], (attention_row(job, op), unit))
    else:
        run_tokens(job, op, params, unit)
