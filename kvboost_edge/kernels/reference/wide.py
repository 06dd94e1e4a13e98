"""Wide arithmetic in plain NumPy: the oracle of linear/wide.py.

Activations and weights are int8 with one scale per token or row and wide group of 128 inputs. With
fine codes, activations have 16 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.reference.linear import group_sums

__all__ = ["WIDE", "linear_wide", "quantize_wide_rows", "requantize_rows"]

Floats = npt.NDArray[np.float32]
WIDE = 128
_FINE_BASE = 255
_LEVELS = np.float32(127.0)


def _grouped(values: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Return [rows, groups, size], padded with zeros."""
    rows, count = values.shape
    padded = np.zeros((rows, -(-count // size) * size), values.dtype)
    padded[:, :count] = values
    return padded.reshape(rows, -1, size)


def _ratios(top: Floats, levels: np.float32) -> tuple[Floats, Floats]:
    """Return scales and their inverses for the largest magnitudes of groups."""
    empty = top < np.float32(1e-30)
    safe = np.where(empty, np.float32(1.0), top)
    with np.errstate(invalid="ignore"):  # an infinite `top` gives a NaN scale
        scales = np.where(empty, np.float32(0.0), top / levels + (top - top))
    return scales.astype(np.float32), np.where(empty, np.float32(0.0), levels / safe)


def quantize_wide_rows(x: Floats, *, fine: bool = False) -> tuple[npt.NDArray[np.int16], Floats]:
    """Quantize float32 [tokens, count] to codes and scales.

    Returns:
        (codes [tokens, wide groups * 128], float32 scales [tokens, wide groups]).
    """
    grouped = _grouped(x, WIDE)
    levels = np.float32(127.0 * _FINE_BASE if fine else 127.0)
    scales, inverse = _ratios(np.abs(grouped).max(axis=2), levels)
    codes = np.rint(grouped * inverse[:, :, None]).astype(np.int16)
    return codes.reshape(len(x), -1), scales


def requantize_rows(
    codes: npt.NDArray[np.int8], scales: Floats, minima: Floats | None = None
) -> tuple[npt.NDArray[np.int8], Floats]:
    """Quantize weights scale * code - minimum again.

    Args:
        codes: int8 [rows, padded inputs].
        scales: float32 [rows, groups], of 32 or 16 inputs each.
        minima: like `scales`, or None.

    Returns:
        (int8 codes [rows, wide groups * 128], float32 scales [rows, wide groups]).
    """
    rows, inputs = codes.shape
    size = inputs // scales.shape[1]
    wide = codes.astype(np.float64)
    factors = scales.repeat(size, axis=1)
    low = np.zeros_like(factors) if minima is None else minima.repeat(size, axis=1)
    # One rounding to float32, like a fused multiply-add.
    weights = (wide * factors - low).astype(np.float32)
    top = np.abs(_grouped(weights, WIDE)).max(axis=2)
    found, inverse = _ratios(top, _LEVELS)
    turned = inverse.repeat(WIDE, axis=1)[:, :inputs]
    values = (wide * (factors * turned) - low * turned).astype(np.float32)
    quantized = np.rint(_grouped(values, WIDE)).astype(np.int8)
    return quantized.reshape(rows, -1), found


def linear_wide(
    codes: npt.NDArray[np.int16],
    scales: Floats,
    weights: npt.NDArray[np.int8],
    weight_scales: Floats,
) -> Floats:
    """Return a product, float32 [tokens, rows].

    Wide groups are added in order: out = fma(sum * token scale, weight scale, out).

    Args:
        codes: activations [tokens, wide groups * 128].
        scales: float32 [tokens, wide groups].
        weights: int8 [rows, wide groups * 128].
        weight_scales: float32 [rows, wide groups].
    """
    sums = group_sums(codes, weights, WIDE).astype(np.float32)
    out = np.zeros(sums.shape[:2], dtype=np.float32)
    for group in range(sums.shape[2]):
        scaled = (sums[:, :, group] * scales[:, group, None]).astype(np.float64)
        out = (scaled * weight_scales[None, :, group] + out).astype(np.float32)
    return out
