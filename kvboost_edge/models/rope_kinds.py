"""Frequencies of the rope kinds whose angles do not depend on the length of the sequence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError

__all__ = ["RopeKind", "rope_kind"]

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class RopeKind:
    """`frequencies` in radians per position, one for each rotated pair; `factor` multiplies cosines and sines."""

    frequencies: tuple[float, ...]
    factor: float = 1.0

    @property
    def half(self) -> int:
        """Number of rotated pairs; the pairs are (i, i + half)."""
        return len(self.frequencies)


def rope_kind(settings: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeKind:
    """The rope of a `rope_parameters` entry: default, linear, llama3 or yarn, possibly of a part of the head.

    ModelFormatError names a kind that is not one of these, or the setting that is missing.
    """
    kind = str(settings.get("rope_type", settings.get("type", "default")))
    theta = _number(settings, "rope_theta", kind)
    rotary_dim = int(head_dim * float(settings.get("partial_rotary_factor") or 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelFormatError(f"rope: {rotary_dim} rotated channels of {head_dim} are not an even part of a head")
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    base = (np.float32(1.0) / np.power(np.float32(theta), exponents)).astype(np.float32)
    if kind == "default":
        return _kind(base)
    if kind == "linear":
        return _kind(base / np.float32(_number(settings, "factor", kind)))
    if kind == "llama3":
        return _kind(_llama3(base, settings))
    if kind == "yarn":
        return _yarn(base, theta, settings, max_positions)
    raise ModelFormatError(
        f"rope of type {kind!r} is not known to the native runner (known: default, linear, llama3, yarn)"
    )


def _kind(frequencies: Floats, factor: float = 1.0) -> RopeKind:
    return RopeKind(tuple(float(f) for f in frequencies.astype(np.float32)), factor)


def _number(settings: Mapping[str, Any], key: str, kind: str) -> float:
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ModelFormatError(f"rope of type {kind!r}: {key}={value!r} must be a positive number")
    return float(value)


def _llama3(base: Floats, settings: Mapping[str, Any]) -> Floats:
    factor, low, high, old = (
        _number(settings, key, "llama3")
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    wavelength = 2 * math.pi / base.astype(np.float64)
    smooth = (old / wavelength - low) / (high - low)
    slow = base / factor
    blended = (1 - smooth) * slow + smooth * base
    scaled = np.where(wavelength > old / low, slow, np.where(wavelength < old / high, base, blended))
    return scaled.astype(np.float32)


def _yarn(base: Floats, theta: float, settings: Mapping[str, Any], max_positions: int) -> RopeKind:
    old = _number(settings, "original_max_position_embeddings", "yarn")
    scale = max_positions / old if settings.get("factor") is None else _number(settings, "factor", "yarn")
    dim = 2 * base.size

    def border(rotations: float) -> float:
        return dim * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = border(float(settings.get("beta_fast") or 32)), border(float(settings.get("beta_slow") or 1))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(base.size, dtype=np.float64) - low) / (high - low), 0, 1)
    return _kind((base / scale * ramp + base * (1 - ramp)).astype(np.float32), _yarn_factor(settings, scale))


def _yarn_factor(settings: Mapping[str, Any], scale: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    given, top, bottom = (settings.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    return mscale(float(top)) / mscale(float(bottom)) if top and bottom else mscale(1.0)
