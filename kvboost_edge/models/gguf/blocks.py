"""Conversion of GGUF tensor types to float32 or to the codes of the packed formats.

`BLOCKS` describes each type and names its functions. A row consists of whole blocks. Functions take
blocks as uint8 [blocks, bytes of a block]. Formulas and the order of float operations are those of
llama.cpp, so float32 values are bit-identical to those of the `gguf` package.

    Q4_0 -> int4, Q5_0 -> int5, Q8_0 -> int8                 exact
    Q4_1 -> int4-asym, Q5_1 -> int5-asym                     exact
    Q2_K -> q2k, Q3_K -> q3k, Q4_K -> q4k,
    Q5_K -> q5k, Q6_K -> q6k                exact: the blocks of the file, reordered
    Q1_0 -> int1-g128, Q2_0 -> int2-g64     exact
    TQ2_0 -> int2-g256                      exact
    TQ1_0 -> int2-g256                      exact, in 1.22 times the bytes
    IQ1_S -> iq1s, IQ1_M -> iq1m                         exact: the blocks of the file, reordered
    IQ2_XXS -> iq2xxs, IQ2_XS -> iq2xs, IQ2_S -> iq2s    the same
    IQ3_XXS -> iq3xxs, IQ3_S -> iq3s                     the same

Early files of Q2_0 have blocks of 128 weights instead of 64, under the same type number. They have
the type "Q2_0_g128" here, see `file.py`.

Types whose 4-bit codes are indices into a table become int4t, with a float16 scale for each group:

    IQ4_NL   float16 d, codes                             d * table[code]
    IQ4_XS   float16 d, 6-bit scales of 8 groups, codes   d * (scale - 32) * table[code]
    MXFP4    exponent byte e, codes                       2 ** (e - 128) * table[code]

NVFP4 becomes nvfp4, exactly. Its blocks of 64 weights have four 8-bit floats (E4M3), the scales of
16 weights each, and 4-bit floats as codes. A tensor may have a factor, see `source.py`.

The conversion of IQ4_NL is exact. MXFP4 is exact where the scale can be represented as a float16.
IQ4_XS is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.kernels.linear.grids import grid_of
from kvboost_edge.kernels.linear.weight_formats import E2M1
from kvboost_edge.models.weights import mxfp4
from kvboost_edge.models.weights.nvfp4_parts import HALF_SCALES
from kvboost_edge.models.weights.weight_source import QuantRows, from_bfloat16

__all__ = [
    "BLOCKS",
    "EARLY_TYPES",
    "TYPE_NAMES",
    "BlockFormat",
    "dequantize",
    "half_bits",
    "q3_k_as_q6_k",
    "quant_rows_of",
    "refusal",
]

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]
Table = npt.NDArray[np.int8]
Place = int | tuple[int, ...]
"""Byte offset of a float16, or offsets of the bytes with its nibbles."""
_SIXTEEN = np.dtype("V16")
_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)
_TWO_BITS = np.uint64(0x0303030303030303)
_BYTES = np.arange(256, dtype=np.uint8)
# The codes of a byte of Q1_0 (0 or 2), and of a byte of Q2_0, as one number each.
_ONES_OF = (
    (np.unpackbits(_BYTES[:, None], axis=1, bitorder="little") * np.uint8(2))
    .view(np.uint64)
    .reshape(-1)
)
_TWOS_OF = (
    (_BYTES[:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3))
    .view(np.uint32)
    .reshape(-1)
)
# Digits of base 3 of a byte b, which stands for the fraction b / 256: [5, 256].
_DIGITS = np.stack(
    [(_BYTES * np.uint8(3**n)).astype(np.uint16) * np.uint16(3) >> np.uint16(8) for n in range(5)]
).astype(np.uint8)
_SCATTERED = (49, 51, 53, 55)  # place of the float16 of IQ1_M
_NL = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=np.int8
)


class BlockFormat(NamedTuple):
    """Storage format of a tensor type, and its conversion.

    Attributes:
        weights: number of weights in a block.
        nbytes: size of a block in bytes.
        kind: packed format that the type is converted to; None for float types.
        exact: True if the conversion is exact.
        halves: places of the float16 numbers in a block, which must be finite; see `half_bits`.
        to_float: function of blocks -> float32 [..., weights of a group or block].
        codes: function of blocks -> codes, scales and minima (or None), as in `QuantRows`.
        table: weight of each code, before scaling.
        count_lost: function of blocks -> number of groups whose weights become 0, because the scale
            is too small for a float16. Types with this function may also have scales that are too
            large.
        float8: byte offsets of the 8-bit floats (E4M3) in a block, which must not be NaN.
    """

    weights: int
    nbytes: int
    kind: str | None
    exact: bool
    halves: tuple[Place, ...]
    to_float: Callable[[Bytes], Floats]
    codes: Callable[[Bytes], tuple[Bytes, Halves, Halves | None]] | None = None
    table: Table | None = None
    count_lost: Callable[[Bytes], int] | None = None
    float8: tuple[int, ...] = ()


TYPE_NAMES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "I2_S",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}
"""Name of each tensor type by its number in the file, including unsupported types."""

EARLY_TYPES = {"Q2_0": "Q2_0_g128"}
"""Types whose number stood for another type in early files, and that type."""

_INSTEAD = "use a Q4_K_M or IQ4_XS file of this model"
# Prefix of a type's name -> reason why the type is not supported, and what to use instead.
_REFUSED = {
    "I2_S": (
        "it is a type of Microsoft's bitnet.cpp; use a TQ2_0 or TQ1_0 file, or the safetensors of "
        "this model"
    ),
    **dict.fromkeys(
        ("Q8_1", "Q8_K"), "it is a format for intermediate results, not for files; use another file"
    ),
}


def refusal(name: str) -> str:
    """Return why a type that is not in BLOCKS is not supported, and what to use instead."""
    found = next((text for beginning, text in _REFUSED.items() if name.startswith(beginning)), None)
    known = ", ".join(other for other in BLOCKS if other not in EARLY_TYPES.values())
    return found or f"the supported types are {known}; {_INSTEAD}"


def dequantize(name: str, data: Bytes) -> Floats:
    """Return rows of any type in `BLOCKS` as float32 [rows, weights of a row].

    Args:
        name: tensor type.
        data: uint8 [rows, bytes of a row].
    """
    return BLOCKS[name].to_float(_blocks(name, data)).reshape(len(data), -1)


def quant_rows_of(name: str, data: Bytes) -> QuantRows:
    """Return the codes and scales, or the blocks, of rows of a quantized type.

    Args:
        name: tensor type.
        data: uint8 [rows, bytes of a row].
    """
    block = BLOCKS[name]
    if block.codes is None or block.kind is None:
        raise ModelFormatError(f"tensors of type {name} are not quantized")
    codes, scales, minima = block.codes(_blocks(name, data))
    rows = len(data)
    return QuantRows(
        block.kind,
        codes.reshape(rows, -1),
        scales.reshape(rows, -1),
        None if minima is None else minima.reshape(rows, -1),
        block.table,
    )


def _blocks(name: str, data: Bytes) -> Bytes:
    return np.ascontiguousarray(data).reshape(-1, BLOCKS[name].nbytes)


def half_bits(blocks: Bytes, at: Place) -> npt.NDArray[np.uint16]:
    """Return the bits of a float16 in each block, [blocks, 1].

    Args:
        blocks: uint8 [blocks, bytes of a block].
        at: byte offset of the number. If the number is scattered (IQ1_M), the offsets of the bytes
            whose high nibbles hold its bits, the lowest first.
    """
    if isinstance(at, int):
        return blocks[:, at : at + 2].view("<u2").astype(np.uint16, copy=False)
    bits = np.zeros((len(blocks), 1), dtype=np.uint16)
    for index, byte in enumerate(at):
        nibbles = blocks[:, byte, None] >> np.uint8(4)
        bits |= nibbles.astype(np.uint16) << np.uint16(4 * index)
    return bits


def _half(blocks: Bytes, at: Place) -> npt.NDArray[np.float16]:
    """Return a float16 of each block, [blocks, 1]."""
    return np.ascontiguousarray(half_bits(blocks, at)).view(np.float16)


def _scale(blocks: Bytes, at: Place) -> Floats:
    return _half(blocks, at).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Unpack the low nibbles, then the high nibbles of each block: [blocks, 16] -> [blocks, 32]."""
    # Move 16 bytes as one item and mask 8 at once, because byte loops in NumPy take six times as
    # long.
    words = np.ascontiguousarray(packed.view(_SIXTEEN)).view(np.uint64)
    both = np.empty((len(packed), 2), dtype=_SIXTEEN)
    both[:, 0] = (words & _LOW).view(_SIXTEEN)[:, 0]
    both[:, 1] = (words >> np.uint64(4) & _LOW).view(_SIXTEEN)[:, 0]
    return both.view(np.uint8)


def _flipped(codes: Bytes) -> Bytes:
    """Return signed bytes as codes with an offset of 128, [blocks, 32]."""
    words = np.ascontiguousarray(codes.view(_SIXTEEN)).view(np.uint64)
    return (words ^ np.uint64(0x8080808080808080)).view(np.uint8)


def _fives(blocks: Bytes, at: int) -> Bytes:
    """Unpack 5-bit codes: 4 bytes of fifth bits at offset `at`, then 16 bytes of nibbles."""
    high = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return _nibbles(blocks[:, at + 4 :]) | (high << np.uint8(4))


def _looked_up(table: npt.NDArray[Any], blocks: Bytes) -> Bytes:
    """Unpack the codes of Q1_0 or Q2_0 with a table of the codes of each byte."""
    return np.take(table, blocks[:, 2:]).view(np.uint8)


def _twos(blocks: Bytes) -> Bytes:
    """Unpack the codes of TQ2_0, and those of Q2_K.

    The lowest two bits of 32 bytes come first, then their next bits.
    """
    words = np.ascontiguousarray(blocks[:, :64]).view(np.uint64).reshape(-1, 2, 1, 4)
    codes = words >> np.array([0, 2, 4, 6], dtype=np.uint64)[:, None] & _TWO_BITS
    return codes.reshape(len(blocks), -1).view(np.uint8)


def _threes(blocks: Bytes) -> Bytes:
    """Unpack the codes of TQ1_0.

    A byte holds five digits of base 3, the most significant first. The first digits of 32 bytes
    come first, then their second digits. 16 bytes with five digits and 4 bytes with four follow.
    """
    runs = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    parts = [np.take(_DIGITS[n], blocks[:, i:j]) for i, j, count in runs for n in range(count)]
    return np.concatenate(parts, axis=1)


def _k_nibbles(packed: Bytes) -> Bytes:
    """Unpack the low, then the high nibbles of every 32 bytes: [blocks, 128] -> [blocks, 256]."""
    quarters = packed.reshape(len(packed), 4, 1, 32)
    both = np.concatenate([quarters & np.uint8(15), quarters >> np.uint8(4)], axis=2)
    return both.reshape(len(packed), 256)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return the scales and minima of the 8 groups of Q4_K or Q5_K blocks, float32 [blocks, 8].

    They are products of 6-bit factors with two float16 numbers per block.
    """
    low, middle, high = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], axis=1)
    return _scale(blocks, 0) * scales.astype(np.float32), _scale(blocks, 2) * minima.astype(
        np.float32
    )


def _q4_0(blocks: Bytes) -> Floats:
    return _scale(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8))


def _q4_1(blocks: Bytes) -> Floats:
    return _scale(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _scale(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    return _scale(blocks, 0) * (_fives(blocks, 2).astype(np.float32) - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    return _scale(blocks, 0) * _fives(blocks, 4).astype(np.float32) + _scale(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _scale(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    scales, minima = _k_scales(blocks)
    codes = _k_nibbles(blocks[:, 16:]).astype(np.float32).reshape(len(blocks), 8, 32)
    return scales[:, :, None] * codes - minima[:, :, None]


def _q5_k(blocks: Bytes) -> Floats:
    scales, minima = _k_scales(blocks)
    bits = (
        blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    ) & np.uint8(1)
    codes = _k_nibbles(blocks[:, 48:]).reshape(len(blocks), 8, 32) | (bits << np.uint8(4))
    return scales[:, :, None] * codes.astype(np.float32) - minima[:, :, None]


def _q6_k(blocks: Bytes) -> Floats:
    scales = _scale(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    halves = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=2).reshape(-1, 8, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)).reshape(-1, 8, 32)
    codes = (low | (high << np.uint8(4))).astype(np.float32) - np.float32(32)
    weights: Floats = scales[:, :, None] * codes.reshape(-1, 16, 16)
    return weights


def _q2_k(blocks: Bytes) -> Floats:
    scales = _scale(blocks, 80) * (blocks[:, :16] & np.uint8(15)).astype(np.float32)
    minima = _scale(blocks, 82) * (blocks[:, :16] >> np.uint8(4)).astype(np.float32)
    codes = _twos(blocks[:, 16:80]).astype(np.float32).reshape(-1, 16, 16)
    weights: Floats = scales[:, :, None] * codes - minima[:, :, None]
    return weights


def _q3_k_parts(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Return the codes and scales of Q3_K blocks.

    Returns:
        Codes [blocks, 256], from 0 to 7 for the weights -4 to 3, and 6-bit scales plus 32, [blocks,
            16].
    """
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    low = (blocks[:, 32:96].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)).reshape(-1, 256)
    bits = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = (blocks[:, None, :32] >> bits & np.uint8(1)).reshape(-1, 256)
    nibbles = np.concatenate(
        [blocks[:, 96:104] & np.uint8(15), blocks[:, 96:104] >> np.uint8(4)], axis=1
    )
    above = (blocks[:, None, 104:108] >> shifts.reshape(1, 4, 1) & np.uint8(3)).reshape(-1, 16)
    return low | high << np.uint8(2), nibbles | above << np.uint8(4)


def _q3_k(blocks: Bytes) -> Floats:
    codes, scales = _q3_k_parts(blocks)
    factors = _scale(blocks, 108) * (scales.astype(np.float32) - np.float32(32))
    weights: Floats = factors[:, :, None] * (codes.astype(np.float32) - np.float32(4)).reshape(
        -1, 16, 16
    )
    return weights


def q3_k_as_q6_k(blocks: Bytes) -> Bytes:
    """Convert Q3_K blocks to Q6_K blocks with the same weights, [blocks, 210].

    The offset of codes is 32 in Q6_K and 4 in Q3_K, so 28 is added.
    """
    codes, scales = _q3_k_parts(blocks)
    halves = (codes + np.uint8(28)).reshape(-1, 2, 2, 64)
    low = halves[:, :, 0] & np.uint8(15) | halves[:, :, 1] << np.uint8(4)
    high = (halves >> np.uint8(4)).reshape(-1, 2, 4, 32) << np.array(
        [0, 2, 4, 6], dtype=np.uint8
    ).reshape(1, 1, 4, 1)
    planes = [low.reshape(-1, 128), np.bitwise_or.reduce(high, axis=2).reshape(-1, 64)]
    return np.concatenate([*planes, scales - np.uint8(32), blocks[:, 108:110]], axis=1)


def _table_codes(at: int, blocks: Bytes) -> Bytes:
    """Unpack the 4-bit codes of each group, [groups, 32], starting at byte `at` of a block.

    The low nibbles of 16 bytes come first, then their high nibbles.
    """
    packed = blocks[:, at:].reshape(-1, 16)
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)


def _iq4_xs_scales(blocks: Bytes) -> Floats:
    """Return the exact scale of each group, float32 [groups]."""
    high = blocks[:, 2:4].view("<u2").astype(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    low = np.stack([blocks[:, 4:8] & np.uint8(15), blocks[:, 4:8] >> np.uint8(4)], axis=2).reshape(
        -1, 8
    )
    factors = (low | (high & np.uint16(3)).astype(np.uint8) << np.uint8(4)).astype(
        np.float32
    ) - np.float32(32)
    scales: Floats = (_scale(blocks, 0) * factors).reshape(-1)
    return scales


def _iq4_nl(blocks: Bytes) -> Floats:
    return _scale(blocks, 0) * _NL[_table_codes(2, blocks)]


def _iq4_xs(blocks: Bytes) -> Floats:
    return _iq4_xs_scales(blocks)[:, None] * _NL[_table_codes(8, blocks)]


def _mxfp4(blocks: Bytes) -> Floats:
    with np.errstate(over="ignore"):  # like the `gguf` package
        scales = mxfp4.float_scales(blocks[:, 0])
        weights: Floats = scales[:, None] * mxfp4.TABLE[_table_codes(1, blocks)]
    return weights


def _iq4_xs_codes(blocks: Bytes) -> tuple[Bytes, Halves, None]:
    """Return codes and scales. Scales that are too large for a float16 become infinite."""
    with np.errstate(over="ignore"):
        return _table_codes(8, blocks), _iq4_xs_scales(blocks).astype(np.float16), None


def _mxfp4_codes(blocks: Bytes) -> tuple[Bytes, Halves, None]:
    """Return codes and scales, see `_iq4_xs_codes`.

    The scale is 0 for groups of zeros, and for scales below 2 ** -24.
    """
    return _table_codes(1, blocks), mxfp4.half_scales(blocks[:, 0], blocks[:, 1:]), None


def _nvfp4_codes(blocks: Bytes) -> tuple[Bytes, Halves, None]:
    """Return codes and scales; the low nibbles of 8 bytes come first, then their high nibbles."""
    words = np.ascontiguousarray(blocks[:, 4:]).view(np.uint64)
    both = np.empty((*words.shape, 2), dtype=np.uint64)
    both[:, :, 0] = words
    np.right_shift(words, np.uint64(4), out=both[:, :, 1])
    both &= _LOW
    return both.view(np.uint8).reshape(len(blocks), 64), np.take(HALF_SCALES, blocks[:, :4]), None


def _nvfp4(blocks: Bytes) -> Floats:
    codes, scales, _ = _nvfp4_codes(blocks)
    weights = np.take(np.array(E2M1, np.float32), codes).reshape(-1, 4, 16)
    found: Floats = scales.astype(np.float32)[:, :, None] * weights
    return found


def _nibble_scales(pairs: Bytes) -> Floats:
    """Return 2 * scale + 1 for 4-bit scales, low nibbles first, [blocks, 2 * bytes]."""
    nibbles = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=2)
    return (2 * nibbles.reshape(len(pairs), -1) + np.uint8(1)).astype(np.float32)


def _of_grid(
    kind: str, eighths: int, blocks: Bytes, indices: Any, signs: Bytes, scales: Floats
) -> Floats:
    """Return the weights of blocks of a lattice type, float32 [scales, weights of a scale].

    Args:
        kind: packed format, which names the grid.
        eighths: scale of a weight in eighths of the block's float16 number.
        blocks: blocks that begin with this number.
        indices: indices into the grid, [blocks, entries].
        signs: bits of negative weights, [blocks, 32].
        scales: [blocks, scales], as from `_nibble_scales`.
    """
    weights = grid_of(kind)[indices].reshape(len(blocks), scales.shape[1], -1).astype(np.float32)
    is_negative = np.unpackbits(signs, axis=1, bitorder="little").reshape(weights.shape)
    factors = _scale(blocks, 0) * (scales * np.float32(eighths / 8))
    found: Floats = factors[:, :, None] * weights * (1 - 2 * is_negative.astype(np.float32))
    return found


def _seven_signs(signs: npt.NDArray[Any]) -> Bytes:
    """Return the signs of 8 weights from those of 7; the number of negative weights is even."""
    odd = np.bitwise_xor.reduce(signs[..., None] >> np.arange(7, dtype=signs.dtype) & 1, axis=-1)
    found: Bytes = (signs | odd << 7).astype(np.uint8)
    return found


def _words_with_signs(words: npt.NDArray[np.uint32]) -> tuple[Bytes, Floats]:
    """Return the signs and scales of words with four signs of 7 bits and a scale of 4 bits.

    Returns:
        Signs [blocks, 4 * words], and 2 * scale + 1, [blocks, words].
    """
    signs = words[:, :, None] >> np.array([0, 7, 14, 21], dtype=np.uint32) & np.uint32(127)
    return _seven_signs(signs).reshape(len(words), -1), (2 * (words >> 28) + 1).astype(np.float32)


def _iq2_xxs(blocks: Bytes) -> Floats:
    words = np.ascontiguousarray(blocks[:, 2:]).view("<u4").reshape(-1, 8, 2)
    signs, scales = _words_with_signs(words[:, :, 1])
    indices = np.ascontiguousarray(words[:, :, 0]).view(np.uint8).reshape(-1, 32)
    return _of_grid("iq2xxs", 1, blocks, indices, signs, scales)


def _iq2_xs(blocks: Bytes) -> Floats:
    both = np.ascontiguousarray(blocks[:, 2:66]).view("<u2")
    scales = _nibble_scales(blocks[:, 66:])
    return _of_grid("iq2xs", 1, blocks, both & np.uint16(511), _seven_signs(both >> 9), scales)


def _iq2_s(blocks: Bytes) -> Floats:
    high = blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], dtype=np.uint8) & np.uint8(3)
    indices = blocks[:, 2:34] | high.reshape(-1, 32).astype(np.uint16) << np.uint16(8)
    scales = _nibble_scales(blocks[:, 74:])
    return _of_grid("iq2s", 1, blocks, indices, blocks[:, 34:66], scales)


def _iq3_xxs(blocks: Bytes) -> Floats:
    words = np.ascontiguousarray(blocks[:, 66:]).view("<u4")
    signs, scales = _words_with_signs(words)
    return _of_grid("iq3xxs", 2, blocks, blocks[:, 2:66], signs, scales)


def _iq3_s(blocks: Bytes) -> Floats:
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    indices = blocks[:, 2:66] | high << np.uint16(8)
    scales = _nibble_scales(blocks[:, 106:])
    return _of_grid("iq3s", 8, blocks, indices, blocks[:, 74:106], scales)


def _of_deltas(
    blocks: Bytes, at: Place, indices: Any, is_lower: npt.NDArray[np.bool_], scales: Any
) -> Floats:
    """Return the weights of blocks of IQ1_S or IQ1_M, float32 [blocks, weights].

    Args:
        blocks: the blocks.
        at: place of their float16 number.
        indices: indices into the grid, [blocks, 32].
        is_lower: True if the delta of an entry is -1/8 instead of 1/8, [blocks, 32].
        scales: 3-bit scales, [blocks, scales].
    """
    codes = grid_of("iq1s")[indices].astype(np.float32) - np.float32(9)
    eighths = codes - np.float32(2) * is_lower[:, :, None]
    factors = _scale(blocks, at) * ((2 * scales + 1) * np.float32(1 / 8)).astype(np.float32)
    found: Floats = factors[:, :, None] * eighths.reshape(len(blocks), scales.shape[1], -1)
    return found.reshape(len(blocks), -1)


def _iq1_s(blocks: Bytes) -> Floats:
    more = np.ascontiguousarray(blocks[:, 34:]).view("<u2").astype(np.uint16)
    above = more[:, :, None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & np.uint16(7)
    indices = blocks[:, 2:34] | above.reshape(-1, 32) << np.uint16(8)
    is_lower = (more >> np.uint16(15) != 0).repeat(4, axis=1)
    return _of_deltas(blocks, 0, indices, is_lower, more >> np.uint16(12) & np.uint16(7))


def _iq1_m(blocks: Bytes) -> Floats:
    more = np.stack([blocks[:, 32:48] & np.uint8(15), blocks[:, 32:48] >> np.uint8(4)], axis=2)
    above = (more.reshape(-1, 32) & np.uint8(7)).astype(np.uint16)
    words = np.ascontiguousarray(blocks[:, 48:]).view("<u2").astype(np.uint16)
    scales = words[:, :, None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & np.uint16(7)
    indices = blocks[:, :32] | above << np.uint16(8)
    is_lower = more.reshape(-1, 32) > 7
    return _of_deltas(blocks, _SCATTERED, indices, is_lower, scales.reshape(-1, 16))


def _taken_over(places: tuple[Place, ...], blocks: Bytes) -> tuple[Bytes, Halves, None]:
    return blocks, np.concatenate([_half(blocks, at) for at in places], axis=1), None


def _as_blocks(
    nbytes: int,
    kind: str,
    halves: tuple[Place, ...],
    to_float: Callable[[Bytes], Floats],
) -> BlockFormat:
    """Return the format of a type with blocks of 256 weights that are reordered, not converted.

    Args:
        nbytes: size of a block in bytes.
        kind: packed format.
        halves: places of the float16 numbers in a block.
        to_float: function of blocks -> float32.
    """
    codes = partial(_taken_over, halves)
    return BlockFormat(256, nbytes, kind, True, halves, to_float, codes)


def _as_narrow(
    weights: int,
    nbytes: int,
    kind: str,
    half: int,
    codes: Callable[[Bytes], Bytes],
    times: int = 1,
) -> BlockFormat:
    """Return the format of a type whose weights are scale * (code - 1).

    Args:
        weights: number of weights in a block.
        nbytes: size of a block in bytes.
        kind: packed format.
        half: byte offset of the scale in a block.
        codes: function of blocks -> codes [blocks, weights].
        times: number of scales of the packed format for one scale of the block.
    """
    return BlockFormat(
        weights,
        nbytes,
        kind,
        True,
        (half,),
        lambda b: _scale(b, half) * (codes(b).astype(np.float32) - np.float32(1)),
        lambda b: (codes(b), _half(b, half).repeat(times, axis=1), None),
    )


BLOCKS: dict[str, BlockFormat] = {
    "F32": BlockFormat(1, 4, None, True, (), lambda b: b.view("<f4").astype(np.float32)),
    "F16": BlockFormat(1, 2, None, True, (), lambda b: b.view("<f2").astype(np.float32)),
    "BF16": BlockFormat(
        1,
        2,
        None,
        True,
        (),
        lambda b: from_bfloat16(b.view("<u2")),
    ),
    "Q4_0": BlockFormat(
        32, 18, "int4", True, (0,), _q4_0, lambda b: (_nibbles(b[:, 2:]), _half(b, 0), None)
    ),
    "Q4_1": BlockFormat(
        32,
        20,
        "int4-asym",
        True,
        (0, 2),
        _q4_1,
        lambda b: (_nibbles(b[:, 4:]), _half(b, 0), -_half(b, 2)),
    ),
    "Q5_0": BlockFormat(
        32,
        22,
        "int5",
        True,
        (0,),
        _q5_0,
        lambda b: (_fives(b, 2), _half(b, 0), None),
    ),
    "Q5_1": BlockFormat(
        32,
        24,
        "int5-asym",
        True,
        (0, 2),
        _q5_1,
        lambda b: (_fives(b, 4), _half(b, 0), -_half(b, 2)),
    ),
    "Q8_0": BlockFormat(
        32, 34, "int8", True, (0,), _q8_0, lambda b: (_flipped(b[:, 2:]), _half(b, 0), None)
    ),
    "Q4_K": _as_blocks(144, "q4k", (0, 2), _q4_k),
    "Q5_K": _as_blocks(176, "q5k", (0, 2), _q5_k),
    "Q6_K": _as_blocks(210, "q6k", (208,), _q6_k),
    "Q2_K": _as_blocks(84, "q2k", (80, 82), _q2_k),
    "Q3_K": _as_blocks(110, "q3k", (108,), _q3_k),
    "IQ1_S": _as_blocks(50, "iq1s", (0,), _iq1_s),
    "IQ1_M": _as_blocks(56, "iq1m", (_SCATTERED,), _iq1_m),
    "IQ2_XXS": _as_blocks(66, "iq2xxs", (0,), _iq2_xxs),
    "IQ2_XS": _as_blocks(74, "iq2xs", (0,), _iq2_xs),
    "IQ2_S": _as_blocks(82, "iq2s", (0,), _iq2_s),
    "IQ3_XXS": _as_blocks(98, "iq3xxs", (0,), _iq3_xxs),
    "IQ3_S": _as_blocks(110, "iq3s", (0,), _iq3_s),
    "IQ4_NL": BlockFormat(
        32, 18, "int4t", True, (0,), _iq4_nl, lambda b: (_table_codes(2, b), _half(b, 0), None), _NL
    ),
    "IQ4_XS": BlockFormat(
        256, 136, "int4t", False, (0,), _iq4_xs, _iq4_xs_codes, _NL, lambda blocks: 0
    ),
    "MXFP4": BlockFormat(
        32,
        17,
        "int4t",
        True,
        (),
        _mxfp4,
        _mxfp4_codes,
        mxfp4.TABLE,
        lambda b: mxfp4.count_lost(b[:, 0], b[:, 1:]),
    ),
    "NVFP4": BlockFormat(64, 36, "nvfp4", True, (), _nvfp4, _nvfp4_codes, float8=(0, 1, 2, 3)),
    "TQ1_0": _as_narrow(256, 54, "int2-g256", 52, _threes),
    "TQ2_0": _as_narrow(256, 66, "int2-g256", 64, _twos),
    "Q1_0": _as_narrow(128, 18, "int1-g128", 0, partial(_looked_up, _ONES_OF)),
    "Q2_0": _as_narrow(64, 18, "int2-g64", 0, partial(_looked_up, _TWOS_OF)),
    "Q2_0_g128": _as_narrow(128, 34, "int2-g64", 0, partial(_looked_up, _TWOS_OF), 2),
}
"""Supported tensor types by name."""
