"""Rotary positions: the tables of cosines and sines, and the kernel that turns one head of one token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.norms import fma_f32
from kvboost_edge.kernels.vectors import load_f32, store_f32

__all__ = ["RopeTable", "rotate_head"]

_CHUNK = 1024  # positions computed at once: a row's bits must not depend on how far the table had to grow


class RopeTable:
    """cos and sin of position * frequency, float32 [positions, rotary_dim / 2], grown as positions are met.

    `frequencies` float32 [rotary_dim / 2] in radians per position; `factor` multiplies cos and sin (yarn).
    """

    def __init__(self, frequencies: npt.NDArray[np.float32], factor: float = 1.0) -> None:
        self._frequencies = np.ascontiguousarray(frequencies, dtype=np.float32)
        self._factor = np.float32(factor)
        empty = np.empty((0, self._frequencies.size), dtype=np.float32)
        self.cos: npt.NDArray[np.float32] = empty
        self.sin: npt.NDArray[np.float32] = empty

    def cover(self, positions: int) -> None:
        """Make the tables hold at least `positions` rows."""
        have = len(self.cos)
        if positions <= have:
            return
        starts = range(have, positions, _CHUNK)
        angles = [self._frequencies * np.arange(s, s + _CHUNK, dtype=np.float32)[:, None] for s in starts]
        self.cos = np.concatenate([self.cos, *(np.cos(a) * self._factor for a in angles)])
        self.sin = np.concatenate([self.sin, *(np.sin(a) * self._factor for a in angles)])


@kernel
def rotate_head(x: int, cos: int, sin: int, half: int, dim: int, out: int) -> None:
    """Rotate the pairs (i, i + half) of the first 2 * half of `dim` float32 at address x; copy the rest.

    cos, sin: addresses of float32 [half], the token's rows of the tables. x and out do not overlap.
    """
    for i in range(half):
        a, b = load_f32(x + 4 * i), load_f32(x + 4 * (i + half))
        c, s = load_f32(cos + 4 * i), load_f32(sin + 4 * i)
        store_f32(out + 4 * i, fma_f32(a, c, -(b * s)))
        store_f32(out + 4 * (i + half), fma_f32(b, c, a * s))
    for i in range(2 * half, dim):
        store_f32(out + 4 * i, load_f32(x + 4 * i))
