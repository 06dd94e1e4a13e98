"""Products of integer weight tiles and panels, and gated groups, for dense layers and experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.lazy import types
from kvboost_edge.kernels.linear.dispatch import int_panel
from kvboost_edge.kernels.linear.panel import (
    SMALL_TOKENS,
    TILES_AT_ONCE,
    UNPACKED,
    cell_bytes,
    panel_tokens,
    takes_pair,
)
from kvboost_edge.kernels.linear.weight_formats import (
    GROUP,
    group_bytes,
    minima_bytes,
    scale_bytes,
)
from kvboost_edge.kernels.linear.weight_tiles import Target, Tile
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import matrices_in
from kvboost_edge.kernels.program.norms import activate_group
from kvboost_edge.kernels.program.table import ProgramJob
from kvboost_edge.kernels.vectors import KIND_F32, LANES, emit_scratch

__all__ = [
    "GATED_GROUP_ROW",
    "SCRATCH_BYTES",
    "MatmulOperands",
    "few_tiles",
    "float_tile_bytes",
    "gated_groups",
    "int_tiles",
    "panels_at_once",
    "rows_at_once",
    "tile_scratch",
    "tiles_in_unit",
]

_MANY_UNIT = 4
_GATED_GROUPS = 4  # groups of 32 channels per call
GATED_GROUP_ROW = 2 * 4 * GROUP
"""Bytes per token in a group: 32 floats of the gate, then 32 floats of the up projection."""
# tokens of one group per call; fewer if a call takes several groups
_GATED_TOKENS = 64 if UNPACKED else 32
# Maximum number of panels per call. The inputs and outputs of a group's tiles stay in the L1 cache,
# so one call can take several panels if it covers all of these tiles. If weights are unpacked
# first, the number is not limited.
_GATED_PANELS = _GATED_TOKENS if UNPACKED else 4 if GROUP // LANES == TILES_AT_ONCE else 1
_FEW = 8  # up to this many tokens, weights stream from memory and long runs are fastest
SCRATCH_BYTES = _GATED_TOKENS * GATED_GROUP_ROW
"""Size of `tile_scratch` in bytes."""


class MatmulOperands(NamedTuple):
    """A matrix of integer weights and the panel that it reads.

    Attributes:
        kind: number of the weight format.
        groups: number of groups of 32 inputs.
        fine: nonzero for fine activation codes.
        weights: address of the codes.
        scales: address of the scales.
        minima: address of the minima, block scales or tables.
        panel: address of the panel.
        tokens: number of tokens of all its panels.
    """

    kind: int
    groups: int
    fine: int
    weights: int
    scales: int
    minima: int
    panel: int
    tokens: int


@intrinsic
def tile_scratch(typing: Any) -> Any:
    """Return the address of SCRATCH_BYTES on the kernel's stack, aligned to 64 bytes."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return emit_scratch(b, SCRATCH_BYTES)

    return types.int64(), codegen


@kernel
def tiles_in_unit(unit: int, tokens: int) -> Any:
    """Return the number of tiles (or groups of 32 channels) per unit.

    Args:
        unit: `PackedMatrix.unit`.
        tokens: tokens of the pass.
    """
    # With few tokens, weights stream from memory, so use long runs. With many tokens, use short
    # runs to share the work evenly.
    return unit if tokens <= _FEW else min(unit, _MANY_UNIT)


@kernel
def panels_at_once(tokens: int, token: int, n: int, most: int) -> Any:
    """Return how many panels of n tokens one call takes: several if weights stay in the cache."""
    return min(most, (tokens - token) // n) if tokens > SMALL_TOKENS[-1] else 1


@kernel
def int_tiles(
    job: ProgramJob,
    of: MatmulOperands,
    tile: int,
    count: int,
    token: int,
    n: int,
    panels: int,
    target: Target,
) -> None:
    """Multiply tiles of 16 rows by panels of n tokens.

    Args:
        job: the call, which holds the microkernels.
        of: the matrix and its panel.
        tile: first tile.
        count: number of tiles; with more than one panel, at most TILES_AT_ONCE.
        token: first token of the first panel.
        n: tokens per panel.
        panels: number of panels.
        target: destination of the outputs of the first tile and token.
    """
    kind = of.kind
    fine = of.fine
    groups = of.groups
    microkernel = job.kernels[kind]
    bytes_each = groups * group_bytes(kind)
    scales_each = scale_bytes(kind, groups)
    minima_each = minima_bytes(kind, groups)
    weights = of.weights + tile * bytes_each
    scales = of.scales + tile * scales_each
    minima = of.minima + tile * minima_each
    panel = of.panel + token * groups * cell_bytes(fine, kind)
    step = n * groups * cell_bytes(fine, kind) if panels > 1 else 0
    if not takes_pair(n, of.tokens, fine):
        runs = panels if panels > 1 else count
        where = Tile(
            weights, scales, minima, bytes_each, scales_each, minima_each, groups, runs, step
        )
        int_panel(microkernel, (n, 1, fine, where, panel, target))
        return
    pairs = count // 2
    if pairs > 0:
        runs = panels if panels > 1 else pairs
        where = Tile(
            weights, scales, minima, bytes_each, scales_each, minima_each, groups, runs, step
        )
        int_panel(microkernel, (n, 2, fine, where, panel, target))
    if count % 2 == 1:
        # If the number of tiles is odd, the last tile is paired with itself.
        weights = weights + 2 * pairs * bytes_each
        scales = scales + 2 * pairs * scales_each
        minima += 2 * pairs * minima_each
        behind = 2 * pairs * target.tile_step
        bias = target.bias + behind if target.bias != 0 else 0
        alone = Target(target.out + behind, target.out_step, 0, bias, target.add, target.factor)
        where = Tile(weights, scales, minima, 0, 0, 0, groups, panels, step)
        int_panel(microkernel, (n, 2, fine, where, panel, alone))


@kernel
def rows_at_once(left: int) -> int:
    """Return how many rows are multiplied by float weights at once."""
    if left >= 8:
        return 8
    if left >= 4:
        return 4
    return 2 if left >= 2 else 1


@kernel
def float_tile_bytes(kind: int, inputs: int) -> int:
    """Return the size in bytes of a tile of float weights."""
    return inputs * LANES * (4 if kind == KIND_F32 else 2)


@kernel
def few_tiles(tokens: int, fine: int, matrix: int) -> bool:
    """Return whether all tokens fit in one panel, so the weights of several tiles stream."""
    return panel_tokens(tokens, tokens, fine, matrix) == tokens


@kernel
def gated_groups(
    job: ProgramJob,
    inner: lt.InnerChannels,
    of: MatmulOperands,
    bias: int,
    tokens: int,
    group: int,
    end: int,
    out: int,
    scratch: int,
) -> None:
    """Compute groups [group, end) of 32 inner channels into the panel at `out`.

    Each group takes the gate and up rows (or only the up rows), applies the activation and
    quantizes the result. The unquantized inner channels are never stored outside `scratch`.

    Args:
        job: the call.
        inner: number of inner channels and their activation.
        of: the matrix (gate rows, then up rows; or only up rows) and its panel.
        bias: address of float32, one per row, or 0.
        tokens: tokens of the panel.
        group: first group.
        end: end of the groups.
        out: address of the panel of the inner channels, written.
        scratch: address of a `tile_scratch`.
    """
    groups = inner.size // GROUP
    tiles = GROUP // LANES
    # If all tokens fit in one panel, the weights of several groups stream in one run. Otherwise
    # several panels share the weights of one group.
    one_panel = tokens <= SMALL_TOKENS[-1] and few_tiles(tokens, 0, job.matrix)
    most = _GATED_GROUPS if one_panel else 1
    row = most * GATED_GROUP_ROW
    while group < end:
        count = min(most, end - group)
        token = 0
        while token < tokens:
            n = panel_tokens(tokens - token, tokens, 0, job.matrix)
            panels = panels_at_once(tokens, token, n, min(_GATED_PANELS, _GATED_TOKENS // n))
            for part in range(matrices_in(inner.act)):
                each = TILES_AT_ONCE if panels > 1 else tiles * count
                for begin in range(0, tiles * count, each):
                    tile = tiles * (group + part * groups) + begin
                    bias_at = bias + 4 * LANES * tile if bias != 0 else 0
                    to = scratch + part * (row // 2) + 4 * LANES * begin
                    target = Target(to, row, 4 * LANES, bias_at, 0, np.float32(1.0))
                    int_tiles(job, of, tile, each, token, n, panels, target)
            for panel in range(panels):
                for index in range(count):
                    rows = scratch + panel * n * row + 4 * GROUP * index
                    first = (token + panel * n) * groups + (group + index) * n
                    cell = out + first * cell_bytes(0, inner.kind)
                    activate_group(rows, row, n, inner.act, cell, inner.kind)
            token += n * panels
        group += count
