"""The operations of a layer program, cut into units that any thread may run: some tokens, or a run of weight tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types

from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.linear.ladders import float_rows, int_panel
from kvboost_edge.kernels.linear.layout import SCALE_BYTES, group_bytes_kernel, minima_bytes_kernel
from kvboost_edge.kernels.linear.panel import (
    SMALL_TOKENS,
    TILES_AT_ONCE,
    UNPACKED,
    cell_bytes,
    panel_tokens,
    takes_pair,
)
from kvboost_edge.kernels.linear.tiles import GROUP, INT_KINDS, Target, Tile
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.attend import (
    attention_row,
    close_blocks,
    closing_units,
    continue_block,
    continuing_units,
)
from kvboost_edge.kernels.program.norms import activate_group
from kvboost_edge.kernels.program.table import ProgramJob
from kvboost_edge.kernels.program.tokens import run_tokens, token_units
from kvboost_edge.kernels.vectors import KIND_F32, LANES, emit_scratch

__all__ = ["run_unit", "units_of"]

_MANY_UNIT = 4
_GATED_GROUPS = 4  # groups of 32 channels at once
_GATED_GROUP_ROW = 2 * 4 * GROUP  # bytes of a token in a group: of the gate, then of the way up
_GATED_TOKENS = 64 if UNPACKED else 32  # of one group at once; of several, as many fewer
# Panels at once, where a group's tiles are one call; what they read and write stays in the first cache. All tokens
# there may be, where weights are unpacked first.
_GATED_PANELS = _GATED_TOKENS if UNPACKED else 4 if GROUP // LANES == TILES_AT_ONCE else 1
_FEW = 8  # up to so many tokens, weights stream from memory and long runs are best


@intrinsic
def _gated_scratch(typing: Any) -> Any:
    """Address of 64-byte aligned memory for OP_GATED, on the stack of the calling kernel."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return emit_scratch(b, _GATED_TOKENS * _GATED_GROUP_ROW)

    return types.int64(), codegen


@kernel
def _tiles_in_unit(op: Any, tokens: int) -> Any:
    """Tiles (OP_GATED: groups of 32 channels) in a unit: long runs where weights stream, short ones to share work."""
    unit = op[lt.F_UNIT]
    return unit if tokens <= _FEW else min(unit, _MANY_UNIT)


@kernel
def units_of(job: ProgramJob, op: Any) -> Any:
    """Units an operation is cut into."""
    code, tokens = op[lt.F_OP], job.tokens
    if code in (lt.OP_LINEAR, lt.OP_GATED):
        size = LANES if code == lt.OP_LINEAR else GROUP
        unit = size * _tiles_in_unit(op, tokens)
        return (op[lt.F_COUNT] + unit - 1) // unit
    if code == lt.OP_CONTINUE:
        return continuing_units(attention_row(job, op)) if job.buffers[lt.B_ROWS] != 0 else 0
    if code == lt.OP_CLOSE:
        return closing_units(attention_row(job, op))
    return token_units(job, op)


@kernel
def _panels(tokens: int, token: int, n: int, most: int) -> Any:
    """Panels of n tokens, from `token` on, that one call takes: many where weights stay in the cache."""
    return min(most, (tokens - token) // n) if tokens > SMALL_TOKENS[-1] else 1


@kernel
def _int_tiles(
    job: ProgramJob, op: Any, tile: int, count: int, token: int, n: int, panels: int, target: Target
) -> None:
    """Tiles [tile, tile + count) against panels of n quantized tokens, the first of which starts at `token`.

    More than one panel: count is at most TILES_AT_ONCE.
    """
    kind, fine = op[lt.F_KIND], op[lt.F_FINE_IN]
    microkernel = job.kernels[kind]
    groups = (op[lt.F_INPUTS] + GROUP - 1) // GROUP
    bytes_each, scales_each = groups * group_bytes_kernel(kind), groups * SCALE_BYTES
    minima_each = minima_bytes_kernel(kind, groups)
    weights, scales = op[lt.F_WEIGHT] + tile * bytes_each, op[lt.F_SCALE] + tile * scales_each
    minima = op[lt.F_MINIMA] + tile * minima_each
    panel = job.buffers[op[lt.F_PANEL_IN]] + token * groups * cell_bytes(fine, kind)
    step = n * groups * cell_bytes(fine, kind) if panels > 1 else 0
    if not takes_pair(n, fine):
        runs = panels if panels > 1 else count
        where = Tile(weights, scales, minima, bytes_each, scales_each, minima_each, groups, runs, step)
        int_panel(microkernel, (n, fine, where, panel, target))
        return
    pairs = count // 2
    if pairs > 0:
        runs = panels if panels > 1 else pairs
        where = Tile(weights, scales, minima, bytes_each, scales_each, minima_each, groups, runs, step)
        int_panel(microkernel, (n, fine, where, panel, target))
    if count % 2 == 1:
        # The last tile of an odd number, as a pair with itself.
        weights, scales = weights + 2 * pairs * bytes_each, scales + 2 * pairs * scales_each
        minima += 2 * pairs * minima_each
        behind = 2 * pairs * target.tile_step
        bias = target.bias + behind if target.bias != 0 else 0
        alone = Target(target.out + behind, target.out_step, 0, bias, target.add, target.factor)
        where = Tile(weights, scales, minima, 0, 0, 0, groups, panels, step)
        int_panel(microkernel, (n, fine, where, panel, alone))


@kernel
def _linear(job: ProgramJob, op: Any, factor: float, unit: int) -> None:
    """A run of tiles against all tokens; a tile's weights are read once from memory and then from the cache."""
    kind, inputs, fine = op[lt.F_KIND], op[lt.F_INPUTS], op[lt.F_FINE_IN]
    size = _tiles_in_unit(op, job.tokens)
    end = min((op[lt.F_COUNT] + LANES - 1) // LANES, unit * size + size)
    step = 4 * op[lt.F_DST_STEP]
    is_int = kind in INT_KINDS
    most = 1
    if is_int and panel_tokens(job.tokens, job.tokens, fine, job.matrix) == job.tokens:
        most = size
    elif is_int and job.tokens > SMALL_TOKENS[-1]:
        most = TILES_AT_ONCE
    tile = unit * size
    while tile < end:
        count = min(most, end - tile)
        bias = op[lt.F_BIAS] + 4 * LANES * tile if op[lt.F_BIAS] != 0 else 0
        token = 0
        while token < job.tokens:
            out = job.buffers[op[lt.F_DST]] + 4 * op[lt.F_DST_FIRST] + token * step + 4 * LANES * tile
            target = Target(out, step, 4 * LANES, bias, op[lt.F_ADD], factor)
            if is_int:
                n = panel_tokens(job.tokens - token, job.tokens, fine, job.matrix)
                panels = _panels(job.tokens, token, n, job.tokens)
                _int_tiles(job, op, tile, count, token, n, panels, target)
                n *= panels
            else:
                n = _rows_at_once(job.tokens - token)
                width = 4 if kind == KIND_F32 else 2
                weights = op[lt.F_WEIGHT] + tile * inputs * LANES * width
                x = job.buffers[op[lt.F_SRC]] + 4 * token * op[lt.F_SRC_STEP]
                where = Tile(weights, 0, 0, 0, 0, 0, inputs, 1, 0)
                float_rows(job.kernels[kind], (n, where, x, 4 * op[lt.F_SRC_STEP], target))
            token += n
        tile += count


@kernel
def _rows_at_once(left: int) -> int:
    """Rows that float weights meet at once, where `left` are left."""
    if left >= 8:
        return 8
    if left >= 4:
        return 4
    return 2 if left >= 2 else 1


@kernel
def _gated(job: ProgramJob, op: Any, unit: int) -> None:
    """Groups of 32 inner channels: gate and up rows, activation, quantization; nothing wide is ever stored."""
    size = _tiles_in_unit(op, job.tokens)
    groups = op[lt.F_COUNT] // GROUP
    tiles = GROUP // LANES
    scratch = _gated_scratch()
    # Where all tokens are one panel the weights of several groups stream in one run; otherwise several panels use
    # those of one group.
    one_panel = job.tokens <= SMALL_TOKENS[-1] and panel_tokens(job.tokens, job.tokens, 0, job.matrix) == job.tokens
    most = _GATED_GROUPS if one_panel else 1
    row = most * _GATED_GROUP_ROW
    end = min(groups, unit * size + size)
    group = unit * size
    while group < end:
        count = min(most, end - group)
        token = 0
        while token < job.tokens:
            n = panel_tokens(job.tokens - token, job.tokens, 0, job.matrix)
            panels = _panels(job.tokens, token, n, min(_GATED_PANELS, _GATED_TOKENS // n))
            for part in range(2):
                each = TILES_AT_ONCE if panels > 1 else tiles * count
                for begin in range(0, tiles * count, each):
                    tile = tiles * (group + part * groups) + begin
                    bias = op[lt.F_BIAS] + 4 * LANES * tile if op[lt.F_BIAS] != 0 else 0
                    out = scratch + part * (row // 2) + 4 * LANES * begin
                    target = Target(out, row, 4 * LANES, bias, 0, np.float32(1.0))
                    _int_tiles(job, op, tile, each, token, n, panels, target)
            for panel in range(panels):
                for index in range(count):
                    rows = scratch + panel * n * row + 4 * GROUP * index
                    first = (token + panel * n) * groups + (group + index) * n
                    cell = job.buffers[op[lt.F_PANEL]] + first * cell_bytes(0, op[lt.F_QUANT])
                    activate_group(rows, row, n, op[lt.F_ACT], cell, op[lt.F_QUANT])
            token += n * panels
        group += count


@kernel
def run_unit(job: ProgramJob, op: Any, params: Any, unit: int) -> None:
    code = op[lt.F_OP]
    if code == lt.OP_LINEAR:
        _linear(job, op, params[lt.P_FACTOR], unit)
    elif code == lt.OP_GATED:
        _gated(job, op, unit)
    elif code == lt.OP_CONTINUE:
        continue_block(attention_row(job, op), unit)
    elif code == lt.OP_CLOSE:
        close_blocks(job.kernels[lt.K_CLOSE], (attention_row(job, op), unit))
    else:
        run_tokens(job, op, params, unit)
