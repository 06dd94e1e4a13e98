"""Scales and factors of NVFP4 checkpoints: names of their tensors, and valid numbers.

Block scales are 8-bit floats (E4M3) without a sign. A matrix also has a factor, by which weights
are multiplied (ModelOpt) or divided (compressed-tensors).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["FACTORS", "HALF_SCALES", "SCALE", "UNUSED_SCALES", "bad_scales", "weight_factor"]

SCALE = ".weight_scale"
"""Ending of the block scales of a matrix."""

FACTORS = {".weight_scale_2": False, ".weight_global_scale": True}
"""Endings of the factor of a matrix -> True if weights are divided by it."""

UNUSED_SCALES = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
"""Endings of scales of activations and of a KV cache, which are not used.

They may be infinite, for example those of experts that calibration never reached.
"""

_BITS = np.arange(256, dtype=np.uint8)
_HALVES = (_BITS.astype(np.uint16) << np.uint16(7) & np.uint16(0x3FFF)).view(np.float16)
HALF_SCALES: npt.NDArray[np.float16] = np.where(
    _BITS == 0x7F, np.float16(0), _HALVES * np.float16(2**7)
)
"""Half of each block scale, by its bits. As in llama.cpp, the sign is ignored and NaN is 0."""

_NAN = np.uint8(0x7F)
_MINUS_ZERO = np.uint8(0x80)
_LARGEST = np.float32(6 * 448)  # product of the largest code and the largest scale


def bad_scales(bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_] | None:
    """Return which block scales are NaN or negative, given their bits, or None if all are valid."""
    if not bits.size or bits.max() < _NAN:
        return None
    found: npt.NDArray[np.bool_] = (bits == _NAN) | (bits > _MINUS_ZERO)
    return found if found.any() else None


def weight_factor(stored: float, *, divides: bool) -> np.float32 | None:
    """Return the factor of a matrix's weights.

    The result is None for a damaged number, which is not positive or makes weights infinite.

    Args:
        stored: number in the file.
        divides: see `FACTORS`.
    """
    if not 0 < stored < np.inf:
        return None
    with np.errstate(over="ignore"):
        factor = np.float32(1 / stored if divides else stored)
        return factor if np.isfinite(factor * _LARGEST) else None
