"""Functions that read the sliding window of each layer from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.fields import integer_of

__all__ = [
    "all_but_every",
    "all_but_first_of",
    "every_second",
    "given_step",
    "given_window",
    "layer_windows",
    "qwen2_moe_windows",
    "qwen3_moe_windows",
    "qwen_windows",
    "same_window",
]

Config = Mapping[str, Any]


def layer_windows(config: Config, layers: int, default: Callable[[int], bool]) -> list[int]:
    """Return the window of each layer according to layer_types, or else to a rule.

    Args:
        config: config of the language model.
        layers: number of layers.
        default: function of a layer's index -> True if the layer has a window.
    """
    window = given_window(config, 0)
    rule = ["sliding_attention" if default(i) else "full_attention" for i in range(layers)]
    types = config.get("layer_types") or rule
    known = {"sliding_attention": window, "full_attention": 0}
    if (
        not isinstance(types, (list, tuple))
        or len(types) != layers
        or any(kind not in list(known) for kind in types)
    ):
        raise ModelFormatError(
            f"layer_types={types!r:.200} must have {layers} entries, each one of {sorted(known)}"
        )
    if "sliding_attention" in types and window < 1:
        raise ModelFormatError("layer_types has sliding_attention, but sliding_window is missing")
    return [known[kind] for kind in types]


def given_window(config: Config, default: int) -> int:
    """Return sliding_window, which is 0 if it is null and `default` if it is missing."""
    if "sliding_window" not in config:
        return default
    return 0 if config["sliding_window"] is None else integer_of(config, "sliding_window", 0)


def given_step(config: Config, keys: tuple[str, ...], default: int) -> int:
    """Return the value of the first key that the config gives, or `default`.

    The value must be an integer of at least 1.
    """
    return next(
        (integer_of(config, key, 1) for key in keys if config.get(key) is not None), default
    )


def same_window(default: int) -> Callable[[Config, int], list[int]]:
    """Return a function that gives all layers the config's window, by default `default`."""

    def windows(config: Config, layers: int) -> list[int]:
        if config.get("layer_types"):
            return layer_windows(config, layers, lambda i: False)
        return [given_window(config, default)] * layers

    return windows


def qwen_windows(config: Config, layers: int) -> list[int]:
    if not config.get("use_sliding_window", False):
        return [0] * layers
    first = integer_of(config, "max_window_layers", 0) if "max_window_layers" in config else 28
    return layer_windows({"sliding_window": 4096, **config}, layers, lambda i: i >= first)


def qwen2_moe_windows(config: Config, layers: int) -> list[int]:
    """Return the windows of Qwen2's mixtures: of every second layer below max_window_layers."""
    if not config.get("use_sliding_window", False):
        return [0] * layers
    end = integer_of(config, "max_window_layers", 0) if "max_window_layers" in config else 28
    return layer_windows(
        {"sliding_window": 4096, **config}, layers, lambda i: i % 2 == 0 and i < end
    )


def qwen3_moe_windows(config: Config, layers: int) -> list[int]:
    """Return the windows of Qwen3's mixtures: the same for all layers."""
    used = config.get("use_sliding_window", False)
    return [given_window(config, 4096) if used else 0] * layers


def every_second(config: Config, layers: int) -> list[int]:
    return layer_windows({"sliding_window": 4096, **config}, layers, lambda i: i % 2 == 0)


def all_but_every(default: int, *keys: str) -> Callable[[Config, int], list[int]]:
    """Return a function that gives a window to every layer except each n-th.

    The number n is the value of the first key in `keys` that the config has, or `default`. No layer
    has a window if sliding_window is null.
    """

    def windows(config: Config, layers: int) -> list[int]:
        config = {"sliding_window": 4096, **config}
        if config.get("layer_types"):
            return layer_windows(config, layers, lambda i: False)
        if not given_window(config, 0):
            return [0] * layers
        step = given_step(config, keys, default)
        return layer_windows(config, layers, lambda i: (i + 1) % step != 0)

    return windows


def all_but_first_of(period: int, default: int) -> Callable[[Config, int], list[int]]:
    """Return a function that gives a window to every layer except the first of each `period`
    layers.

    Args:
        period: number of layers after which the pattern repeats.
        default: window if the config gives none.
    """
    return lambda config, layers: layer_windows(
        {"sliding_window": default, **config}, layers, lambda i: i % period != 0
    )
