"""Float matrices into the tile layouts of the linear kernels: float32, bfloat16, int8 and int4 in groups of 32.

The layouts are specified in reference_linear.py. int8: scale = max|w| / 127; int4: symmetric, codes -8..7, of several
scales the one with the least squared error. Scales are float16, and codes are chosen for the scale as stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.linear_tiles import GROUP, KIND_INT4, KIND_INT8
from kvboost_edge.kernels.storage import to_storage
from kvboost_edge.kernels.vectors import KIND_BF16, KIND_F32, LANES

__all__ = ["KINDS", "pack_rows", "packed_sizes"]

KINDS: dict[str, int] = {"f32": KIND_F32, "bf16": KIND_BF16, "int8": KIND_INT8, "int4": KIND_INT4}
"""Weight format -> number of its kind in the kernels."""

Floats = npt.NDArray[np.float32]
# Multiples of max|w| / 7 tried as the int4 scale; the first is exact at both ends, smaller ones clip outliers.
_INT4_FACTORS = (1.0, 0.9375, 0.875, 0.8125)


def packed_sizes(rows: int, inputs: int, kind: int) -> tuple[int, int]:
    """Bytes of the packed codes (or floats) and of the scales of a matrix [rows, inputs]."""
    tiles, groups = -(-rows // LANES), -(-inputs // GROUP)
    if kind in (KIND_F32, KIND_BF16):
        return tiles * LANES * inputs * (4 if kind == KIND_F32 else 2), 0
    per_group = LANES * GROUP // (1 if kind == KIND_INT8 else 2)
    return tiles * groups * per_group, tiles * groups * LANES * 2


def pack_rows(weights: Floats, kind: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Pack float32 [rows, inputs]: (codes or floats, scales) as bytes, of the lengths `packed_sizes` says."""
    rows, inputs = weights.shape
    tiles, groups = -(-rows // LANES), -(-inputs // GROUP)
    if kind in (KIND_F32, KIND_BF16):
        padded = np.zeros((tiles, LANES, inputs), dtype=np.float32)
        padded.reshape(-1, inputs)[:rows] = weights
        stored = to_storage(padded.transpose(0, 2, 1), np.float32 if kind == KIND_F32 else np.uint16)
        return _bytes(stored), np.empty(0, dtype=np.uint8)
    if kind not in (KIND_INT8, KIND_INT4):
        raise ConfigError(f"weight kind {kind} is not one of {sorted(KINDS.values())}")
    grouped = np.zeros((tiles * LANES, groups, GROUP), dtype=np.float32)
    grouped.reshape(tiles * LANES, -1)[:rows, :inputs] = weights
    codes, scales = _quantize_int8(grouped) if kind == KIND_INT8 else _quantize_int4(grouped)
    quads = codes.reshape(tiles, LANES, groups, 8, 4).transpose(0, 2, 3, 1, 4)
    if kind == KIND_INT4:
        pairs = quads.reshape(tiles, groups, 4, 2, LANES, 4)
        quads = pairs[:, :, :, 0] | (pairs[:, :, :, 1] << np.uint8(4))
    return _bytes(quads), _bytes(scales.reshape(tiles, LANES, groups).transpose(0, 2, 1))


def _quantize_int8(grouped: Floats) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
    scales = _as_half(np.abs(grouped).max(axis=2) / np.float32(127.0))
    scaled = grouped * _inverse(scales)[:, :, None]
    return (np.clip(np.rint(scaled), -127, 127) + 128).astype(np.uint8), scales


def _quantize_int4(grouped: Floats) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
    largest = np.take_along_axis(grouped, np.abs(grouped).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    # The code -8 has no positive twin: a group whose outlier is negative uses the full range with a finer scale.
    candidates = [-largest / np.float32(8.0), *(np.abs(largest) * np.float32(f / 7.0) for f in _INT4_FACTORS)]
    best, scales, codes = None, None, None
    for candidate in candidates:
        half = _as_half(candidate)
        quantized = np.clip(np.rint(grouped * _inverse(half)[:, :, None]), -8, 7)
        error = ((quantized * half.astype(np.float32)[:, :, None] - grouped) ** 2).sum(axis=2)
        if best is None or scales is None or codes is None:
            best, scales, codes = error, half, quantized
            continue
        better = error < best
        best = np.where(better, error, best)
        scales = np.where(better, half, scales)
        codes = np.where(better[:, :, None], quantized, codes)
    if scales is None or codes is None:
        raise ConfigError("no scale to try")
    return (codes + 8).astype(np.uint8), scales


def _as_half(scales: Floats) -> npt.NDArray[np.float16]:
    """float16, within its finite range."""
    return np.clip(scales, -65504.0, 65504.0).astype(np.float16)


def _inverse(scales: npt.NDArray[np.float16]) -> Floats:
    wide = scales.astype(np.float32)
    return np.divide(np.float32(1.0), wide, out=np.zeros_like(wide), where=wide != 0)


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
