"""Dispatch of linear kernels: each weight format's entry picks a microkernel by token count."""

from __future__ import annotations

from typing import Any

from kvboost_edge.kernels.entry import KernelEntry, caller
from kvboost_edge.kernels.integers import has_tile_registers
from kvboost_edge.kernels.jit import named_kernel
from kvboost_edge.kernels.linear.amx import amx_tile
from kvboost_edge.kernels.linear.panel import (
    FINE_TOKENS,
    MATRIX_FINE_TOKENS,
    MATRIX_TOKENS,
    SMALL_TOKENS,
    TILES_AT_ONCE,
    WIDE_FINE_TOKENS,
    WIDE_TOKENS,
)
from kvboost_edge.kernels.linear.weight_formats import FORMAT_OF
from kvboost_edge.kernels.linear.weight_tiles import (
    FLOAT_TOKENS,
    Target,
    Tile,
    float_tile,
    int_tile,
)
from kvboost_edge.kernels.signature import FLOAT32, INT64, Tuple
from kvboost_edge.kernels.tuples import numbers_kind

__all__ = ["TARGET_TYPE", "float_rows", "int_panel", "ladders"]

_MOST = SMALL_TOKENS[-1]
_MOST_FINE = FINE_TOKENS[-1]
# Panel sizes that are multiplied by two tiles at once; 0 if there is none.
_PAIR, _FINE_PAIR = (WIDE_TOKENS, WIDE_FINE_TOKENS) if TILES_AT_ONCE == 2 else (0, 0)
_HAS_AMX = has_tile_registers()


def _int_ladder(kind: int) -> Any:
    """Return the kernel that calls an integer format's microkernel for n tokens."""
    # If the dot-product variant has no microkernel for a size, another takes its place here. Numba
    # never compiles or calls that one, because the conditions are constants.
    amx = amx_tile[kind, False]
    fine_amx = amx_tile[kind, True]
    wide = int_tile[kind, TILES_AT_ONCE, WIDE_TOKENS, False]
    fine_wide = int_tile[kind, TILES_AT_ONCE, WIDE_FINE_TOKENS, True]
    one, two, four, eight = (
        int_tile[kind, 1, tokens, False] for tokens in (1, 2, min(4, _MOST), _MOST)
    )
    fine_one, fine_two, fine_four = (
        int_tile[kind, 1, tokens, True] for tokens in (1, 2, _MOST_FINE)
    )

    @named_kernel(f"int_ladder_{kind}")
    def ladder(n: int, fine: int, tile: Tile, panel: int, target: Target) -> None:
        if fine != 0:
            if _HAS_AMX and n == MATRIX_FINE_TOKENS:
                fine_amx(tile, panel, target)
            elif _FINE_PAIR and n == _FINE_PAIR:
                fine_wide(tile, panel, target)
            elif _MOST_FINE >= 4 and n == 4:
                fine_four(tile, panel, target)
            elif n == 2:
                fine_two(tile, panel, target)
            else:
                fine_one(tile, panel, target)
        elif _HAS_AMX and n == MATRIX_TOKENS:
            amx(tile, panel, target)
        elif _PAIR and n == _PAIR:
            wide(tile, panel, target)
        elif _MOST >= 8 and n == 8:
            eight(tile, panel, target)
        elif _MOST >= 4 and n == 4:
            four(tile, panel, target)
        elif n == 2:
            two(tile, panel, target)
        else:
            one(tile, panel, target)

    return ladder


def _float_ladder(kind: int) -> Any:
    """Return the kernel that calls a float format's microkernel for n rows of float32."""
    one, two, four, eight = (float_tile[kind, tokens] for tokens in FLOAT_TOKENS)

    @named_kernel(f"float_ladder_{kind}")
    def ladder(n: int, tile: Tile, inputs: int, step: int, target: Target) -> None:
        if n == 8:
            eight(tile, inputs, step, target)
        elif n == 4:
            four(tile, inputs, step, target)
        elif n == 2:
            two(tile, inputs, step, target)
        else:
            one(tile, inputs, step, target)

    return ladder


_TILE = numbers_kind(Tile)
TARGET_TYPE = Tuple(Target, (*[INT64] * 5, FLOAT32))
_INT_ARGUMENTS = (INT64, INT64, _TILE, INT64, TARGET_TYPE)
_FLOAT_ARGUMENTS = (INT64, _TILE, INT64, INT64, TARGET_TYPE)

ladders = {
    kind: KernelEntry(_float_ladder(kind), *_FLOAT_ARGUMENTS)
    if form.is_float
    else KernelEntry(_int_ladder(kind), *_INT_ARGUMENTS)
    for kind, form in FORMAT_OF.items()
}
"""Weight format number -> dispatching kernel, called through `int_panel` or `float_rows`."""

int_panel = caller(*_INT_ARGUMENTS)
"""Call `ladders[kind]` with (n, fine, tile, panel, target): multiply tiles by a panel of n tokens.

The call multiplies one tile, or two if panels of n tokens take two tiles at once.
"""
float_rows = caller(*_FLOAT_ARGUMENTS)
"""Call `ladders[kind]` with (n, tile, inputs, step, target) for a tile of float weights.

`inputs` is the address of n = 1, 2, 4 or 8 rows of float32, `step` bytes apart.
"""
