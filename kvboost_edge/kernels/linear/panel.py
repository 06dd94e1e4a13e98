"""Layout of quantized activations for the linear kernels: panels of a few tokens.

A panel of n tokens has one cell per group of 32 inputs:

    section  type and shape            content
    codes    int8 [n][32]              fine: [2][n][32], a code is FINE_BASE * first + second
    terms    int32 or float32 [n]      depends on the weight format, see below
    scales   float32 [n]               scale of the token in this group
    seeds    int32 [3][n]              only for formats with blocks or a table

The term is -(offset * sum of the codes) in int32. For formats with minima it is -(scale * sum of
the codes) in float32.

Matrices in different formats with blocks or a table can share one panel. Its term is that of
formats with minima. The first two seeds are -HALF_OFFSET times the sum of the first and of the last
16 codes. The third seed is -TABLE_OFFSET times the sum of all 32 codes.

Panel sizes depend on the number of tokens and on the machine. Results do not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

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
    "PAIR_FINE_TOKENS",
    "PAIR_TOKENS",
    "SEED_BYTES",
    "SMALL_TOKENS",
    "TILES_AT_ONCE",
    "UNPACKED",
    "bytes_of_cell",
    "cell_bytes",
    "panel_tokens",
    "takes_pair",
    "token_place",
]

FINE_BASE = 255
"""Base of fine codes, odd to keep the bytes of both planes within +-127, like coarse codes."""
COARSE_BYTES = GROUP + 8
FINE_BYTES = 2 * GROUP + 8
SEED_BYTES = 12
"""Size of one token's seeds in a cell, in bytes."""
LARGEST_CELL = FINE_BYTES + SEED_BYTES
_SHARES_PANEL = per_kind("shares_panel")


class _Shapes(NamedTuple):
    """Token counts of a variant's microkernels, measured with benchmarks/bench/bench_linear.py.

    Attributes:
        small: panel sizes for one tile. Passes of up to the largest number of tokens use no others.
        fine: panel sizes for one tile with fine codes.
        pair: panel size for `tiles` tiles, used if there are more tokens than the largest of
            `small`.
        pair_fine: like `pair`, with fine codes.
        tiles: number of tiles multiplied at once with panels of `pair` or `pair_fine` tokens.
        unpacked: (size, fine) of panels whose weights are unpacked first; see unpacked.py.
    """

    small: tuple[int, ...]
    fine: tuple[int, ...]
    pair: int
    pair_fine: int
    tiles: int
    unpacked: tuple[tuple[int, bool], ...] = ()


# With 512-bit registers, the integer and float sums of 6 tokens x 2 tiles and the weights of a quad
# fit in registers. With fine codes, only 3 tokens fit, because each has three sums. With sixteen
# 256-bit registers, larger panels spill. Draft tokens make passes of 2 to 8 tokens frequent. With a
# panel of exactly that many, all weights are read in one run. Two panels of 2 and 1 token take
# longer than one of 4 tokens.
_SHAPES = {
    "vnni512": _Shapes(tuple(range(1, 9)), tuple(range(1, 9)), 6, 3, 2),
    "vnni256": _Shapes((1, 2, 3, 4), (1, 2), 4, 2, 1),
    "avx2": _Shapes((1, 2, 3, 4), (1, 2), 4, 2, 1, ((4, False), (2, True))),
    "i8mm": _Shapes((1, 2, 4), (1, 2), 4, 2, 1),
    "neon": _Shapes((1, 2, 4), (1, 2), 4, 2, 1),
    "plain": _Shapes((1, 2), (1, 2), 2, 2, 1),
}
SMALL_TOKENS, FINE_TOKENS, PAIR_TOKENS, PAIR_FINE_TOKENS, TILES_AT_ONCE, UNPACKED = _SHAPES[
    dot_form()
]
# Panel sizes for AMX; see amx.py. Without AMX, no panel reaches these sizes.
MATRIX_TOKENS, MATRIX_FINE_TOKENS = (32, 16) if has_tile_registers() else (1 << 30, 1 << 30)
# The largest panel for one tile of at most so many tokens, by whether codes are fine.
_LARGEST = np.array(
    [
        [max((size for size in sizes if size <= tokens), default=0) for tokens in range(9)]
        for sizes in (SMALL_TOKENS, FINE_TOKENS)
    ]
)


def bytes_of_cell(fine: int, kind: int) -> int:
    """Return the bytes per token in a cell of a weight format."""
    return (FINE_BYTES if fine != 0 else COARSE_BYTES) + SEED_BYTES * int(_SHARES_PANEL[kind])


cell_bytes = kernel(bytes_of_cell)
"""`bytes_of_cell` as a kernel."""


@kernel
def panel_tokens(left: int, total: int, fine: int, matrix: int) -> int:
    """Return the number of tokens in the next panel.

    Args:
        left: tokens that are not in a panel yet.
        total: tokens of the pass.
        fine: nonzero for fine codes.
        matrix: nonzero if panels may have AMX sizes.
    """
    if total > SMALL_TOKENS[-1]:
        largest = MATRIX_FINE_TOKENS if fine != 0 else MATRIX_TOKENS
        if matrix == 0 or left < largest:
            largest = PAIR_FINE_TOKENS if fine != 0 else PAIR_TOKENS
        if left >= largest:
            return largest
    return int(_LARGEST[int(fine != 0), left])


@kernel
def takes_pair(size: int, total: int, fine: int) -> bool:
    """Return whether a panel of `size` of `total` tokens is multiplied by two tiles at once."""
    pair, most = (
        (PAIR_FINE_TOKENS, MATRIX_FINE_TOKENS) if fine != 0 else (PAIR_TOKENS, MATRIX_TOKENS)
    )
    return TILES_AT_ONCE == 2 and total > SMALL_TOKENS[-1] and size in (pair, most)


@kernel
def token_place(token: int, total: int, fine: int, matrix: int) -> Any:
    """Return the first token and the size of the panel that holds a token."""
    first = 0
    if total > SMALL_TOKENS[-1]:
        largest = panel_tokens(total, total, fine, matrix)
        first = min(token // largest, total // largest) * largest
    size = panel_tokens(total - first, total, fine, matrix)
    while token >= first + size:
        first += size
        size = panel_tokens(total - first, total, fine, matrix)
    return first, size
