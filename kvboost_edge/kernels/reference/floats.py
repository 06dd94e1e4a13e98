"""Float32 functions in plain NumPy, with the rounding steps of the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["exp2_f32", "exp_f32", "fma_f32", "norm_rows_f32", "sigmoid_f32", "softplus_f32"]

Floats = npt.NDArray[np.float32]
F32 = np.float32

_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_EXP2 = (0.0013264729, 0.009671513, 0.055507337, 0.24022242, 0.69314698, 1.0)
_HIGHEST = F32(88.0)


def fma_f32(x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z in float32, rounded once (twice in the rare case of a float64 tie)."""
    return (
        np.asarray(x, np.float64) * np.asarray(y, np.float64) + np.asarray(z, np.float64)
    ).astype(F32)


@np.errstate(invalid="ignore")  # for x = -inf, where r is NaN but the result is 0
def exp_f32(x: Floats) -> Floats:
    """Return exp(x) for x <= 88, using the kernels' polynomial."""
    magic = F32(12582912.0)
    shifted = fma_f32(x, F32(1.44269504088896341), magic)
    n = shifted - magic
    r = fma_f32(n, F32(2.12194440e-4), fma_f32(n, F32(-0.693359375), x))
    p: Any = F32(_EXP[0])
    for coefficient in _EXP[1:]:
        p = fma_f32(p, r, F32(coefficient))
    p = fma_f32(r * r, p, r) + F32(1.0)
    power = ((shifted.view(np.uint32) << np.uint32(23)) + np.uint32(127 << 23)).view(F32)
    return np.where(x < F32(-87.0), F32(0.0), p * power).astype(F32)


@np.errstate(invalid="ignore")  # for x = -inf, where r is NaN but the result is 0
def exp2_f32(x: Floats) -> Floats:
    """Return 2^x for x <= 127, using the kernels' polynomial."""
    magic = F32(12582912.0 + 127.0)
    shifted = (x + magic).astype(F32)
    r = x - (shifted - magic)
    p: Any = F32(_EXP2[0])
    for coefficient in _EXP2[1:]:
        p = fma_f32(p, r, F32(coefficient))
    power = (shifted.view(np.uint32) << np.uint32(23)).view(F32)
    return np.where(x < F32(-126.0), F32(0.0), p * power).astype(F32)


def sigmoid_f32(x: npt.NDArray[Any]) -> Floats:
    """Return 1 / (1 + exp(-x))."""
    result: Floats = F32(1.0) / (F32(1.0) + exp_f32(np.minimum(-x, _HIGHEST)))
    return result


def softplus_f32(x: npt.NDArray[Any]) -> Floats:
    """Return log(1 + exp(x)), using the kernels' series."""
    # Compute max(x, 0) + log1p(y) with y = exp(-|x|) and log1p(y) = 2 artanh(y / (2 + y)).
    y = exp_f32(-np.abs(x))
    s = y / (F32(2.0) + y)
    square = s * s
    series: Any = F32(1.0 / 13.0)
    for number in (11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = fma_f32(series, square, F32(1.0 / number))
    result: Floats = fma_f32(F32(2.0) * s, series, np.maximum(x, F32(0.0)))
    return result


def norm_rows_f32(x: npt.NDArray[Any], weight: Floats, eps: float) -> Floats:
    """Return the RMS norm of rows [..., count]; count must be a multiple of 16.

    Squares are summed in 16 chains that are then folded by halves.
    """
    count = x.shape[-1]
    lanes: Floats = np.zeros((*x.shape[:-1], 16), F32)
    for first in range(0, count, 16):
        piece = x[..., first : first + 16]
        lanes = fma_f32(piece, piece, lanes)
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    factor = (F32(1.0) / np.sqrt(lanes / F32(count) + F32(eps))).astype(F32)
    result: Floats = x * factor * weight
    return result
