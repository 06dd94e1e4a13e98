"""Rotary position embeddings (RoPE): cos/sin tables, and a kernel for one head of one token."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.integers import int_constant
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.vectors import (
    I64,
    LANES,
    V16,
    emit_fma,
    emit_load,
    emit_store,
    fma_f32,
    load_f32,
    store_f32,
)

__all__ = ["RopeTable", "copy_floats", "rotate_head"]

# Number of positions that are computed at once. It is fixed, so a row's bits do not depend on how
# the table grew.
_AT_ONCE = 1024


class RopeTable:
    """Tables of cos and sin of position * frequency that grow on demand.

    Args:
        frequencies: float32 [rotary_dim / 2], radians per position.
        factor: factor applied to cos and sin (YaRN's attention scale).

    Attributes:
        cos: float32 [positions, rotary_dim / 2].
        sin: float32 [positions, rotary_dim / 2].
    """

    def __init__(self, frequencies: npt.NDArray[np.float32], factor: float = 1.0) -> None:
        self._frequencies = np.ascontiguousarray(frequencies, dtype=np.float32)
        self._factor = np.float32(factor)
        empty = np.empty((0, self._frequencies.size), dtype=np.float32)
        self.cos: npt.NDArray[np.float32] = empty
        self.sin: npt.NDArray[np.float32] = empty

    def cover(self, positions: int) -> None:
        """Grow the tables to at least `positions` rows; a MemoryError leaves them unchanged."""
        have = len(self.cos)
        if positions <= have:
            return
        starts = range(have, positions, _AT_ONCE)
        angles = [
            self._frequencies * np.arange(s, s + _AT_ONCE, dtype=np.float32)[:, None]
            for s in starts
        ]
        cos = np.concatenate([self.cos, *(self._turned(np.cos, a) for a in angles)])
        sin = np.concatenate([self.sin, *(self._turned(np.sin, a) for a in angles)])
        # assign both together, because the second allocation may fail
        self.cos = cos
        self.sin = sin

    def _turned(
        self, function: np.ufunc, angles: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        # Compute in float64 and round. float32 cos and sin differ in bits between processors, and
        # cached KV moves between machines. 1,024 positions of 64 pairs take 1.7 ms instead of 0.2
        # ms.
        turned: npt.NDArray[np.float32] = function(angles, dtype=np.float64).astype(np.float32)
        return turned * np.float32(self._factor)


@intrinsic
def _rotate_vectors(typing: Any, x: Any, cos: Any, sin: Any, half: Any, out: Any) -> Any:
    """Rotate the first half // 16 * 16 pairs of a head; see `rotate_head` for the arguments."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        x, cos, sin, half, out = arguments
        behind = b.mul(half, int_constant(4))
        with cgutils.for_range(b, b.lshr(half, int_constant(4)), intp=I64) as loop:
            at = b.mul(loop.index, int_constant(4 * LANES))
            near = b.add(x, at)
            far = b.add(b.add(x, at), behind)
            first, second, c, s = (
                emit_load(b, V16, place) for place in (near, far, b.add(cos, at), b.add(sin, at))
            )
            turned = emit_fma(b, first, c, b.fneg(b.fmul(second, s)))
            emit_store(b, turned, b.add(out, at))
            emit_store(b, emit_fma(b, second, c, b.fmul(first, s)), b.add(b.add(out, at), behind))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def _copy_vectors(typing: Any, x: Any, vectors: Any, out: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        x, vectors, out = arguments
        with cgutils.for_range(b, vectors, intp=I64) as loop:
            at = b.mul(loop.index, int_constant(4 * LANES))
            emit_store(b, emit_load(b, V16, b.add(x, at)), b.add(out, at))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@kernel
def copy_floats(x: int, count: int, out: int) -> None:
    """Copy `count` float32 from address `x` to address `out`; the ranges must not overlap."""
    _copy_vectors(x, count // LANES, out)
    for i in range(count // LANES * LANES, count):
        store_f32(out + 4 * i, load_f32(x + 4 * i))


@kernel
def rotate_head(x: int, cos: int, sin: int, half: int, dim: int, out: int) -> None:
    """Rotate the pairs (i, i + half) of one head and copy the channels from 2 * half on.

    Args:
        x: address of float32 [dim].
        cos: address of float32 [half], the token's row of the table.
        sin: address of float32 [half].
        half: number of rotary pairs.
        dim: channels per head.
        out: address of float32 [dim], written; must not overlap `x`.
    """
    _rotate_vectors(x, cos, sin, half, out)
    for i in range(half // LANES * LANES, half):
        a = load_f32(x + 4 * i)
        b = load_f32(x + 4 * (i + half))
        c = load_f32(cos + 4 * i)
        s = load_f32(sin + 4 * i)
        store_f32(out + 4 * i, fma_f32(a, c, -(b * s)))
        store_f32(out + 4 * (i + half), fma_f32(b, c, a * s))
    copy_floats(x + 8 * half, dim - 2 * half, out + 8 * half)
