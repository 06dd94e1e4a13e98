"""The block formats of GGUF tensors: to float32, and to the codes of this package's packed formats.

A row is a whole number of blocks. `data` is uint8 [rows, bytes of a row] everywhere. Formulas and
the order of the float operations are llama.cpp's, so float32 values equal those of the `gguf`
package to the bit.

    Q4_0 -> int4, Q5_0 and Q8_0 -> int8, Q4_1 -> int4-asym   exact
    Q4_K -> q4k, Q5_K -> q5k, Q6_K -> q6k   exact: the file's blocks in another order
    Q3_K -> q6k      exact: its codes and scales fit those of Q6_K, in nearly twice the bytes
    IQ4_NL, MXFP4, IQ4_XS -> int4t   exact but for rounded scales of IQ4_XS, see tables.py
    Q5_1 -> int8     quantized again: scale = max|w| / 127 of each group of 32
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.gguf.tables import TABLES, float_scales, half_scales, table_codes
from kvboost_edge.models.weights.source import QuantRows

__all__ = [
    "BLOCKS",
    "TYPE_NAMES",
    "BlockFormat",
    "dequantize",
    "quant_rows_of",
    "refusal",
    "scales_of",
]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
GROUP = 32
_SIXTEEN = np.dtype("V16")
_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)


class BlockFormat(NamedTuple):
    """weights, nbytes: of a block;  kind: the packed format it goes to, None for floats;  exact:
                                     without any error.
    halves: offsets of the float16 numbers in a block, which may not be NaN or infinite.
    """

    weights: int
    nbytes: int
    kind: str | None
    exact: bool
    halves: tuple[int, ...] = ()


BLOCKS: dict[str, BlockFormat] = {
    "F32": BlockFormat(1, 4, None, True),
    "F16": BlockFormat(1, 2, None, True),
    "BF16": BlockFormat(1, 2, None, True),
    "Q4_0": BlockFormat(32, 18, "int4", True, (0,)),
    "Q4_1": BlockFormat(32, 20, "int4-asym", True, (0, 2)),
    "Q5_0": BlockFormat(32, 22, "int8", True, (0,)),
    "Q5_1": BlockFormat(32, 24, "int8", False, (0, 2)),
    "Q8_0": BlockFormat(32, 34, "int8", True, (0,)),
    "Q4_K": BlockFormat(256, 144, "q4k", True, (0, 2)),
    "Q5_K": BlockFormat(256, 176, "q5k", True, (0, 2)),
    "Q6_K": BlockFormat(256, 210, "q6k", True, (208,)),
    "Q3_K": BlockFormat(256, 110, "q6k", True, (108,)),
    "IQ4_NL": BlockFormat(32, 18, "int4t", True, (0,)),
    "IQ4_XS": BlockFormat(256, 136, "int4t", False, (0,)),
    "MXFP4": BlockFormat(32, 17, "int4t", True),
}
"""The formats that are read, by name."""

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
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}
"""Numbers of tensor types in the file, also of those that are not read."""

_INSTEAD = "take a Q4_K_M or IQ4_XS file of this model"
# Beginning of a type's name -> why it is not read, and what to take.
_REFUSED = {
    "Q2_K": (
        "it has a scale and a minimum for every 16 weights, and in the packed formats would be "
        f"larger and less exact; {_INSTEAD}, or a Q3_K_M one"
    ),
    **dict.fromkeys(
        ("IQ1", "IQ2", "IQ3"),
        "its weights are points of a lattice, and as 4 or 8 bits would be larger and less exact; "
        f"{_INSTEAD}",
    ),
    **dict.fromkeys(
        ("TQ", "Q1_0", "Q2_0"), f"it is for models trained with two or three values; {_INSTEAD}"
    ),
    "NVFP4": (
        "its scales have 8 bits for every 16 weights, for which there is no packed format; "
        f"{_INSTEAD}"
    ),
    **dict.fromkeys(
        ("Q8_1", "Q8_K"), "it is for numbers inside a computation, not for files; take another file"
    ),
}


def refusal(name: str) -> str:
    """Why a type that is not in BLOCKS is not read, and what to take instead."""
    found = next((text for beginning, text in _REFUSED.items() if name.startswith(beginning)), None)
    return found or f"known are {', '.join(BLOCKS)}; {_INSTEAD}"


def dequantize(name: str, data: Bytes) -> Floats:
    """float32 [rows, weights of a row] of any format in BLOCKS."""
    rows = len(data)
    if name == "F32":
        return data.reshape(-1).view("<f4").astype(np.float32).reshape(rows, -1)
    if name == "F16":
        return data.reshape(-1).view("<f2").astype(np.float32).reshape(rows, -1)
    if name == "BF16":
        wide = data.reshape(-1).view("<u2").astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).reshape(rows, -1)
    return _TO_FLOAT[name](_blocks(name, data)).reshape(rows, -1)


def quant_rows_of(name: str, data: Bytes) -> QuantRows:
    """Codes and scales of rows of a quantized format, or its blocks; the kind is
    BLOCKS[name].kind.
    """
    rows = len(data)
    blocks = _blocks(name, data)
    if name in ("Q4_K", "Q5_K", "Q6_K", "Q3_K"):
        stored = _q3_k_as_q6_k(blocks).reshape(rows, -1) if name == "Q3_K" else data
        return QuantRows(str(BLOCKS[name].kind), stored, scales_of(name, data).reshape(rows, -1))
    if name in TABLES:
        found = _rows_of(rows, "int4t", table_codes(name, blocks), half_scales(name, blocks))
        return found._replace(table=TABLES[name])
    if name == "Q4_0":
        return _rows_of(rows, "int4", _nibbles(blocks[:, 2:]), _half(blocks, 0))
    if name == "Q4_1":
        return _rows_of(
            rows, "int4-asym", _nibbles(blocks[:, 4:]), _half(blocks, 0), -_half(blocks, 2)
        )
    if name == "Q5_0":
        return _rows_of(rows, "int8", _fives(blocks, 2) + np.uint8(112), _half(blocks, 0))
    if name == "Q8_0":
        return _rows_of(rows, "int8", _flipped(blocks[:, 2:]), _half(blocks, 0))
    return _requantized(dequantize(name, data))


def scales_of(name: str, data: Bytes) -> npt.NDArray[np.float16]:
    """The float16 numbers of every block, [blocks, numbers of a block]."""
    blocks = _blocks(name, data)
    none = np.empty((len(blocks), 0), dtype=np.float16)
    return np.concatenate([none, *(_half(blocks, at) for at in BLOCKS[name].halves)], axis=1)


def _blocks(name: str, data: Bytes) -> Bytes:
    if BLOCKS[name].kind is None:
        raise ModelFormatError(f"tensors of type {name} are not stored quantized")
    return np.ascontiguousarray(data).reshape(-1, BLOCKS[name].nbytes)


def _rows_of(
    rows: int,
    kind: str,
    codes: Bytes,
    scales: npt.NDArray[np.float16],
    minima: npt.NDArray[np.float16] | None = None,
) -> QuantRows:
    """From one group, or one block of groups, per row of the arguments to whole rows of the
    tensor.
    """
    return QuantRows(
        kind,
        codes.reshape(rows, -1),
        scales.reshape(rows, -1),
        None if minima is None else minima.reshape(rows, -1),
    )


def _requantized(weights: Floats) -> QuantRows:
    grouped = weights.reshape(len(weights), -1, GROUP)
    scales = _as_half(np.abs(grouped).max(axis=2) / np.float32(127.0))
    wide = scales.astype(np.float32)
    inverse = np.divide(np.float32(1.0), wide, out=np.zeros_like(wide), where=wide != 0)
    codes = (np.clip(np.rint(grouped * inverse[:, :, None]), -127, 127) + 128).astype(np.uint8)
    return QuantRows("int8", codes.reshape(weights.shape), scales)


def _as_half(values: Floats) -> npt.NDArray[np.float16]:
    return np.clip(values, -65504.0, 65504.0).astype(np.float16)


def _half(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    """The float16 at byte `at` of every block, [blocks, 1]."""
    return blocks[:, at : at + 2].view("<f2").astype(np.float16)


def _scale(blocks: Bytes, at: int) -> Floats:
    return _half(blocks, at).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low nibbles, then high ones: [blocks, 16] -> [blocks, 32]."""
    # Sixteen bytes are moved as one item and eight are masked at once: NumPy's loops over bytes
    # take six times as long.
    words = np.ascontiguousarray(packed.view(_SIXTEEN)).view(np.uint64)
    both = np.empty((len(packed), 2), dtype=_SIXTEEN)
    both[:, 0] = (words & _LOW).view(_SIXTEEN)[:, 0]
    both[:, 1] = (words >> np.uint64(4) & _LOW).view(_SIXTEEN)[:, 0]
    return both.view(np.uint8)


def _flipped(codes: Bytes) -> Bytes:
    """Signed bytes as codes with an offset of 128: [blocks, 32]."""
    words = np.ascontiguousarray(codes.view(_SIXTEEN)).view(np.uint64)
    return (words ^ np.uint64(0x8080808080808080)).view(np.uint8)


def _fives(blocks: Bytes, at: int) -> Bytes:
    """5-bit codes: 4 bytes of fifth bits from byte `at` on, then 16 of nibbles."""
    high = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return _nibbles(blocks[:, at + 4 :]) | (high << np.uint8(4))


def _k_nibbles(packed: Bytes) -> Bytes:
    """[blocks, 128] -> [blocks, 256]: of each 32 bytes the low nibbles, then the high ones."""
    quarters = packed.reshape(len(packed), 4, 1, 32)
    both = np.concatenate([quarters & np.uint8(15), quarters >> np.uint8(4)], axis=2)
    return both.reshape(len(packed), 256)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima of the 8 groups of Q4_K and Q5_K blocks: 6-bit factors of two float16,
    float32 [blocks, 8].
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


def _q3_k_parts(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Of Q3_K the codes 0..7, [blocks, 256], for the weights -4..3, and 6-bit scales, [blocks, 16],
    32 too large.
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


def _q3_k_as_q6_k(blocks: Bytes) -> Bytes:
    """The same weights as blocks of Q6_K, [blocks, 210]: codes 28 higher are 32 above the
    weight.
    """
    codes, scales = _q3_k_parts(blocks)
    halves = (codes + np.uint8(28)).reshape(-1, 2, 2, 64)
    low = halves[:, :, 0] & np.uint8(15) | halves[:, :, 1] << np.uint8(4)
    high = (halves >> np.uint8(4)).reshape(-1, 2, 4, 32) << np.array(
        [0, 2, 4, 6], dtype=np.uint8
    ).reshape(1, 1, 4, 1)
    planes = [low.reshape(-1, 128), np.bitwise_or.reduce(high, axis=2).reshape(-1, 64)]
    return np.concatenate([*planes, scales - np.uint8(32), blocks[:, 108:110]], axis=1)


def _from_table(name: str) -> Callable[[Bytes], Floats]:
    def to_float(blocks: Bytes) -> Floats:
        with np.errstate(over="ignore"):  # of MXFP4, as in the package
            weights: Floats = (
                float_scales(name, blocks)[:, None] * TABLES[name][table_codes(name, blocks)]
            )
        return weights

    return to_float


_TO_FLOAT: dict[str, Callable[[Bytes], Floats]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q3_K": _q3_k,
    **{name: _from_table(name) for name in TABLES},
}
