"""RoPE in plain NumPy: rotates queries, and shifts keys to other positions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.attention.paged import Floats, QueryRotation
from kvboost_edge.segments import Longs

__all__ = ["rotate_heads", "turn_keys"]

Doubles = npt.NDArray[np.float64]


def rotate_heads(heads: Floats, position: int, turning: QueryRotation) -> Floats:
    """Rotate heads [n, head_dim] to a position in float32, with the kernel's rounding steps."""
    cos = turning.cos[position]
    sin = turning.sin[position]
    half = turning.cos.shape[1]
    first = heads[:, :half]
    second = heads[:, half : 2 * half]
    wide_first, wide_second, wide_cos = (array.astype(np.float64) for array in (first, second, cos))
    pairs = wide_first * wide_cos - second * sin, wide_second * wide_cos + first * sin
    return np.hstack([*pairs, heads[:, 2 * half :]]).astype(np.float32)


def turn_keys(keys: Doubles, deltas: Longs, turning: QueryRotation) -> Doubles:
    """Shift keys [num_kv_heads, tokens, head_dim] by `deltas` [tokens] positions.

    The tables must have max(abs(deltas)) + 1 rows. Row 0 holds RoPE's factor, which is divided out
    of the tables because the keys already contain it.
    """
    half = turning.cos.shape[1]
    factor = turning.cos[:1].astype(np.float64)
    cos = turning.cos[np.abs(deltas)] / factor
    sin = np.sign(deltas)[:, None] * turning.sin[np.abs(deltas)] / factor
    first = keys[:, :, :half]
    second = keys[:, :, half : 2 * half]
    return np.concatenate(
        [first * cos - second * sin, second * cos + first * sin, keys[:, :, 2 * half :]], axis=2
    )
