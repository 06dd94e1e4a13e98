"""A tile or two of weights against a block of tokens, the microkernel chosen at run time by kind and number."""

from __future__ import annotations

from typing import Any

from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.linear.amx import amx_tile
from kvboost_edge.kernels.linear.dot import has_tile_registers
from kvboost_edge.kernels.linear.panel import (
    FINE_TOKENS,
    MATRIX_FINE_TOKENS,
    MATRIX_TOKENS,
    SMALL_TOKENS,
    TILES_AT_ONCE,
    WIDE_FINE_TOKENS,
    WIDE_TOKENS,
)
from kvboost_edge.kernels.linear.tiles import (
    FLOAT_TOKENS,
    KIND_INT4,
    KIND_INT4M,
    KIND_INT8,
    Target,
    Tile,
    float_tile,
    int_tile,
)
from kvboost_edge.kernels.vectors import KIND_BF16, KIND_F32

__all__ = ["float_block", "int_block"]

_MOST, _MOST_FINE = SMALL_TOKENS[-1], FINE_TOKENS[-1]
# Numbers of tokens that take two tiles at once.
_PAIR, _FINE_PAIR = (WIDE_TOKENS, WIDE_FINE_TOKENS) if TILES_AT_ONCE == 2 else (0, 0)


def _kernels(kind: int) -> list[Any]:
    """Every kernel of a kind; a form that lacks a size has another in its place, which is never called."""
    wide = [int_tile[kind, TILES_AT_ONCE, WIDE_TOKENS, False], int_tile[kind, TILES_AT_ONCE, WIDE_FINE_TOKENS, True]]
    coarse = [int_tile[kind, 1, tokens, False] for tokens in (1, 2, min(4, _MOST), _MOST)]
    return wide + coarse + [int_tile[kind, 1, tokens, True] for tokens in (1, 2, _MOST_FINE)]


_INT8_WIDE, _INT8_FWIDE, _INT8_1, _INT8_2, _INT8_4, _INT8_8, _INT8_F1, _INT8_F2, _INT8_F4 = _kernels(KIND_INT8)
_INT4_WIDE, _INT4_FWIDE, _INT4_1, _INT4_2, _INT4_4, _INT4_8, _INT4_F1, _INT4_F2, _INT4_F4 = _kernels(KIND_INT4)
_INT4M_WIDE, _INT4M_FWIDE, _INT4M_1, _INT4M_2, _INT4M_4, _INT4M_8, _INT4M_F1, _INT4M_F2, _INT4M_F4 = _kernels(
    KIND_INT4M
)
_HAS_AMX = has_tile_registers()
_INT8_AMX, _INT8_FAMX = amx_tile[KIND_INT8, False], amx_tile[KIND_INT8, True]
_INT4_AMX, _INT4_FAMX = amx_tile[KIND_INT4, False], amx_tile[KIND_INT4, True]
_INT4M_AMX, _INT4M_FAMX = amx_tile[KIND_INT4M, False], amx_tile[KIND_INT4M, True]
_F32_1, _F32_2, _F32_4, _F32_8 = [float_tile[KIND_F32, tokens] for tokens in FLOAT_TOKENS]
_BF16_1, _BF16_2, _BF16_4, _BF16_8 = [float_tile[KIND_BF16, tokens] for tokens in FLOAT_TOKENS]


@kernel
def _int8(n: int, fine: int, tile: Tile, panel: int, target: Target) -> None:
    if fine != 0:
        if _HAS_AMX and n == MATRIX_FINE_TOKENS:
            _INT8_FAMX(tile, panel, target)
        elif n == _FINE_PAIR:
            _INT8_FWIDE(tile, panel, target)
        elif n == 4:
            _INT8_F4(tile, panel, target)
        elif n == 2:
            _INT8_F2(tile, panel, target)
        else:
            _INT8_F1(tile, panel, target)
    elif _HAS_AMX and n == MATRIX_TOKENS:
        _INT8_AMX(tile, panel, target)
    elif n == _PAIR:
        _INT8_WIDE(tile, panel, target)
    elif n == 8:
        _INT8_8(tile, panel, target)
    elif n == 4:
        _INT8_4(tile, panel, target)
    elif n == 2:
        _INT8_2(tile, panel, target)
    else:
        _INT8_1(tile, panel, target)


@kernel
def _int4(n: int, fine: int, tile: Tile, panel: int, target: Target) -> None:
    if fine != 0:
        if _HAS_AMX and n == MATRIX_FINE_TOKENS:
            _INT4_FAMX(tile, panel, target)
        elif n == _FINE_PAIR:
            _INT4_FWIDE(tile, panel, target)
        elif n == 4:
            _INT4_F4(tile, panel, target)
        elif n == 2:
            _INT4_F2(tile, panel, target)
        else:
            _INT4_F1(tile, panel, target)
    elif _HAS_AMX and n == MATRIX_TOKENS:
        _INT4_AMX(tile, panel, target)
    elif n == _PAIR:
        _INT4_WIDE(tile, panel, target)
    elif n == 8:
        _INT4_8(tile, panel, target)
    elif n == 4:
        _INT4_4(tile, panel, target)
    elif n == 2:
        _INT4_2(tile, panel, target)
    else:
        _INT4_1(tile, panel, target)


@kernel
def _int4m(n: int, fine: int, tile: Tile, panel: int, target: Target) -> None:
    if fine != 0:
        if _HAS_AMX and n == MATRIX_FINE_TOKENS:
            _INT4M_FAMX(tile, panel, target)
        elif n == _FINE_PAIR:
            _INT4M_FWIDE(tile, panel, target)
        elif n == 4:
            _INT4M_F4(tile, panel, target)
        elif n == 2:
            _INT4M_F2(tile, panel, target)
        else:
            _INT4M_F1(tile, panel, target)
    elif _HAS_AMX and n == MATRIX_TOKENS:
        _INT4M_AMX(tile, panel, target)
    elif n == _PAIR:
        _INT4M_WIDE(tile, panel, target)
    elif n == 8:
        _INT4M_8(tile, panel, target)
    elif n == 4:
        _INT4M_4(tile, panel, target)
    elif n == 2:
        _INT4M_2(tile, panel, target)
    else:
        _INT4M_1(tile, panel, target)


@kernel
def int_block(kind: int, n: int, fine: int, tile: Tile, panel: int, target: Target) -> None:
    """A tile, or two where a block of n tokens takes two at once, against a panel of n tokens (see panel.py)."""
    if kind == KIND_INT8:
        _int8(n, fine, tile, panel, target)
    elif kind == KIND_INT4:
        _int4(n, fine, tile, panel, target)
    else:
        _int4m(n, fine, tile, panel, target)


@kernel
def float_block(kind: int, n: int, tile: Tile, inputs: int, step: int, target: Target) -> None:
    """A tile of float weights against n = 1, 2, 4 or 8 rows of float32 at address `inputs`, `step` bytes apart."""
    if kind == KIND_F32:
        if n == 8:
            _F32_8(tile, inputs, step, target)
        elif n == 4:
            _F32_4(tile, inputs, step, target)
        elif n == 2:
            _F32_2(tile, inputs, step, target)
        else:
            _F32_1(tile, inputs, step, target)
    elif n == 8:
        _BF16_8(tile, inputs, step, target)
    elif n == 4:
        _BF16_4(tile, inputs, step, target)
    elif n == 2:
        _BF16_2(tile, inputs, step, target)
    else:
        _BF16_1(tile, inputs, step, target)
