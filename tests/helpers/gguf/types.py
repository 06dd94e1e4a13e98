"""Sizes and dequantization of tensor types by name, also of ones newer than the package."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Number in the file, weights and bytes of a block. Q2_0_g128 is the type that early files store
# under the number of Q2_0.
TYPES = {kind.name: (int(kind), *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType} | {
    "Q2_0": (42, 64, 18),
    "Q2_0_g128": (42, 128, 34),
}
# Bits of a code, value of code 0, and step between codes in units of the scale.
_BY_BITS = {"Q1_0": (1, -1, 2), "Q2_0": (2, -1, 1), "Q2_0_g128": (2, -1, 1)}


def put_half(blocks: Bytes, at: int | tuple[int, ...], values: npt.ArrayLike) -> None:
    """Write a float16 into each block, at a byte offset or, as in IQ1_M, into the high nibbles of
    four bytes.
    """
    bits = np.resize(np.asarray(values, np.float16), len(blocks)).view(np.uint16)
    if isinstance(at, int):
        blocks[:, at : at + 2] = bits[:, None].view(np.uint8)
        return
    for index, byte in enumerate(at):
        nibbles = (bits >> 4 * index & 15).astype(np.uint8)
        blocks[:, byte] = blocks[:, byte] & 15 | nibbles << 4


def dequantized(name: str, data: Bytes) -> Floats:
    """Dequantize rows of blocks to float32 [rows, weights], with the package or bit by bit as in
    ggml-quants.c.
    """
    if name not in _BY_BITS:
        return np.asarray(quants.dequantize(data, GGMLQuantizationType[name]))
    bits, lowest, step = _BY_BITS[name]
    _, weights, nbytes = TYPES[name]
    found = []
    for block in data.reshape(-1, nbytes):
        scale = np.float32(block[:2].view(np.float16)[0])
        number = int.from_bytes(block[2:].tobytes(), "little")
        codes = [number >> bits * index & (1 << bits) - 1 for index in range(weights)]
        found.append([np.float32(lowest + step * code) * scale for code in codes])
    return np.array(found, np.float32).reshape(len(data), -1)
