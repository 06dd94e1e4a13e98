"""Lossless repacking of GGUF blocks of 256 weights (Q2_K to Q6_K) into tiles.

Blocks of lattice types are repacked by grid_blocks.py.

A block's codes are handled as 64 words of four codes each. The target layout is in
weight_formats.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.linear.grid_blocks import pack_grid_blocks
from kvboost_edge.kernels.linear.weight_formats import (
    BLOCK_GROUPS,
    FORMATS,
    GROUP,
    group_bytes,
    minima_bytes,
    per_kind,
)
from kvboost_edge.kernels.linear.weights import PackedRows, packed_sizes, store_lines
from kvboost_edge.kernels.signature import INT64, array
from kvboost_edge.kernels.vectors import LANES, address_of, load_i32

__all__ = ["BLOCK_WEIGHTS", "blocks_entry", "pack_blocks"]

BLOCK_WEIGHTS = BLOCK_GROUPS * GROUP
_Q2K = FORMATS["q2k"].kind
_Q3K = FORMATS["q3k"].kind
_Q5K = FORMATS["q5k"].kind
_Q6K = FORMATS["q6k"].kind
_BITS = per_kind("bits")
_PARTS = per_kind("parts")
_QUADS = GROUP // 4
_BLOCK_QUADS = BLOCK_WEIGHTS // 4
# Offsets of a block's sections in words.
_CODES_Q2K = 16 // 4
_D_Q2K = 80 // 4
_LOW_Q3K = 32 // 4
_SCALES_Q3K = 96 // 4
_D_Q3K = 108 // 4
_HIGH_Q5K = 16 // 4
_LOW_Q5K = 48 // 4
_LOW_Q4K = 16 // 4
_HIGH_Q6K = 128 // 4
_SCALES_Q6K = 192 // 4
_D_Q6K = 208 // 4
_NIBBLES = np.uint32(0x0F0F0F0F)
_ONES = np.uint32(0x01010101)
_THREES = np.uint32(0x03030303)

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]
Words = npt.NDArray[np.uint32]


def pack_blocks(blocks: Bytes, name: str) -> PackedRows:
    """Pack rows of GGUF blocks as tiles.

    Args:
        blocks: uint8 [rows, bytes per row], as in the file.
        name: name of a weight format with blocks.

    Raises:
        ConfigError: the format has no blocks, or the rows are not whole blocks.
    """
    rows, width = blocks.shape
    form = FORMATS[name]
    nbytes = form.block_bytes
    if not nbytes:
        known = [other.name for other in FORMATS.values() if other.block_bytes]
        raise ConfigError(f"{name!r} is not a format of GGUF blocks; choose one of {known}")
    if width % nbytes:
        raise ConfigError(
            f"rows of {width} bytes are not a multiple of the {nbytes} bytes of a {name!r} block"
        )
    inputs = width // nbytes * BLOCK_WEIGHTS
    codes, scales, minima = (
        np.zeros(size, dtype=np.uint8) for size in packed_sizes(rows, inputs, name)
    )
    if form.grid is not None:
        pack_grid_blocks(blocks, form, codes, scales, minima)
        return PackedRows(codes, scales, minima)
    words = codes.view(np.uint32)
    halves = minima.view(np.uint16)
    read = np.zeros((nbytes + 3) // 4 * LANES, np.uint32)
    unpacked = np.zeros(_BLOCK_QUADS * LANES, np.uint32)
    blocks = np.ascontiguousarray(blocks)
    _pack(blocks, form.kind, nbytes, words, scales, halves, read, unpacked)
    return PackedRows(codes, scales, minima)


@kernel
def _pack(
    blocks: Bytes,
    kind: int,
    nbytes: int,
    out: Words,
    scales: Bytes,
    minima: Halves,
    words: Words,
    codes: Words,
) -> None:
    """Pack blocks of 256 weights, 16 rows at a time; rows that pad the last tile are 0.

    Args:
        blocks: uint8 [rows, blocks * nbytes].
        kind: number of the weight format.
        nbytes: bytes per block.
        out: uint32 view of the codes, written.
        scales: uint8, scales (and minima) of the groups, written.
        minima: uint16 view of the blocks' float16 factors as bits, written.
        words: uint32, zeros, the words of a block for each of 16 rows.
        codes: uint32, room for the codes of a block for each of 16 rows.
    """
    rows = blocks.shape[0]
    count = blocks.shape[1] // nbytes
    # Word w of lane l is at index w * LANES + l, so each operation on a word handles 16 rows at
    # once.
    bits = _BITS[kind]
    parts = _PARTS[kind]
    group_words = group_bytes(kind) // 4
    minima_each = minima_bytes(kind, 1) // 2
    for tile in range((rows + LANES - 1) // LANES):
        lanes = min(LANES, rows - tile * LANES)
        if lanes < LANES:
            words[:] = 0
        for index in range(count):
            place = tile * count + index
            for lane in range(lanes):
                _read_words(
                    address_of(blocks) + ((tile * LANES + lane) * count + index) * nbytes,
                    nbytes,
                    words,
                    lane,
                )
            scales_at = place * BLOCK_GROUPS * 2 * LANES
            numbers = 0
            if kind == _Q6K:
                _codes_q6k(words, codes)
                _bytes_of_parts(words, _SCALES_Q6K, scales, scales_at)
                numbers = _D_Q6K
            elif kind == _Q3K:
                _codes_q3k(words, codes)
                _scales_q3k(words, scales, scales_at)
                numbers = _D_Q3K
            elif kind == _Q2K:
                _low_two_bits(words, _CODES_Q2K, codes)
                _bytes_of_parts(words, 0, scales, scales_at)
                numbers = _D_Q2K
            else:
                _codes_of_pairs(words, codes, kind)
                _scales_of_groups(words, scales, scales_at)
            for at in range(0, minima_each, LANES):
                for lane in range(LANES):
                    minima[place * minima_each + at + lane] = np.uint16(
                        words[numbers * LANES + lane] >> np.uint32(at)
                    )
            for group in range(BLOCK_GROUPS):
                at = (place * BLOCK_GROUPS + group) * group_words
                for part in range(parts):
                    quads = _QUADS // parts
                    first = group * _QUADS + quads * part
                    store_lines(codes, first, quads, bits, out, at + part * (group_words // parts))


@kernel
def _read_words(at: int, nbytes: int, words: Words, lane: int) -> None:
    """Read a block's bytes as words of one lane; a trailing half word fills a low half."""
    for w in range(nbytes // 4):
        words[w * LANES + lane] = np.uint32(load_i32(at + 4 * w))
    if nbytes % 4:
        words[nbytes // 4 * LANES + lane] = np.uint32(load_i32(at + nbytes - 4)) >> np.uint32(16)


@kernel
def _low_two_bits(words: Words, first: int, codes: Words) -> None:
    """Unpack the codes of Q2_K, or the low two bits of those of Q3_K, from word `first` on.

    Every 32 bytes hold the bits of four groups, the first group in the lowest bits.
    """
    for group in range(BLOCK_GROUPS):
        start = first + group // 4 * _QUADS
        shift = np.uint32(2 * (group % 4))
        for i in range(_QUADS * LANES):
            codes[group * _QUADS * LANES + i] = words[start * LANES + i] >> shift & _THREES


@kernel
def _codes_q3k(words: Words, codes: Words) -> None:
    """Unpack the codes of Q3_K.

    Bit g of the 32 bytes before the low bits is the high bit of group g.
    """
    _low_two_bits(words, _LOW_Q3K, codes)
    for group in range(BLOCK_GROUPS):
        for i in range(_QUADS * LANES):
            high = words[i] >> np.uint32(group) & _ONES
            codes[group * _QUADS * LANES + i] |= high << np.uint32(2)


@kernel
def _scales_q3k(words: Words, scales: Bytes, at: int) -> None:
    """Unpack the 16 scales of Q3_K to signed bytes.

    The low nibbles of 8 bytes form the first 8 scales, the high nibbles the others. The 4 bytes
    after them hold bits 4 and 5 of four scales each, those of scales 0 to 3 in the lowest bits. The
    offset of the scales is 32.
    """
    for part in range(2 * BLOCK_GROUPS):
        byte = np.uint32(8 * (part % 4))
        nibble = np.uint32(4 * (part // 8))
        pair = np.uint32(2 * (part // 4))
        for lane in range(LANES):
            low = words[(_SCALES_Q3K + part // 4 % 2) * LANES + lane] >> byte >> nibble
            high = words[(_SCALES_Q3K + 2) * LANES + lane] >> byte >> pair
            scale = low & np.uint32(15) | (high & np.uint32(3)) << np.uint32(4)
            scales[at + part * LANES + lane] = np.uint8(scale + np.uint32(224))


@kernel
def _codes_of_pairs(words: Words, codes: Words, kind: int) -> None:
    """Unpack the codes of Q4_K and Q5_K.

    The low nibbles of 32 bytes form one group, the high nibbles the next group. In Q5_K, the 32
    bytes before them hold bit 4 of all groups: bit g of these bytes belongs to group g.
    """
    start = _LOW_Q5K if kind == _Q5K else _LOW_Q4K
    for pair in range(BLOCK_GROUPS // 2):
        for i in range(_QUADS * LANES):
            word = words[(start + pair * _QUADS) * LANES + i]
            codes[2 * pair * _QUADS * LANES + i] = word & _NIBBLES
            codes[(2 * pair + 1) * _QUADS * LANES + i] = word >> np.uint32(4) & _NIBBLES
    if kind == _Q5K:
        for group in range(BLOCK_GROUPS):
            for i in range(_QUADS * LANES):
                bits = words[_HIGH_Q5K * LANES + i] >> np.uint32(group) & _ONES
                codes[group * _QUADS * LANES + i] |= bits << np.uint32(4)


@kernel
def _codes_q6k(words: Words, codes: Words) -> None:
    """Unpack the codes of Q6_K.

    The low nibbles of 64 bytes form two groups, the high nibbles the next two groups. In the bytes
    after all nibbles, every 32 bytes hold bits 4 and 5 of four groups.
    """
    for half in range(2):
        for i in range(2 * _QUADS * LANES):
            word = words[half * 2 * _QUADS * LANES + i]
            codes[half * 4 * _QUADS * LANES + i] = word & _NIBBLES
            codes[(half * 4 + 2) * _QUADS * LANES + i] = word >> np.uint32(4) & _NIBBLES
        for group in range(4):
            for i in range(_QUADS * LANES):
                bits = (
                    words[(_HIGH_Q6K + half * _QUADS) * LANES + i] >> np.uint32(2 * group) & _THREES
                )
                codes[(half * 4 + group) * _QUADS * LANES + i] |= bits << np.uint32(4)


@kernel
def _scales_of_groups(words: Words, scales: Bytes, at: int) -> None:
    """Unpack the 6-bit scales and minima of Q4_K and Q5_K (words 1 to 3) to one byte each."""
    for group in range(BLOCK_GROUPS):
        shift = np.uint32(8 * (group % 4))
        for lane in range(LANES):
            first = words[LANES + lane] >> shift
            second = words[2 * LANES + lane] >> shift
            if group < 4:
                scale = first & np.uint32(63)
                minimum = second & np.uint32(63)
            else:
                both = words[3 * LANES + lane] >> shift
                scale = both & np.uint32(15) | (first >> np.uint32(6) & np.uint32(3)) << np.uint32(
                    4
                )
                minimum = both >> np.uint32(4) & np.uint32(15) | (
                    second >> np.uint32(6) & np.uint32(3)
                ) << np.uint32(4)
            place = at + group * 2 * LANES + lane
            scales[place] = np.uint8(scale)
            scales[place + LANES] = np.uint8(minimum)


@kernel
def _bytes_of_parts(words: Words, first: int, scales: Bytes, at: int) -> None:
    """Store one byte for each part: the scales of Q6_K, or the scales and minima of Q2_K.

    `first` is the word with those of the first four parts.
    """
    for part in range(2 * BLOCK_GROUPS):
        shift = np.uint32(8 * (part % 4))
        for lane in range(LANES):
            scales[at + part * LANES + lane] = np.uint8(
                words[(first + part // 4) * LANES + lane] >> shift
            )


_BYTES = array("uint8")
_WORDS = array("uint32")
_HALVES = array("uint16")
blocks_entry = KernelEntry(
    _pack, array("uint8", 2), INT64, INT64, _WORDS, _BYTES, _HALVES, _WORDS, _WORDS
)
"""Entry of `pack_blocks` for ahead-of-time compilation."""
