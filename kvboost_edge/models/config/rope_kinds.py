"""RoPE frequencies of each RoPE type, independent of the sequence length."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.architectures import LONG_RANGE
from kvboost_edge.models.families.fields import integer_of, number_of

__all__ = ["QueryScale", "RopeKind", "query_scale", "rope_kind"]

# Range of RoPE settings. A number outside it is damaged and would give infinite or NaN angles.
_LEAST = 1e-9
_MOST = 1e12

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class RopeKind:
    """RoPE frequencies and their scale.

    Attributes:
        frequencies: radians per position, for each rotated pair.
        factor: multiplier of the cosines and sines.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0

    @property
    def half(self) -> int:
        """Number of rotated pairs. Pair i consists of channels i and i + half."""
        return len(self.frequencies)


@dataclasses.dataclass(frozen=True, slots=True)
class QueryScale:
    """Position-dependent scale of queries: 1 + beta * ln(1 + floor(position / length))."""

    beta: float
    length: int

    def factors(self, positions: int) -> Floats:
        """Return the scales of positions 0 to `positions` - 1, float32 [positions].

        The scale of a position is bit-identical for every value of `positions`.
        """
        steps = -(-positions // self.length)
        values = [1 + self.beta * math.log(1 + step) for step in range(steps)]
        return np.repeat(np.array(values, dtype=np.float32), self.length)[:positions]


def query_scale(settings: Mapping[str, Any]) -> QueryScale:
    """Return the query scale of a `rope_parameters` entry (Llama 4 and Ministral 3)."""
    length = integer_of(settings, "original_max_position_embeddings", 1, "rope")
    return QueryScale(number_of(settings, "llama_4_scaling_beta", 0.0, 1e3, "rope"), length)


def rope_kind(settings: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeKind:
    """Return the RoPE of a `rope_parameters` entry.

    Supported are transformers' types "default", "linear", "llama3", "yarn" and "longrope", all of
    which may rotate only a part of the head. There are two more types:

    - "proportional" uses the frequencies of a fully rotated head. Pairs beyond the rotated part are
      not rotated.
    - "factors" divides each default frequency by an entry of the list `factors`.

    Args:
        settings: the entry. longrope uses its long factors if LONG_RANGE is set, else the short
            factors, which are valid up to original_max_position_embeddings.
        head_dim: channels of a head.
        max_positions: longest sequence that the config allows.

    Raises:
        ModelFormatError: the type is unknown or a setting is missing; the message names it.
    """
    kind = str(settings.get("rope_type", settings.get("type", "default")))
    theta = _number(settings, "rope_theta", kind)
    part = "partial_rotary_factor"
    share = (
        1.0
        if settings.get(part) is None
        else number_of(settings, part, 0.0, 1.0, f"rope of type {kind!r}")
    )
    if kind == "proportional":
        return _proportional(theta, share, head_dim)
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelFormatError(
            f"RoPE rotates {rotary_dim} channels, but the number must be even and at most "
            f"head_dim={head_dim}"
        )
    base = _default(theta, rotary_dim)
    if kind == "default":
        return _kind(base)
    if kind == "linear":
        return _kind(base / np.float32(_number(settings, "factor", kind)))
    if kind == "factors":
        return _kind(base / _factors(settings, "factors", kind, base.size))
    if kind == "llama3":
        return _kind(_llama3(base, settings))
    if kind == "yarn":
        return _yarn(base, theta, settings, max_positions)
    if kind == "longrope":
        return _longrope(base, settings, max_positions)
    raise ModelFormatError(
        f"RoPE of type {kind!r} is not supported by the native runner (supported: default, linear, "
        "llama3, longrope, proportional, yarn)"
    )


def _proportional(theta: float, share: float, head_dim: int) -> RopeKind:
    if head_dim % 2:
        raise ModelFormatError(f"RoPE of type 'proportional': head_dim={head_dim} must be even")
    frequencies = _default(theta, head_dim)
    frequencies[int(share * head_dim // 2) :] = 0.0
    return _kind(frequencies)


def _default(theta: float, rotary_dim: int) -> Floats:
    """Return 1 / theta ** (2i / rotary_dim) for every pair i."""
    # Compute the power in float64, then round. NumPy's float32 power differs between processors
    # (with AVX-512 in the last bit of a tenth of the pairs), and a KV cache may be moved to another
    # machine.
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    powers = np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)
    return (np.float32(1.0) / powers).astype(np.float32)


def _kind(frequencies: Floats, factor: float = 1.0) -> RopeKind:
    return RopeKind(tuple(float(f) for f in frequencies.astype(np.float32)), factor)


def _number(settings: Mapping[str, Any], key: str, kind: str) -> float:
    return number_of(settings, key, _LEAST, _MOST, f"RoPE of type {kind!r}")


def _optional(settings: Mapping[str, Any], key: str, default: float, kind: str) -> float:
    """Return the number under a key, or `default` if it is missing or null."""
    return default if settings.get(key) is None else _number(settings, key, kind)


def _factors(settings: Mapping[str, Any], key: str, kind: str, count: int) -> Floats:
    values = settings.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise ModelFormatError(
            f"RoPE of type {kind!r}: {key} must be a list of {count} numbers, got {values!r:.60}"
        )
    return np.array([_number({key: value}, key, kind) for value in values], dtype=np.float32)


def _llama3(base: Floats, settings: Mapping[str, Any]) -> Floats:
    factor, low, high, old = (
        _number(settings, key, "llama3")
        for key in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
    )
    if high <= low:
        raise ModelFormatError(
            f"RoPE of type 'llama3': high_freq_factor={high:g} must be above "
            f"low_freq_factor={low:g}"
        )
    wavelength = 2 * math.pi / base.astype(np.float64)
    smooth = (old / wavelength - low) / (high - low)
    slow = base / factor
    blended = (1 - smooth) * slow + smooth * base
    scaled = np.where(
        wavelength > old / low, slow, np.where(wavelength < old / high, base, blended)
    )
    return scaled.astype(np.float32)


def _yarn(base: Floats, theta: float, settings: Mapping[str, Any], max_positions: int) -> RopeKind:
    old = _number(settings, "original_max_position_embeddings", "yarn")
    scale = _optional(settings, "factor", max_positions / old, "yarn")
    dim = 2 * base.size
    if theta <= 1:
        raise ModelFormatError(f"RoPE of type 'yarn': rope_theta={theta:g} must be above 1")

    def border(rotations: float) -> float:
        return dim * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (
        border(_optional(settings, *beta, "yarn"))
        for beta in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if settings.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(base.size, dtype=np.float64) - low) / (high - low), 0, 1)
    return _kind(
        (base / scale * ramp + base * (1 - ramp)).astype(np.float32), _yarn_factor(settings, scale)
    )


def _yarn_factor(settings: Mapping[str, Any], scale: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    if settings.get("attention_factor") is not None:
        return _number(settings, "attention_factor", "yarn")
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return mscale(_number(settings, "mscale", "yarn")) / mscale(
            _number(settings, "mscale_all_dim", "yarn")
        )
    return mscale(1.0)


def _longrope(base: Floats, settings: Mapping[str, Any], max_positions: int) -> RopeKind:
    old = number_of(
        settings, "original_max_position_embeddings", 2, _MOST, "rope of type 'longrope'"
    )
    scale = _optional(settings, "factor", max_positions / old, "longrope")
    factor = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(old))
    factors = [
        _factors(settings, key, "longrope", base.size) for key in ("short_factor", "long_factor")
    ]
    frequencies = base / factors[bool(settings.get(LONG_RANGE))]
    return _kind(frequencies, _optional(settings, "attention_factor", factor, "longrope"))
