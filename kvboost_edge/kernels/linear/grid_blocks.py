"""Lossless repacking of GGUF blocks of lattice types (IQ1 to IQ3) into tiles.

The target layout is in weight_formats.py. Offsets are those of llama.cpp's blocks (ggml-common.h).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.linear.weight_formats import (
    BLOCK_GROUPS,
    FORMATS,
    GROUP,
    WeightFormat,
    group_bytes,
    per_kind,
)
from kvboost_edge.kernels.signature import INT64, array
from kvboost_edge.kernels.vectors import LANES

__all__ = ["grid_blocks_entry", "pack_grid_blocks"]

Bytes = npt.NDArray[np.uint8]

_IQ3S, _IQ3XXS, _IQ2XXS, _IQ2XS, _IQ2S = (
    FORMATS[name].kind for name in ("iq3s", "iq3xxs", "iq2xxs", "iq2xs", "iq2s")
)
_IQ1S, _IQ1M = (FORMATS[name].kind for name in ("iq1s", "iq1m"))
_SCALES_IQ1M = 48
_PARTS, _ENTRIES, _INDEX_BITS, _SCALE_SIZE = (
    per_kind(name) for name in ("parts", "part_entries", "index_bits", "scale_size")
)


def pack_grid_blocks(
    blocks: Bytes, form: WeightFormat, codes: Bytes, scales: Bytes, minima: Bytes
) -> None:
    """Pack rows of GGUF blocks as tiles.

    Args:
        blocks: uint8 [rows, bytes per row], as in the file.
        form: a weight format with a grid.
        codes: zeros, written.
        scales: zeros, written.
        minima: zeros, written.
    """
    _pack(np.ascontiguousarray(blocks), form.kind, form.block_bytes, codes, scales, minima)


@kernel
def _pack(
    blocks: Bytes, kind: int, nbytes: int, codes: Bytes, scales: Bytes, minima: Bytes
) -> None:
    """Pack blocks of 256 weights; see `pack_grid_blocks`."""
    rows = blocks.shape[0]
    count = blocks.shape[1] // nbytes
    parts = _PARTS[kind]
    entries = _ENTRIES[kind]
    above = _INDEX_BITS[kind] - 8
    size = group_bytes(kind) // parts
    quads = GROUP // 4 // parts
    for row in range(rows):
        lane = row % LANES
        for index in range(count):
            block = blocks[row, index * nbytes : (index + 1) * nbytes]
            place = row // LANES * count + index
            if kind in (_IQ1S, _IQ1M):
                _pack_deltas(block, kind, place, lane, codes, scales, minima)
                continue
            minima[place * 2 * LANES + 2 * lane] = block[0]
            minima[place * 2 * LANES + 2 * lane + 1] = block[1]
            for group in range(BLOCK_GROUPS):
                here = place * BLOCK_GROUPS + group
                for part in range(parts):
                    at = (here * parts + part) * size
                    signs = at + LANES * entries
                    bits = signs + LANES // 2 * quads
                    for entry in range(entries):
                        number = _index(block, kind, group, part * entries + entry)
                        codes[at + LANES * entry + lane] = np.uint8(number & 255)
                        for bit in range(above):
                            one = number >> (8 + bit) & 1
                            to = bits + LANES // 8 * (above * entry + bit) + lane // 8
                            codes[to] |= np.uint8(one << lane % 8)
                    for pair in range(quads // 2):
                        byte = _signs(block, kind, group, part * (quads // 2) + pair)
                        to = signs + LANES * pair + lane // 2
                        shift = 4 * (lane % 2)
                        codes[to] |= np.uint8((byte & 15) << shift)
                        codes[to + LANES // 2] |= np.uint8(byte >> 4 << shift)
                _store_scales(block, kind, group, lane, scales, here * _SCALE_SIZE[kind])


@kernel
def _pack_deltas(
    block: Bytes, kind: int, place: int, lane: int, codes: Bytes, scales: Bytes, minima: Bytes
) -> None:
    """Pack a row's block of IQ1_S or IQ1_M.

    Args:
        block: the block.
        kind: number of the weight format.
        place: index of the block among those of all tiles.
        lane: row in the tile.
        codes: written.
        scales: written for IQ1_M.
        minima: written.
    """
    parts = _PARTS[kind]
    entries = _ENTRIES[kind]
    each = 2 // parts  # bytes behind the indices
    first = 2 if kind == _IQ1S else 0
    above = first + BLOCK_GROUPS * GROUP // 8
    size = group_bytes(kind) // parts
    for part in range(parts * BLOCK_GROUPS):
        at = (place * BLOCK_GROUPS * parts + part) * size
        for entry in range(entries):
            codes[at + LANES * entry + lane] = block[first + part * entries + entry]
        for byte in range(each):
            codes[at + LANES * entries + each * lane + byte] = block[above + each * part + byte]
    half = np.int64(block[0]) | np.int64(block[1]) << 8
    if kind == _IQ1M:
        half = np.int64(0)
        for word in range(4):
            at = _SCALES_IQ1M + 2 * word
            bits = np.int64(block[at]) | np.int64(block[at + 1]) << 8
            half |= bits >> 12 << (4 * word)
            for pair in range(2):
                both = bits >> (6 * pair)
                to = (place * BLOCK_GROUPS + 2 * word + pair) * LANES + lane
                scales[to] = np.uint8(both & 7 | (both >> 3 & 7) << 4)
    minima[place * 2 * LANES + 2 * lane] = np.uint8(half & 255)
    minima[place * 2 * LANES + 2 * lane + 1] = np.uint8(half >> 8)


@kernel
def _store_scales(
    block: Bytes, kind: int, group: int, lane: int, scales: Bytes, start: int
) -> None:
    """Store the 4-bit scale, or the two scales, of a group in one row."""
    if kind == _IQ2XS:
        scales[start + lane] = block[66 + group]
    elif kind == _IQ2S:
        scales[start + lane] = block[74 + group]
    else:
        if kind == _IQ3S:
            scale = np.int64(block[106 + group // 2]) >> (4 * (group % 2)) & 15
        else:
            scale = _word(block, kind, group) >> 28
        scales[start + lane // 2] |= np.uint8(scale << (4 * (lane % 2)))


@kernel
def _word(block: Bytes, kind: int, group: int) -> Any:
    """Return the word of IQ3_XXS or IQ2_XXS with four signs of 7 bits and a scale of 4 bits."""
    at = 66 + 4 * group if kind == _IQ3XXS else 6 + 8 * group
    low = np.int64(block[at]) | np.int64(block[at + 1]) << 8
    return low | np.int64(block[at + 2]) << 16 | np.int64(block[at + 3]) << 24


@kernel
def _index(block: Bytes, kind: int, group: int, entry: int) -> Any:
    """Return the index of entry `entry` of a group."""
    if kind == _IQ3S:
        high = np.int64(block[66 + group]) >> entry & 1
        return np.int64(block[2 + 8 * group + entry]) | high << 8
    if kind in (_IQ3XXS, _IQ2XXS):
        return np.int64(block[2 + 8 * group + entry])
    if kind == _IQ2XS:
        at = 2 + 8 * group + 2 * entry
        return np.int64(block[at]) | (np.int64(block[at + 1]) & 1) << 8
    high = np.int64(block[66 + group]) >> (2 * entry) & 3
    return np.int64(block[2 + 4 * group + entry]) | high << 8


@kernel
def _signs(block: Bytes, kind: int, group: int, eight: int) -> Any:
    """Return the signs of weights 8 * eight to 8 * eight + 7 of a group, as bits."""
    if kind == _IQ3S:
        return np.int64(block[74 + 4 * group + eight])
    if kind == _IQ2S:
        return np.int64(block[34 + 4 * group + eight])
    if kind == _IQ2XS:
        signs = np.int64(block[3 + 8 * group + 2 * eight]) >> 1
    else:
        signs = _word(block, kind, group) >> (7 * eight) & 127
    # The number of negative weights is even.
    odd = signs ^ signs >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    return signs | (odd & 1) << 7


_BYTES = array("uint8")
grid_blocks_entry = KernelEntry(_pack, array("uint8", 2), INT64, INT64, _BYTES, _BYTES, _BYTES)
"""Entry of `pack_grid_blocks` for ahead-of-time compilation."""
