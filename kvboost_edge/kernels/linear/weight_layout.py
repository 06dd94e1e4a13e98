"""Where the weights of the integer kinds lie: bytes of a group of 16 rows x 32 inputs, and the
planes of its codes.

int8: 8 lines of 64 bytes, a quad each. Other kinds: lines of two quads, the low nibbles quad 2j,
the high ones quad 2j + 1. Codes of 5 and 6 bits have a plane of the bits above the nibbles behind
them:

    q5k   4 lines of nibbles | 1 line: bit 4 of quad k is bit (4 + k) % 8 of a byte
    q6k   two halves of 16 inputs, each 2 lines of nibbles | 1 line: bits 4 and 5 of the half's quad
          k are the two bits from (4 + 2k) % 8 on

The block kinds q4k, q5k and q6k have 32 bytes of scales a group, and float16 numbers for every 8
groups (where others have minima):

    q4k, q5k   uint8 scales [16], uint8 minima [16]     float16 d [16], dmin [16]    d * scale *
               code - dmin * minimum
    q6k        int8 scales [2][16], one a half          float16 d [16]               d * scale *
               (code - 32)

The products of d and a scale, and of dmin and a minimum, are exact in float32.

int4t has the lines and the scales of int4. Its nibbles choose among 16 signed bytes, the table,
which stands once for each tile where others have minima: rows of one matrix may have different
tables.
"""

from __future__ import annotations

from typing import Any

from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.linear.weight_dot import (
    CODE_BITS,
    GROUP,
    KIND_INT4_ASYM,
    KIND_INT4T,
    KIND_INT8,
    KIND_Q4K,
    KIND_Q5K,
    KIND_Q6K,
)
from kvboost_edge.kernels.vectors import LANES

__all__ = [
    "BLOCK_GROUPS",
    "PARTS",
    "SCALE_BYTES",
    "TABLE_BYTES",
    "group_bytes",
    "group_bytes_kernel",
    "has_minima",
    "high_shift",
    "high_shift_kernel",
    "minima_bytes",
    "minima_bytes_kernel",
]

BLOCK_GROUPS = 8
"""Groups of a block of 256 inputs."""
SCALE_BYTES = 2 * LANES
"""Bytes of a group's scales, of every kind."""
TABLE_BYTES = 16
"""Bytes of a tile's table: int8 by code."""
PARTS = {kind: 2 if kind == KIND_Q6K else 1 for kind in CODE_BITS}
"""Parts of a group that have scales of their own."""


def group_bytes(kind: int) -> int:
    """Bytes of the codes of a group."""
    if kind == KIND_INT8:
        return GROUP * LANES
    bits = 6 if kind == KIND_Q6K else (5 if kind == KIND_Q5K else 4)
    return GROUP * LANES * bits // 8


def minima_bytes(kind: int, groups: int) -> int:
    """Bytes of a tile's minima, of its blocks' float16 numbers, or of its table; 0 where a kind has
    none of them.
    """
    if kind == KIND_INT4_ASYM:
        return groups * 2 * LANES
    if kind == KIND_INT4T:
        return TABLE_BYTES
    blocks = (groups + BLOCK_GROUPS - 1) // BLOCK_GROUPS
    if kind == KIND_Q6K:
        return blocks * 2 * LANES
    return blocks * 4 * LANES if kind >= KIND_Q4K else 0


def high_shift(kind: int, quad: int) -> Any:
    """How far right the bits above a quad's nibbles are shifted to stand above them; negative: to
    the left. `quad`: of the group, or of a half of KIND_Q6K.
    """
    return (4 + quad) % 8 - 4 if kind == KIND_Q5K else (4 + 2 * quad) % 8 - 4


def has_minima(kind: int) -> bool:
    """Whether a scaled code has a minimum taken off."""
    return kind in (KIND_INT4_ASYM, KIND_Q4K, KIND_Q5K)


# The same inside kernels.
group_bytes_kernel = kernel(group_bytes)
minima_bytes_kernel = kernel(minima_bytes)
high_shift_kernel = kernel(high_shift)
