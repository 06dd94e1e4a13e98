"""Dispatch of linear kernels: each weight format's entry picks a microkernel by token count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvboost_edge.kernels.entry import KernelEntry, caller
from kvboost_edge.kernels.integers import has_tile_registers
from kvboost_edge.kernels.jit import named_kernel
from kvboost_edge.kernels.linear.amx import amx_tile
from kvboost_edge.kernels.linear.panel import (
    FINE_TOKENS,
    MATRIX_FINE_TOKENS,
    MATRIX_TOKENS,
    PAIR_FINE_TOKENS,
    PAIR_TOKENS,
    SMALL_TOKENS,
    TILES_AT_ONCE,
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

_SIZES = range(1, 9)
_HAS = tuple(size in SMALL_TOKENS for size in _SIZES)
_HAS_FINE = tuple(size in FINE_TOKENS for size in _SIZES)
_HAS_AMX = has_tile_registers()
_HAS_PAIRS = TILES_AT_ONCE == 2


def _int_ladder(kind: int) -> Any:
    """Return the kernel that calls an integer format's microkernel for n tokens and some tiles."""
    # If the dot-product variant has no microkernel for a size, another takes its place here. Numba
    # never compiles or calls that one, because the conditions are constants.
    amx = amx_tile[kind, False]
    fine_amx = amx_tile[kind, True]
    pair = int_tile[kind, TILES_AT_ONCE, PAIR_TOKENS, False]
    fine_pair = int_tile[kind, TILES_AT_ONCE, PAIR_FINE_TOKENS, True]
    _, has2, has3, has4, has5, has6, has7, has8 = _HAS
    _, fine2, fine3, fine4, fine5, fine6, fine7, fine8 = _HAS_FINE
    t1, t2, t3, t4, t5, t6, t7, t8 = _single_tiles(kind, _HAS, fine=False)
    f1, f2, f3, f4, f5, f6, f7, f8 = _single_tiles(kind, _HAS_FINE, fine=True)

    @named_kernel(f"int_ladder_{kind}")
    def ladder(n: int, tiles: int, fine: int, tile: Tile, panel: int, target: Target) -> None:
        if fine != 0:
            if _HAS_AMX and n == MATRIX_FINE_TOKENS:
                fine_amx(tile, panel, target)
            elif _HAS_PAIRS and tiles == 2:
                fine_pair(tile, panel, target)
            elif fine2 and n == 2:
                f2(tile, panel, target)
            elif fine3 and n == 3:
                f3(tile, panel, target)
            elif fine4 and n == 4:
                f4(tile, panel, target)
            elif fine5 and n == 5:
                f5(tile, panel, target)
            elif fine6 and n == 6:
                f6(tile, panel, target)
            elif fine7 and n == 7:
                f7(tile, panel, target)
            elif fine8 and n == 8:
                f8(tile, panel, target)
            else:
                f1(tile, panel, target)
        elif _HAS_AMX and n == MATRIX_TOKENS:
            amx(tile, panel, target)
        elif _HAS_PAIRS and tiles == 2:
            pair(tile, panel, target)
        elif has2 and n == 2:
            t2(tile, panel, target)
        elif has3 and n == 3:
            t3(tile, panel, target)
        elif has4 and n == 4:
            t4(tile, panel, target)
        elif has5 and n == 5:
            t5(tile, panel, target)
        elif has6 and n == 6:
            t6(tile, panel, target)
        elif has7 and n == 7:
            t7(tile, panel, target)
        elif has8 and n == 8:
            t8(tile, panel, target)
        else:
            t1(tile, panel, target)

    return ladder


def _single_tiles(kind: int, has: Sequence[bool], *, fine: bool) -> list[Any]:
    """Return the microkernels of one tile by panel size, with that of 1 token for missing ones."""
    return [
        int_tile[kind, 1, size if present else 1, fine]
        for size, present in zip(_SIZES, has, strict=True)
    ]


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
_INT_ARGUMENTS = (INT64, INT64, INT64, _TILE, INT64, TARGET_TYPE)
_FLOAT_ARGUMENTS = (INT64, _TILE, INT64, INT64, TARGET_TYPE)

ladders = {
    kind: KernelEntry(_float_ladder(kind), *_FLOAT_ARGUMENTS)
    if form.is_float
    else KernelEntry(_int_ladder(kind), *_INT_ARGUMENTS)
    for kind, form in FORMAT_OF.items()
}
"""Weight format number -> dispatching kernel, called through `int_panel` or `float_rows`."""

int_panel = caller(*_INT_ARGUMENTS)
"""Call `ladders[kind]` with (n, tiles, fine, tile, panel, target).

The call multiplies one or two `tiles` at once by a panel of n tokens.
"""
float_rows = caller(*_FLOAT_ARGUMENTS)
"""Call `ladders[kind]` with (n, tile, inputs, step, target) for a tile of float weights.

`inputs` is the address of n = 1, 2, 4 or 8 rows of float32, `step` bytes apart.
"""
