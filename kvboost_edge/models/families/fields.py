"""Readers for the numbers in a config that check their range."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvboost_edge.errors import ModelFormatError

__all__ = ["MAX_LAYERS", "integer_of", "number_of", "positive", "rope_of", "size_of"]

# Config keys of each size: the common name, then names in older architectures.
_ALIASES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
}
# Far beyond any real model. A larger number is damaged and must not determine the size of an
# allocation.
_MAX_SIZE = 1 << 31
MAX_LAYERS = 10_000
"""Maximum number of layers, far beyond any real model.

It is needed because lists with an entry per layer are built before the weights are checked.
"""
_LIMITS = dict.fromkeys(_ALIASES["num_hidden_layers"], MAX_LAYERS)


def size_of(config: Mapping[str, Any], name: str, path: Path | str = "config") -> int | None:
    """Return the size that a config gives under any of its names, or None if it gives none.

    Raises:
        ModelFormatError: the value is not a positive integer within the limits.
    """
    for key in _ALIASES.get(name, (name,)):
        value = config.get(key)
        if value is not None:
            return positive(key, value, path)
    return None


def number_of(
    config: Mapping[str, Any], key: str, low: float, high: float, path: Path | str = "config"
) -> float:
    """Return the number under a key.

    Raises:
        ModelFormatError: the value is missing or is not a number from `low` to `high`; the message
            names the key.
    """
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ModelFormatError(f"{path}: {key}={value!r} must be a number from {low:g} to {high:g}")
    return float(value)


def integer_of(config: Mapping[str, Any], key: str, low: int, path: Path | str = "config") -> int:
    """Return the integer under a key.

    Raises:
        ModelFormatError: the value is missing or is not an integer from `low` to 2^31; the message
            names the key.
    """
    return _integer(key, config.get(key), low, _MAX_SIZE, path)


def positive(key: str, value: object, path: Path | str) -> int:
    return _integer(key, value, 1, _LIMITS.get(key, _MAX_SIZE), path)


def _integer(key: str, value: object, low: int, high: int, path: Path | str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelFormatError(f"{path}: {key}={value!r} must be an integer from {low} to {high}")
    return value


def rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the RoPE settings in `rope_parameters` or the older `rope_scaling`; {} if there are
    none.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise ModelFormatError(f"RoPE settings {found!r:.200} must be an object")
    return found
