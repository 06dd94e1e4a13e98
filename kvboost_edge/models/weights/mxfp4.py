"""Blocks of 32 weights with one exponent, as GGUF's MXFP4 and gpt-oss's safetensors have them:

    2 ** (exponent - 128) * TABLE[code]

an exponent is a byte, a code 4 bits, two of which share a byte. As int4t they are exact while the
scale is a float16.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["LEAST_WEIGHT", "TABLE", "count_lost", "float_scales", "half_scales"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

TABLE = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=np.int8)
"""Twice the value of E2M1, by code."""
LEAST_WEIGHT = 12 * 2.0**-25
"""Weights up to this may become 0: their scales are below the least float16."""
_LEAST_EXPONENT = 104  # 2 ** -24, the least float16


def float_scales(exponents: Bytes) -> Floats:
    """The scale of every block, float32: exact."""
    wide = exponents.astype(np.uint32)
    tiny = np.uint32(0x00200000) << np.minimum(wide, np.uint32(1))
    bits = np.where(
        wide < 2, tiny, (np.maximum(wide, np.uint32(1)) - np.uint32(1)) << np.uint32(23)
    )
    return bits.astype(np.uint32).view(np.float32)


def half_scales(exponents: Bytes, codes: Bytes) -> npt.NDArray[np.float16]:
    """The same as float16: infinite where one is too large, 0 where it is too small or all weights
    are zeros.

    Args:
        exponents (uint8 [...];): codes: uint8 [..., bytes of a block], two in each.
    """
    with np.errstate(over="ignore"):
        scales = float_scales(exponents).astype(np.float16)
    scales[(exponents < _LEAST_EXPONENT) | ~_has_weights(codes)] = 0
    return scales


def count_lost(exponents: Bytes, codes: Bytes) -> int:
    """Blocks that have weights other than zero, and a scale that becomes 0."""
    small = exponents < _LEAST_EXPONENT
    return int(np.count_nonzero(small & _has_weights(codes))) if small.any() else 0


def _has_weights(codes: Bytes) -> npt.NDArray[np.bool_]:
    """Which blocks are not all zeros: codes 0 and 8 are, of either sign."""
    return np.asarray((codes & np.uint8(0x77)).any(axis=-1), dtype=np.bool_)
