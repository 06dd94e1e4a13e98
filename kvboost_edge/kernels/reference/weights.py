"""Weight quantization and dequantization in plain NumPy, the oracle of linear/least_squares.py.

Packed minima have the layout of scales, float16 [tile][group][16]. Codes of int4-asym and int5-asym
are stored like those of int4 and int5, without an offset. Padding rows have scale 0. Padding inputs
may have any code, because their activations are 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.linear.weight_formats import FORMATS, GROUP, WeightFormat
from kvboost_edge.kernels.linear.weights import PackedRows
from kvboost_edge.kernels.reference.linear import (
    unpack_block_codes,
    unpack_block_scales,
    unpack_codes,
    unpack_e2m1_codes,
    unpack_float8_scales,
    unpack_floats,
    unpack_scales,
    unpack_table_codes,
)

__all__ = ["fit_rows", "round_to_nearest", "unpack_rows"]

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]


def unpack_rows(packed: PackedRows, rows: int, inputs: int, weights: str) -> Floats:
    """Dequantize a packed matrix to float32 [rows, inputs]."""
    if weights in ("f32", "bf16"):
        return unpack_floats(
            packed.codes.view(np.float32 if weights == "f32" else np.uint16), rows, inputs
        )
    form = FORMATS[weights]
    if form.float8:
        codes = unpack_e2m1_codes(packed.codes, rows, inputs).astype(np.float32)
        factors = packed.minima.view(np.float32)
        scales = unpack_float8_scales(packed.scales, factors, rows, inputs)
        found: Floats = codes * scales.repeat(form.scale_inputs, axis=1)
        return found[:rows, :inputs]
    if form.block_bytes:
        codes = unpack_block_codes(packed.codes, rows, inputs, weights).astype(np.float32)
        stored = packed.codes if form.scales_in_codes else packed.scales
        scales, offsets = unpack_block_scales(
            stored, packed.minima.view(np.float16), rows, inputs, weights
        )
        values: Floats = codes * scales.repeat(codes.shape[1] // scales.shape[1], axis=1)
        if offsets is not None:
            values = values - offsets.repeat(codes.shape[1] // offsets.shape[1], axis=1)
        return values[:rows, :inputs]
    if form.table:
        codes = unpack_table_codes(packed.codes, packed.minima, rows, inputs).astype(np.float32)
    else:
        codes = unpack_codes(packed.codes, rows, inputs, form.bits).astype(np.float32)
    halves = packed.scales.view(np.float16)
    scales = unpack_scales(halves, rows, inputs, form.scale_groups).repeat(GROUP, axis=1)
    if not form.minima:
        return (codes * scales)[:rows, :inputs]
    minima = unpack_scales(packed.minima.view(np.float16), rows, inputs).repeat(GROUP, axis=1)
    return ((codes + np.float32(1 << form.bits - 1)) * scales - minima)[:rows, :inputs]


def round_to_nearest(weights: Floats, kind: str) -> Floats:
    """Quantize by plain rounding and return the dequantized weights.

    The scale comes from the largest magnitude, the minimum from the smallest weight.
    """
    fit = FORMATS[kind]
    w = _groups(weights)
    if kind == "int4-asym":
        minimum = -w.min(axis=-1, keepdims=True)
        scale = (w.max(axis=-1, keepdims=True) + minimum) / np.float32(fit.highest)
    else:
        minimum = np.zeros((*w.shape[:-1], 1), np.float32)
        scale = np.abs(w).max(axis=-1, keepdims=True) / np.float32(fit.highest)
    scale = _half(scale)
    minimum = _half(minimum)
    codes = np.clip(np.rint((w + minimum) * _inverse(scale)), fit.lowest, fit.highest)
    back: Floats = (codes * scale - minimum).reshape(len(weights), -1)[:, : weights.shape[1]]
    return back


def fit_rows(weights: Floats, kind: str) -> tuple[npt.NDArray[np.int16], Halves, Halves]:
    """Quantize weights by least squares.

    The operations and their order are the same as in the kernel, except that fused multiply-adds
    are in rare cases rounded twice.

    Returns:
        (codes, scales, minima): signed int16 [rows, groups, 32], and float16 [rows, groups] each.
            Minima are 0 for formats without them.
    """
    form = FORMATS[kind]
    fit = form.fit
    assert fit is not None
    minima = form.minima
    w = _groups(weights)
    counts = np.minimum(GROUP, weights.shape[1] - GROUP * np.arange(w.shape[1])).astype(np.float32)
    total = _chain(w, counts, lambda x, out: out + x)
    best = np.full(w.shape[:2], np.inf, np.float32)
    best_scale, best_minimum = (np.zeros(w.shape[:2], np.float32) for _ in range(2))
    for delta in fit.deltas:
        scale, minimum = _first(w, form, delta)
        for _ in range(fit.rounds):
            scale = _half(scale)
            minimum = _half(minimum)
            code = _codes(w, form, scale, minimum)
            off = _fma(-scale[:, :, None], code, w + minimum[:, :, None])
            error = _chain(off, counts, lambda x, out: _fma(x, x, out))
            better = error < best
            best = np.where(better, error, best)
            best_scale = np.where(better, scale, best_scale)
            best_minimum = np.where(better, minimum, best_minimum)
            scale, minimum = _fitted(w, code, counts, scale, total if minima else None)
    codes = _codes(w, form, best_scale, best_minimum).astype(np.int16)
    return codes, best_scale.astype(np.float16), best_minimum.astype(np.float16)


def _groups(weights: Floats) -> Floats:
    """Return weights [rows, inputs] as padded groups, [rows, groups, 32]."""
    rows, inputs = weights.shape
    groups = -(-inputs // GROUP)
    # Pad the last group with its first weight, which changes neither the smallest nor the largest
    # weight of the group.
    padded = np.zeros((rows, groups * GROUP), np.float32)
    padded[:, :inputs] = weights
    padded[:, inputs:] = weights[:, (groups - 1) * GROUP, None]
    return padded.reshape(rows, groups, GROUP)


def _first(w: Floats, fit: WeightFormat, delta: float) -> tuple[Floats, Floats]:
    if fit.minima:
        low = w.min(axis=2)
        scale = (w.max(axis=2) - low) / np.float32(fit.highest + delta)
        return scale, scale * np.float32(-delta / 2) - low
    largest = np.take_along_axis(w, np.abs(w).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    return largest / np.float32(-(fit.offset + delta)), np.zeros_like(largest)


def _codes(w: Floats, fit: WeightFormat, scale: Floats, minimum: Floats) -> Floats:
    rounded = np.rint((w + minimum[:, :, None]) * _inverse(scale)[:, :, None])
    codes: Floats = np.clip(rounded, fit.lowest, fit.highest)
    return codes


def _fitted(
    w: Floats, code: Floats, counts: Floats, scale: Floats, total: Floats | None
) -> tuple[Floats, Floats]:
    """Return (scales, minima) with the least squared error for given codes.

    Args:
        w: float32 [rows, groups, 32].
        code: float32 like `w`.
        counts: number of inputs in each group.
        scale: float32 [rows, groups], returned where the codes do not determine the scale.
        total: sums of the weights; None makes the minima 0.
    """
    square = _chain(code, counts, lambda x, out: _fma(x, x, out))
    product = np.zeros_like(scale)
    for i in range(GROUP):
        product = np.where(i < counts, _fma(w[:, :, i], code[:, :, i], product), product)
    if total is None:
        return _divide(product, square, scale), np.zeros_like(scale)
    sums = _chain(code, counts, lambda x, out: out + x)
    slope = _divide(counts * product - sums * total, counts * square - sums * sums, scale)
    return slope, (slope * sums - total) / counts


def _chain(values: Floats, counts: Floats, add: Callable[[Floats, Floats], Floats]) -> Floats:
    """Fold the inputs of each group in order, without the padding."""
    out = np.zeros(values.shape[:2], np.float32)
    for i in range(GROUP):
        out = np.where(i < counts, add(values[:, :, i], out), out)
    return out


def _fma(x: Floats, y: Floats, z: Floats) -> Floats:
    return (x.astype(np.float64) * y + z).astype(np.float32)


def _half(values: Floats) -> Floats:
    return np.clip(values, -65504.0, 65504.0).astype(np.float16).astype(np.float32)


def _divide(x: Floats, y: Floats, otherwise: Floats) -> Floats:
    return np.where(y != 0, x / np.where(y != 0, y, np.float32(1.0)), otherwise)


def _inverse(scale: Floats) -> Floats:
    return _divide(np.ones_like(scale), scale, np.zeros_like(scale))
