"""Random matrices in GGUF formats, generated as bytes.

They cover the K and IQ formats, which the Python package only reads, ternary and 1-bit formats,
some of which it does not know, and Q4_0, Q8_0, MXFP4 and NVFP4, for which quantizing numbers would
take minutes.
Codes are uniform, and scales are in the upper half of their range, so that a row's weights have the
requested spread.
"""

from __future__ import annotations

from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

__all__ = [
    "BLOCK",
    "FEW_BITS",
    "NARROW",
    "Narrow",
    "more_bits",
    "random_few_bits",
    "random_mxfp4",
    "random_narrow",
    "random_nvfp4",
    "random_q4_0",
    "random_q4_k",
    "random_q6_k",
    "random_q8_0",
]

BLOCK = 256
_Bytes = npt.NDArray[np.uint8]


class Narrow(NamedTuple):
    """A ternary or 1-bit type.

    Attributes:
        number: Number of the type in GGUF files.
        file_type: Number of files of this type.
        weights: Weights per block.
        nbytes: Bytes per block.
        scale_at: Offset of the block's half-precision scale.
    """

    number: int
    file_type: int
    weights: int
    nbytes: int
    scale_at: int


NARROW = {
    "TQ1_0": Narrow(34, 36, 256, 54, 52),
    "TQ2_0": Narrow(35, 37, 256, 66, 64),
    "Q1_0": Narrow(41, 40, 128, 18, 0),
    "Q2_0": Narrow(42, 41, 64, 18, 0),
}
"""Ternary and 1-bit types by name."""

FEW_BITS = {
    "IQ1_S": (50, 0),
    "IQ1_M": (56, 49),
    "IQ2_XXS": (66, 0),
    "IQ2_XS": (74, 0),
    "IQ2_S": (82, 0),
    "Q2_K": (84, 80),
    "IQ3_XXS": (98, 0),
    "IQ3_S": (110, 0),
    "Q3_K": (110, 108),
}
"""Types of 1 to 3 bits by name: bytes of a block, and the offset of its half-precision scale.

The scale of Q2_K's minima follows that of its weights. IQ1_M stores four bits of the scale, from
the lowest on, in the upper half of every second byte.
"""
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def more_bits(layer: int, num_layers: int) -> bool:
    """Return whether a Q4_K_M file stores values and down projections of a layer as Q6_K.

    It does so in the first and last eighth of the layers and in every third layer between.
    """
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def random_q4_k(rng: np.random.Generator, rows: int, width: int, spread: float) -> _Bytes:
    """Return a random Q4_K matrix, uint8 [rows, width // 256 * 144].

    A block has half d, half dmin, 12 bytes of 6-bit scales and minima, and 128 bytes of nibbles. A
    weight is d * scale * code - dmin * minimum. Here minimum = scale and dmin = 7.5 d, so codes
    0..15 are centered at 0.
    """
    count = rows * width // BLOCK
    blocks = rng.integers(0, 256, (count, 144), dtype=np.uint8)
    scales = rng.integers(32, 64, (count, 8), dtype=np.uint8)
    d = np.full(count, spread / (47.5 * np.sqrt((16**2 - 1) / 12)), np.float16)
    blocks[:, 0:2] = d.view(np.uint8).reshape(count, 2)
    blocks[:, 2:4] = (np.float16(7.5) * d).view(np.uint8).reshape(count, 2)
    low = scales[:, :4]
    high = scales[:, 4:]
    blocks[:, 4:8] = blocks[:, 8:12] = low | (high >> 4) << 6
    blocks[:, 12:16] = (high & 15) | (high & 15) << 4
    return blocks.reshape(rows, -1)


def random_q6_k(rng: np.random.Generator, rows: int, width: int, spread: float) -> _Bytes:
    """Return a random Q6_K matrix, uint8 [rows, width // 256 * 210].

    A block has 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales and half d. A weight
    is d * scale * (code - 32).
    """
    count = rows * width // BLOCK
    blocks = rng.integers(0, 256, (count, 210), dtype=np.uint8)
    blocks[:, 192:208] = rng.integers(64, 128, (count, 16), dtype=np.int8).view(np.uint8)
    d = np.full(count, spread / (95.5 * np.sqrt((64**2 - 1) / 12)), np.float16)
    blocks[:, 208:210] = d.view(np.uint8).reshape(count, 2)
    return blocks.reshape(rows, -1)


def random_q4_0(rng: np.random.Generator, rows: int, width: int, spread: float) -> _Bytes:
    """Return a random Q4_0 matrix, uint8 [rows, width // 32 * 18].

    A block has half d and 16 bytes of nibbles. A weight is d * (code - 8), with codes 1..15.
    """
    low, high = (rng.integers(1, 16, (rows * width // 32, 16), dtype=np.uint8) for _ in range(2))
    return _with_scale(low | high << 4, spread / np.sqrt((15**2 - 1) / 12)).reshape(rows, -1)


def random_q8_0(rng: np.random.Generator, rows: int, width: int, spread: float) -> _Bytes:
    """Return a random Q8_0 matrix, uint8 [rows, width // 32 * 34].

    A block has half d and 32 int8 codes. A weight is d * code, with codes -127..127.
    """
    codes = rng.integers(-127, 128, (rows * width // 32, 32), dtype=np.int8).view(np.uint8)
    return _with_scale(codes, spread / np.sqrt((255**2 - 1) / 12)).reshape(rows, -1)


def random_narrow(
    rng: np.random.Generator, rows: int, width: int, spread: float, kind: str
) -> _Bytes:
    """Return a random matrix of a type in NARROW, uint8 [rows, bytes of a row].

    A block has half d and codes. A weight is d or -d in Q1_0, and also 0 in the others.
    """
    _, _, weights, nbytes, scale_at = NARROW[kind]
    codes = {
        "Q1_0": np.arange(256),
        "TQ1_0": -(-256 * np.arange(243) // 243),  # five digits of base 3
    }.get(kind, np.array([i for i in range(256) if i & i >> 1 & 0x55 == 0]))
    blocks = rng.choice(codes.astype(np.uint8), (rows * width // weights, nbytes))
    d = np.array([spread if kind == "Q1_0" else spread / np.sqrt(2 / 3)], np.float16)
    blocks[:, scale_at : scale_at + 2] = d.view(np.uint8)
    return blocks.reshape(rows, -1)


def random_few_bits(
    rng: np.random.Generator, rows: int, width: int, spread: float, kind: str
) -> _Bytes:
    """Return a random matrix of a type in FEW_BITS, uint8 [rows, bytes of a row].

    All bytes but those of the scale are uniform. In Q2_K, the scale of the minima is 1.5 times that
    of the weights, so that codes 0..3 are centered at 0.
    """
    nbytes, scale_at = FEW_BITS[kind]
    blocks = rng.integers(0, 256, (rows * width // BLOCK, nbytes), dtype=np.uint8)

    def scale(found: _Bytes, d: float) -> _Bytes:
        if kind == "IQ1_M":
            digits = int(np.array(d, np.float16).view(np.uint16)) >> np.arange(0, 16, 4) & 15
            found[:, scale_at::2] = found[:, scale_at::2] & 15 | (digits << 4).astype(np.uint8)
            return found
        ratios = (1.0, 1.5) if kind == "Q2_K" else (1.0,)
        scales = np.array([d * ratio for ratio in ratios], np.float16).view(np.uint8)
        found[:, scale_at : scale_at + len(scales)] = scales
        return found

    sample = scale(blocks[:256].copy(), 1.0)
    unit = gguf.quants.dequantize(sample, gguf.GGMLQuantizationType[kind]).std()
    return scale(blocks, spread / float(unit)).reshape(rows, -1)


def random_mxfp4(rng: np.random.Generator, rows: int, width: int, spread: float) -> _Bytes:
    """Return a random MXFP4 matrix, uint8 [rows, width // 32 * 17].

    A block has an exponent e and 16 bytes of codes. A weight is 2**(e - 127) times 0, 0.5, 1, 1.5,
    2, 3, 4, 6 or their negatives. Each block has one of two exponents, in the proportion that gives
    the requested spread.
    """
    count = rows * width // 32
    ratio = spread / np.sqrt(np.mean(np.square(_E2M1)))
    low = int(np.floor(np.log2(ratio)))
    share = (
        (ratio / 2.0**low) ** 2 - 1
    ) / 3  # share of blocks with the larger exponent, whose squares are 4 times as large
    blocks = rng.integers(0, 256, (count, 17), dtype=np.uint8)
    blocks[:, 0] = 127 + low + (rng.random(count) < share)
    return blocks.reshape(rows, -1)


def random_nvfp4(rng: np.random.Generator, rows: int, width: int, spread: float) -> _Bytes:
    """Return a random NVFP4 matrix, uint8 [rows, width // 64 * 36].

    A block has 4 scales, each for 16 weights, and 32 bytes of codes like MXFP4's. A scale is an
    8-bit float with 3 bits of mantissa. Each has one of two neighboring values, in the proportion
    that gives the requested spread.
    """
    codes = np.arange(127)
    mantissa = codes % 8
    scales = np.where(codes < 8, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (codes // 8 - 7.0))
    squares = np.mean(np.square(_E2M1)) * scales**2
    low = int(np.searchsorted(squares, spread**2)) - 1
    share = (spread**2 - squares[low]) / (squares[low + 1] - squares[low])
    count = rows * width // 64
    blocks = rng.integers(0, 256, (count, 36), dtype=np.uint8)
    blocks[:, :4] = low + (rng.random((count, 4)) < share)
    return blocks.reshape(rows, -1)


def _with_scale(codes: _Bytes, scale: float) -> _Bytes:
    """Prefix each row of codes [count, bytes] with the same half-precision scale."""
    blocks = np.empty((len(codes), 2 + codes.shape[1]), dtype=np.uint8)
    blocks[:, :2] = np.array([scale], np.float16).view(np.uint8)
    blocks[:, 2:] = codes
    return blocks
