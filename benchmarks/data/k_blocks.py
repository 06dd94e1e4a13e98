"""Random matrices in GGUF's formats, as bytes: of the K formats the Python package reads, and of
Q4_0, Q8_0 and MXFP4 where quantizing numbers would take minutes.

Codes are uniform and scales lie in the upper half of their range, so that a row's weights have the
wanted spread.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = [
    "BLOCK",
    "more_bits",
    "random_mxfp4",
    "random_q4_0",
    "random_q4_k",
    "random_q6_k",
    "random_q8_0",
]

BLOCK = 256
_Bytes = npt.NDArray[np.uint8]


def more_bits(layer: int, num_layers: int) -> bool:
    """Whether a Q4_K_M file stores values and down projections of this layer as Q6_K: the first and
    last eighth, and every third between.
    """
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def random_q4_k(rng: np.random.Generator, rows: int, width: int, spread: float) -> _Bytes:
    """uint8 [rows, width // 256 * 144]: half d, half dmin, 12 bytes of 6-bit scales and minima, 128
    of nibbles.

    A weight is d * scale * code - dmin * minimum; here minimum = scale and dmin = 7.5 d, so codes
    0..15 lie around 0.
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
    """uint8 [rows, width // 256 * 210]: 128 bytes of low nibbles, 64 of high pairs, 16 int8 scales,
    half d.

    A weight is d * scale * (code - 32).
    """
    count = rows * width // BLOCK
    blocks = rng.integers(0, 256, (count, 210), dtype=np.uint8)
    blocks[:, 192:208] = rng.integers(64, 128, (count, 16), dtype=np.int8).view(np.uint8)
    d = np.full(count, spread / (95.5 * np.sqrt((64**2 - 1) / 12)), np.float16)
    blocks[:, 208:210] = d.view(np.uint8).reshape(count, 2)
    return blocks.reshape(rows, -1)


def random_q4_0(rng: np.random.Generator, rows: int, width: int, spread: float) -> _Bytes:
    """uint8 [rows, width // 32 * 18]: half d, 16 bytes of nibbles. A weight is d * (code - 8),
    codes 1..15.
    """
    low, high = (rng.integers(1, 16, (rows * width // 32, 16), dtype=np.uint8) for _ in range(2))
    return _with_scale(low | high << 4, spread / np.sqrt((15**2 - 1) / 12)).reshape(rows, -1)


def random_q8_0(rng: np.random.Generator, rows: int, width: int, spread: float) -> _Bytes:
    """uint8 [rows, width // 32 * 34]: half d, 32 int8 codes. A weight is d * code, codes
    -127..127.
    """
    codes = rng.integers(-127, 128, (rows * width // 32, 32), dtype=np.int8).view(np.uint8)
    return _with_scale(codes, spread / np.sqrt((255**2 - 1) / 12)).reshape(rows, -1)


def random_mxfp4(rng: np.random.Generator, rows: int, width: int, spread: float) -> _Bytes:
    """uint8 [rows, width // 32 * 17]: an exponent e, 16 bytes of codes.

    A weight is 2**(e - 127) times one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 or their opposites; blocks have
    one of two exponents, as often as the wanted spread takes.
    """
    count = rows * width // 32
    ratio = spread / np.sqrt(np.mean(np.square([0, 0.5, 1, 1.5, 2, 3, 4, 6])))
    low = int(np.floor(np.log2(ratio)))
    share = (
        (ratio / 2.0**low) ** 2 - 1
    ) / 3  # of blocks with the upper exponent: their squares are 4 times as large
    blocks = rng.integers(0, 256, (count, 17), dtype=np.uint8)
    blocks[:, 0] = 127 + low + (rng.random(count) < share)
    return blocks.reshape(rows, -1)


def _with_scale(codes: _Bytes, scale: float) -> _Bytes:
    """Codes [count, bytes] behind the same half each."""
    blocks = np.empty((len(codes), 2 + codes.shape[1]), dtype=np.uint8)
    blocks[:, :2] = np.array([scale], np.float16).view(np.uint8)
    blocks[:, 2:] = codes
    return blocks
