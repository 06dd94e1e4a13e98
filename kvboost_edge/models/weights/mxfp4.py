"""MXFP4 blocks of 32 weights with a shared exponent, as in GGUF files and gpt-oss's safetensors.

    weight = 2 ** (exponent - 128) * TABLE[code]

The exponent is a byte, and each byte of codes contains two 4-bit codes. The conversion to int4t is
exact if the scale can be represented as a float16.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.linear.weight_formats import E2M1

__all__ = ["TABLE", "LostWeights", "count_lost", "float_scales", "half_scales"]

_LOG = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

TABLE = np.array(E2M1, dtype=np.int8)
"""Weight of each code, which is twice its E2M1 value."""
# Weights below this limit may become 0, because their scale is too small for a float16.
_LEAST_WEIGHT = 12 * 2.0**-25
_LEAST_EXPONENT = 104  # exponent of 2 ** -24, the smallest float16


def float_scales(exponents: Bytes) -> Floats:
    """Return the exact scale of each block as float32."""
    wide = exponents.astype(np.uint32)
    tiny = np.uint32(0x00200000) << np.minimum(wide, np.uint32(1))
    bits = np.where(
        wide < 2, tiny, (np.maximum(wide, np.uint32(1)) - np.uint32(1)) << np.uint32(23)
    )
    return bits.astype(np.uint32).view(np.float32)


def half_scales(exponents: Bytes, codes: Bytes) -> npt.NDArray[np.float16]:
    """Return the scale of each block as float16.

    It is infinite if it is too large, and 0 if it is too small or all weights of the block are 0.

    Args:
        exponents: uint8 [...].
        codes: uint8 [..., bytes of a block], with two codes in each byte.
    """
    with np.errstate(over="ignore"):
        scales = float_scales(exponents).astype(np.float16)
    scales[(exponents < _LEAST_EXPONENT) | ~_has_weights(codes)] = 0
    return scales


def count_lost(exponents: Bytes, codes: Bytes) -> int:
    """Return the number of blocks with nonzero weights whose scale becomes 0."""
    small = exponents < _LEAST_EXPONENT
    return int(np.count_nonzero(small & _has_weights(codes))) if small.any() else 0


class LostWeights:
    """Log of the tensors with weights that become 0, one warning for each tensor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged = set[str]()

    def note(self, path: Path, name: str, num_blocks: int) -> None:
        """Log a tensor if it lost the weights of any blocks."""
        with self._lock:
            is_new = num_blocks > 0 and name not in self._logged
            self._logged |= {name} if is_new else set()
        if is_new:
            _LOG.warning(
                "%s: tensor %r has weights below %.1g, which become 0 (scales of 2**-25 and less)",
                path,
                name,
                _LEAST_WEIGHT,
            )


def _has_weights(codes: Bytes) -> npt.NDArray[np.bool_]:
    """Return a mask of the blocks with any nonzero weight. Codes 0 and 8 stand for zero."""
    return np.asarray((codes & np.uint8(0x77)).any(axis=-1), dtype=np.bool_)
