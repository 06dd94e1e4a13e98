"""Dequantization of a few rows of a GGUF tensor to float32, for example per-layer embeddings.

Float operations run in the same order as in `models.gguf.blocks.dequantize`, so the results are
bit-identical. The block layouts are those of llama.cpp (ggml-quants).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.signature import INT64, array

__all__ = ["DECODED", "decode_rows", "decode_rows_entry"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0, _Q4_K, _Q5_K, _Q6_K, _F16, _Q3_K, _IQ4_NL, _IQ4_XS = range(12)
_MXFP4, _Q2_K = 12, 13
DECODED: dict[str, int] = {
    "Q4_0": _Q4_0,
    "Q4_1": _Q4_1,
    "Q5_0": _Q5_0,
    "Q5_1": _Q5_1,
    "Q8_0": _Q8_0,
    "Q4_K": _Q4_K,
    "Q5_K": _Q5_K,
    "Q6_K": _Q6_K,
    "F16": _F16,
    "Q2_K": _Q2_K,
    "Q3_K": _Q3_K,
    "IQ4_NL": _IQ4_NL,
    "IQ4_XS": _IQ4_XS,
    "MXFP4": _MXFP4,
}
"""GGUF type -> number in the kernel. F32 and BF16 are absent, because NumPy is as fast for them."""

# Table of all 65,536 float16 numbers as float32, because Numba has no float16 scalars. It fits in
# the L2 cache. Converting signalling NaNs raises "invalid" on ARM.
with np.errstate(invalid="ignore"):
    _HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
# Tables of 4-bit code values (IQ4_NL, and FP4 E2M1 times 2) and of MXFP4 scales, 2 ** (e - 128).
_NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
_POWERS = np.ldexp(np.float32(1), np.arange(-128, 128)).astype(np.float32)


def decode_rows(name: str, data: Bytes, out: Floats) -> None:
    """Dequantize rows of a GGUF tensor.

    Args:
        name: GGUF type, a key of DECODED.
        data: uint8 [rows, bytes], contiguous.
        out: float32 [rows, weights], contiguous, written.
    """
    _decode(DECODED[name], data.reshape(-1), _HALVES, out.reshape(-1))


@kernel
def _half(data: Bytes, at: int, halves: Floats) -> Any:
    """Return the float16 at a byte index as float32."""
    return halves[np.int64(data[at]) | np.int64(data[at + 1]) << 8]


@kernel
def _decode(kind: int, data: Bytes, halves: Floats, out: Floats) -> None:
    """Dequantize blocks of any type in DECODED.

    Args:
        kind: number of the GGUF type.
        data: uint8 [bytes], whole blocks.
        halves: float32 [65536], all float16 numbers.
        out: float32 [weights], written.
    """
    if kind == _F16:
        for i in range(len(out)):
            out[i] = _half(data, 2 * i, halves)
    elif kind == _Q8_0:
        for block in range(len(out) // 32):
            scale = _half(data, 34 * block, halves)
            for i in range(32):
                out[32 * block + i] = scale * np.float32(np.int8(data[34 * block + 2 + i]))
    elif kind == _Q6_K:
        for block in range(len(out) // 256):
            _six(
                data[210 * block : 210 * block + 210], halves, out[256 * block : 256 * block + 256]
            )
    elif kind in (_Q4_K, _Q5_K):
        size = 144 if kind == _Q4_K else 176
        for block in range(len(out) // 256):
            _scaled_twice(
                data[size * block : size * block + size],
                halves,
                out[256 * block : 256 * block + 256],
            )
    elif kind == _Q3_K:
        for block in range(len(out) // 256):
            _three(
                data[110 * block : 110 * block + 110], halves, out[256 * block : 256 * block + 256]
            )
    elif kind == _Q2_K:
        for block in range(len(out) // 256):
            _two(data[84 * block : 84 * block + 84], halves, out[256 * block : 256 * block + 256])
    elif kind == _IQ4_XS:
        for block in range(len(out) // 256):
            _four_of_table(
                data[136 * block : 136 * block + 136], halves, out[256 * block : 256 * block + 256]
            )
    elif kind in (_IQ4_NL, _MXFP4):
        size = 18 if kind == _IQ4_NL else 17
        for block in range(len(out) // 32):
            at = size * block
            scale = _half(data, at, halves) if kind == _IQ4_NL else _POWERS[data[at]]
            table = _NL if kind == _IQ4_NL else _FP4
            _looked_up(
                data[at + size - 16 : at + size], scale, table, out[32 * block : 32 * block + 32]
            )
    else:
        _groups(kind, data, halves, out)


@kernel
def _looked_up(codes: Bytes, scale: float, table: Floats, out: Floats) -> None:
    """Decode 32 4-bit codes through a table, from 16 bytes with the low nibbles first."""
    for i in range(16):
        out[i] = scale * table[codes[i] & 15]
        out[16 + i] = scale * table[codes[i] >> 4]


@kernel
def _four_of_table(block: Bytes, halves: Floats, out: Floats) -> None:
    """Decode an IQ4_XS block: 8 groups of 32 weights, each with a 6-bit multiple of its scale.

    Bytes 4 to 7 hold the low 4 bits of these multiples, bytes 2 and 3 the high 2 bits.
    """
    scale = _half(block, 0, halves)
    above = np.int64(block[2]) | np.int64(block[3]) << 8
    for group in range(8):
        factor = (
            block[4 + group // 2] >> np.uint8(4 * (group % 2)) & 15 | (above >> 2 * group & 3) << 4
        )
        own = scale * (np.float32(factor) - np.float32(32.0))
        at = 8 + 16 * group
        _looked_up(block[at : at + 16], own, _NL, out[32 * group : 32 * group + 32])


@kernel
def _two(block: Bytes, halves: Floats, out: Floats) -> None:
    """Decode a Q2_K block.

    It holds a byte for each 16 weights, with the multiples of the block's scale and minimum in the
    low and high nibble, then 64 bytes of 2-bit codes.
    """
    scale = _half(block, 80, halves)
    minimum = _half(block, 82, halves)
    for part in range(16):
        own = scale * np.float32(block[part] & 15)
        least = minimum * np.float32(block[part] >> 4)
        group = part // 2
        start = 16 + 32 * (group // 4) + 16 * (part % 2)
        for i in range(16):
            code = block[start + i] >> np.uint8(2 * (group % 4)) & 3
            out[16 * part + i] = own * np.float32(code) - least


@kernel
def _three(block: Bytes, halves: Floats, out: Floats) -> None:
    """Decode a Q3_K block.

    It holds 32 bytes of high bits, 64 bytes of 2-bit codes, and 16 6-bit scales in 12 bytes.
    """
    scale = _half(block, 108, halves)
    for part in range(16):
        low = block[96 + part % 8] >> np.uint8(4 * (part // 8)) & 15
        high = block[104 + part % 4] >> np.uint8(2 * (part // 4)) & 3
        own = scale * (np.float32(low | high << 4) - np.float32(32.0))
        for i in range(16):
            place = 16 * (part % 2) + i
            group = part // 2
            code = block[32 + 32 * (group // 4) + place] >> np.uint8(2 * (group % 4)) & 3
            third = block[place] >> np.uint8(group) & 1
            out[16 * part + i] = own * (np.float32(code | third << 2) - np.float32(4.0))


@kernel
def _groups(kind: int, data: Bytes, halves: Floats, out: Floats) -> None:
    """Decode blocks of 32 weights (Q4_0, Q4_1, Q5_0, Q5_1).

    A block consists of a float16 scale, a float16 minimum (Q4_1 and Q5_1 only), 4 bytes of fifth
    bits (Q5_0 and Q5_1 only) and 16 bytes of nibbles, low nibbles first.
    """
    has_minimum = kind in (_Q4_1, _Q5_1)
    has_fifths = kind in (_Q5_0, _Q5_1)
    nibbles = 2 + 2 * has_minimum + 4 * has_fifths
    zero = np.float32(0.0)
    if not has_minimum:
        zero = np.float32(16.0) if has_fifths else np.float32(8.0)
    for block in range(len(out) // 32):
        at = (nibbles + 16) * block
        scale = _half(data, at, halves)
        fifths = np.uint32(0)
        if has_fifths:
            for i in range(4):
                fifths |= np.uint32(data[at + nibbles - 4 + i]) << np.uint32(8 * i)
        for i in range(16):
            code = data[at + nibbles + i]
            low = np.uint32(code & 15) | (fifths >> np.uint32(i) & np.uint32(1)) << np.uint32(4)
            high = np.uint32(code >> 4) | (fifths >> np.uint32(16 + i) & np.uint32(1)) << np.uint32(
                4
            )
            out[32 * block + i] = scale * (np.float32(low) - zero)
            out[32 * block + 16 + i] = scale * (np.float32(high) - zero)
        if has_minimum:
            minimum = _half(data, at + 2, halves)
            for i in range(32):
                out[32 * block + i] += minimum


@kernel
def _scaled_twice(block: Bytes, halves: Floats, out: Floats) -> None:
    """Decode a Q4_K block, or a Q5_K block, which also has 32 bytes of fifth bits.

    Each of the 8 groups of 32 weights has a 6-bit multiple of the block's scale and a 6-bit
    multiple of the block's minimum.
    """
    scale = _half(block, 0, halves)
    minimum = _half(block, 2, halves)
    has_fifths = len(block) == 176
    for group in range(8):
        if group < 4:
            factor = block[4 + group] & 63
            lower = block[8 + group] & 63
        else:
            factor = (block[8 + group] & 15) | (block[group] >> 2 & 48)
            lower = (block[8 + group] >> 4) | (block[4 + group] >> 2 & 48)
        own = scale * np.float32(factor)
        least = minimum * np.float32(lower)
        start = (48 if has_fifths else 16) + 32 * (group // 2)
        shift = np.uint8(4 * (group % 2))
        for i in range(32):
            code = block[start + i] >> shift & np.uint8(15)
            if has_fifths:
                code |= (block[16 + i] >> np.uint8(group) & np.uint8(1)) << np.uint8(4)
            out[32 * group + i] = own * np.float32(code) - least


@kernel
def _six(block: Bytes, halves: Floats, out: Floats) -> None:
    """Decode a Q6_K block: 128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 signed scales."""
    scale = _half(block, 208, halves)
    for group in range(8):
        low = block[64 * (group >> 2) + 32 * (group & 1) :]
        high = block[128 + 32 * (group >> 2) :]
        shift = np.uint8(4 * (group >> 1 & 1))
        turn = np.uint8(2 * (group & 3))
        for half in range(2):
            own = scale * np.float32(np.int8(block[192 + 2 * group + half]))
            for i in range(16 * half, 16 * half + 16):
                code = (low[i] >> shift & np.uint8(15)) | (
                    high[i] >> turn & np.uint8(3)
                ) << np.uint8(4)
                out[32 * group + i] = own * (np.float32(code) - np.float32(32.0))


_FLOATS = array("float32")
decode_rows_entry = KernelEntry(_decode, INT64, array("uint8"), _FLOATS, _FLOATS)
"""Entry of `decode_rows` for ahead-of-time compilation."""
