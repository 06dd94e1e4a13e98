"""How quantized tokens lie in memory for the linear kernels: panels of a few tokens, group by
group.

The tokens of a pass are cut into panels; a panel of n tokens has one cell per group of 32 inputs:

    int8 codes [n][32] | 4 bytes per token: the term | float32 scale per token

A fine cell has two planes of codes, [2][n][32]: a code is FINE_BASE * first + second. The term is
what the kernel needs beside the codes, and depends on the kind of the weights that will read it:
minus the offset of the stored weights times the sum of the codes, int32; for formats with minima
minus that sum times the scale, float32.

Formats with blocks or a table share a form, so that matrices of different ones can read one panel:
the term is that of formats with minima, and after the scales follow the seeds, int32 [3][n]: minus
HALF_OFFSET times the sum of each token's first 16 codes, and of its last 16; and minus TABLE_OFFSET
times the sum of all 32.

The panels' sizes depend on the number of tokens and on the machine; results do not depend on them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvboost_edge.kernels.integers import dot_form, has_tile_registers
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.linear.weight_formats import GROUP, per_kind

__all__ = [
    "COARSE_BYTES",
    "FINE_BASE",
    "FINE_BYTES",
    "FINE_TOKENS",
    "LARGEST_CELL",
    "MATRIX_FINE_TOKENS",
    "MATRIX_TOKENS",
    "SEED_BYTES",
    "SMALL_TOKENS",
    "TILES_AT_ONCE",
    "UNPACKED",
    "WIDE_FINE_TOKENS",
    "WIDE_TOKENS",
    "bytes_of_cell",
    "cell_bytes",
    "panel_tokens",
    "takes_pair",
    "token_place",
]

FINE_BASE = 255
"""Codes of a fine plane stay within +-127, as those of a coarse one, because the base is odd."""
COARSE_BYTES = GROUP + 8
FINE_BYTES = 2 * GROUP + 8
SEED_BYTES = 12
"""Of a token's seeds in a cell."""
LARGEST_CELL = FINE_BYTES + SEED_BYTES
_SHARES_PANEL = per_kind("shares_panel")


class _Shapes(NamedTuple):
    """Tokens that a microkernel of a form takes; measured, see benchmarks/bench/bench_linear.py.

    Attributes:
        small, fine: sizes of panels against one tile, coarse and fine.
        wide, wide_fine: the size where there are more tokens than the largest of `small`, against
            `tiles` tiles.
        unpacked: sizes, and whether fine, that take weights unpacked beforehand (see unpacked.py).
    """

    small: tuple[int, ...]
    fine: tuple[int, ...]
    wide: int
    wide_fine: int
    tiles: int
    unpacked: tuple[tuple[int, bool], ...] = ()


# 512-bit registers hold 6 tokens x 2 tiles of sums twice over (integers and floats; fine: 3 tokens,
# three times over) and the weights of a quad. With 16 registers of half the size, more than this
# spills.
_SHAPES = {
    "vnni512": _Shapes((1, 2, 4, 8), (1, 2, 4), 6, 3, 2),
    "vnni256": _Shapes((1, 2, 4), (1, 2), 4, 2, 1),
    "avx2": _Shapes((1, 2, 4), (1, 2), 4, 2, 1, ((4, False), (2, True))),
    "neon": _Shapes((1, 2, 4), (1, 2), 4, 2, 1),
    "plain": _Shapes((1, 2), (1, 2), 2, 2, 1),
}
SMALL_TOKENS, FINE_TOKENS, WIDE_TOKENS, WIDE_FINE_TOKENS, TILES_AT_ONCE, UNPACKED = _SHAPES[
    dot_form()
]
# Panels for tile registers, see amx.py; where there are none, no panel is as large as this.
MATRIX_TOKENS, MATRIX_FINE_TOKENS = (32, 16) if has_tile_registers() else (1 << 30, 1 << 30)


def bytes_of_cell(fine: int, kind: int) -> int:
    """Bytes that a token takes in a cell for weights of a kind."""
    return (FINE_BYTES if fine != 0 else COARSE_BYTES) + SEED_BYTES * int(_SHARES_PANEL[kind])


cell_bytes = kernel(bytes_of_cell)
"""The same inside kernels."""


@kernel
def panel_tokens(left: int, total: int, fine: int, matrix: int) -> int:
    """Tokens in the next panel, where `left` of `total` tokens are not yet in one; matrix: whether
    (not 0) panels may be as large as tile registers take.
    """
    if total <= SMALL_TOKENS[-1]:
        largest = FINE_TOKENS[-1] if fine != 0 else SMALL_TOKENS[-1]
    else:
        largest = MATRIX_FINE_TOKENS if fine != 0 else MATRIX_TOKENS
        if matrix == 0 or left < largest:
            largest = WIDE_FINE_TOKENS if fine != 0 else WIDE_TOKENS
    if left >= largest:
        return largest
    if left >= 4:
        return 4
    return 2 if left >= 2 else 1


@kernel
def takes_pair(size: int, fine: int) -> bool:
    """Whether a panel of so many tokens goes against two tiles at once."""
    wide, most = (
        (WIDE_FINE_TOKENS, MATRIX_FINE_TOKENS) if fine != 0 else (WIDE_TOKENS, MATRIX_TOKENS)
    )
    return TILES_AT_ONCE == 2 and size in (wide, most)


@kernel
def token_place(token: int, total: int, fine: int, matrix: int) -> Any:
    """(first token of the panel a token is in, tokens of that panel)."""
    first = 0
    if total > SMALL_TOKENS[-1]:
        largest = panel_tokens(total, total, fine, matrix)
        first = min(token // largest, total // largest) * largest
    size = panel_tokens(total - first, total, fine, matrix)
    while token >= first + size:
        first += size
        size = panel_tokens(total - first, total, fine, matrix)
    return first, size
