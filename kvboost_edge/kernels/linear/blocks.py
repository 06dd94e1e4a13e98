"""Blocks of 256 weights as GGUF files hold them, Q4_K, Q5_K and Q6_K, into tiles of the block kinds: every bit is kept.

A block's codes are taken as 64 words of four; where they and their scales go is said in layout.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba.core import types

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.entry import Entry
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.linear.dot import GROUP, KIND_Q4K, KIND_Q5K, KIND_Q6K
from kvboost_edge.kernels.linear.layout import (
    BLOCK_GROUPS,
    group_bytes_kernel,
    high_shift_kernel,
    minima_bytes_kernel,
)
from kvboost_edge.kernels.linear.weights import PackedRows, packed_sizes
from kvboost_edge.kernels.vectors import LANES

__all__ = ["BLOCK_BYTES", "BLOCK_WEIGHTS", "blocks_entry", "pack_blocks"]

BLOCK_WEIGHTS = BLOCK_GROUPS * GROUP
BLOCK_BYTES = {KIND_Q4K: 144, KIND_Q5K: 176, KIND_Q6K: 210}
"""Kind -> bytes of a block in the file."""

_QUADS = GROUP // 4
_BLOCK_QUADS = BLOCK_WEIGHTS // 4
_HIGH_Q5K, _LOW_Q5K, _LOW_Q4K = 16 // 4, 48 // 4, 16 // 4  # words of a block
_HIGH_Q6K, _SCALES_Q6K, _D_Q6K = 128 // 4, 192, 208
_NIBBLES, _ONES, _THREES = np.uint32(0x0F0F0F0F), np.uint32(0x01010101), np.uint32(0x03030303)

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]


def pack_blocks(blocks: Bytes, kind: int) -> PackedRows:
    """Pack rows of whole blocks, uint8 [rows, bytes of a row], as the file holds them."""
    rows, width = blocks.shape
    if kind not in BLOCK_BYTES or width % BLOCK_BYTES[kind]:
        raise ConfigError(f"rows of {width} bytes are not whole blocks of weight kind {kind}")
    inputs = width // BLOCK_BYTES[kind] * BLOCK_WEIGHTS
    codes, scales, minima = (np.zeros(size, dtype=np.uint8) for size in packed_sizes(rows, inputs, kind))
    _pack(np.ascontiguousarray(blocks), kind, BLOCK_BYTES[kind], codes.view(np.uint32), scales, minima)
    return PackedRows(codes, scales, minima)


@kernel
def _pack(blocks: Bytes, kind: int, nbytes: int, out: Words, scales: Bytes, minima: Bytes) -> None:
    rows, count = blocks.shape[0], blocks.shape[1] // nbytes
    block = np.zeros(256, np.uint8)
    words, codes = block.view(np.uint32), np.zeros(_BLOCK_QUADS, np.uint32)
    group_words, minima_each = group_bytes_kernel(kind) // 4, minima_bytes_kernel(kind, 1)
    for tile in range((rows + LANES - 1) // LANES):
        for index in range(count):
            place = tile * count + index
            for lane in range(min(LANES, rows - tile * LANES)):
                start, row = index * nbytes, tile * LANES + lane
                for i in range(nbytes):
                    block[i] = blocks[row, start + i]
                if kind == KIND_Q6K:
                    _codes_q6k(words, codes)
                    _scales_q6k(block, scales, place * BLOCK_GROUPS * 2 * LANES + lane)
                    halves, first = 1, _D_Q6K
                else:
                    _codes_of_pairs(words, codes, kind)
                    _scales_of_groups(block, scales, place * BLOCK_GROUPS * 2 * LANES + lane)
                    halves, first = 2, 0
                for half in range(halves):
                    at = place * minima_each + 2 * (half * LANES + lane)
                    minima[at], minima[at + 1] = block[first + 2 * half], block[first + 2 * half + 1]
                for group in range(BLOCK_GROUPS):
                    at = (place * BLOCK_GROUPS + group) * group_words + lane
                    if kind == KIND_Q6K:
                        for part in range(2):
                            _store_part(codes, group * _QUADS + 4 * part, 4, kind, out, at + part * 3 * LANES)
                    else:
                        _store_part(codes, group * _QUADS, _QUADS, kind, out, at)


@kernel
def _store_part(codes: Words, first: int, quads: int, kind: int, out: Words, at: int) -> None:
    """Quads of a row's group, or of a half of it: lines of nibbles, and the bits above them."""
    above = np.uint32(0)
    for quad in range(0, quads, 2):
        low, high = codes[first + quad], codes[first + quad + 1]
        out[at + quad // 2 * LANES] = (low & _NIBBLES) | (high & _NIBBLES) << np.uint32(4)
    if kind == KIND_Q4K:
        return
    for quad in range(quads):
        bits = codes[first + quad] >> np.uint32(4) & _NIBBLES
        above |= bits << np.uint32(4 + high_shift_kernel(kind, quad))
    out[at + quads // 2 * LANES] = above


@kernel
def _codes_of_pairs(words: Words, codes: Words, kind: int) -> None:
    """Q4_K and Q5_K: of each 32 bytes the low nibbles are a group, the high ones the next; bit g of 32 bytes before
    them is bit 4 of group g."""
    start = _LOW_Q5K if kind == KIND_Q5K else _LOW_Q4K
    for pair in range(BLOCK_GROUPS // 2):
        for quad in range(_QUADS):
            word = words[start + pair * _QUADS + quad]
            codes[2 * pair * _QUADS + quad] = word & _NIBBLES
            codes[(2 * pair + 1) * _QUADS + quad] = word >> np.uint32(4) & _NIBBLES
    if kind == KIND_Q5K:
        for group in range(BLOCK_GROUPS):
            for quad in range(_QUADS):
                bits = words[_HIGH_Q5K + quad] >> np.uint32(group) & _ONES
                codes[group * _QUADS + quad] |= bits << np.uint32(4)


@kernel
def _codes_q6k(words: Words, codes: Words) -> None:
    """Q6_K: of each 64 bytes the low nibbles are two groups, the high ones the next two; each 32 bytes behind hold bits
    4 and 5 of four groups."""
    for half in range(2):
        for quad in range(2 * _QUADS):
            word = words[half * 2 * _QUADS + quad]
            codes[half * 4 * _QUADS + quad] = word & _NIBBLES
            codes[half * 4 * _QUADS + 2 * _QUADS + quad] = word >> np.uint32(4) & _NIBBLES
        for group in range(4):
            for quad in range(_QUADS):
                bits = words[_HIGH_Q6K + half * _QUADS + quad] >> np.uint32(2 * group) & _THREES
                codes[(half * 4 + group) * _QUADS + quad] |= bits << np.uint32(4)


@kernel
def _scales_of_groups(block: Bytes, scales: Bytes, at: int) -> None:
    """The 6-bit scales and minima of Q4_K and Q5_K, 12 bytes from byte 4 on, one byte each."""
    for group in range(BLOCK_GROUPS):
        if group < 4:
            scale, minimum = block[4 + group] & 63, block[8 + group] & 63
        else:
            both = block[8 + group]
            scale, minimum = both & 15 | block[group] >> 6 << 4, both >> 4 | block[4 + group] >> 6 << 4
        scales[at + group * 2 * LANES], scales[at + group * 2 * LANES + LANES] = scale, minimum


@kernel
def _scales_q6k(block: Bytes, scales: Bytes, at: int) -> None:
    for part in range(2 * BLOCK_GROUPS):
        scales[at + part * LANES] = block[_SCALES_Q6K + part]


_BYTES = types.Array(types.uint8, 1, "C")
blocks_entry = Entry(
    _pack, types.Array(types.uint8, 2, "C"), types.int64, types.int64, types.Array(types.uint32, 1, "C"), _BYTES, _BYTES
)
"""What `pack_blocks` runs."""
