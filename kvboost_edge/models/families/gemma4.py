"""Gemma 4: what its config leaves out, and the shapes of its layers.

Sliding and full layers have heads of different sizes; the last layers may attend to keys and values
of an earlier one, the last of their own kind that computes some, and have wider MLPs then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.fields import integer_of, size_of
from kvboost_edge.models.families.layers import LayerShape

__all__ = ["PerLayerInput", "gemma4_shapes", "per_layer_input", "with_gemma4_defaults"]

Config = Mapping[str, Any]

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_FULL_EVERY = 6  # layers, where the config has no layer_types
_ROPES = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
_SIZES = {
    "sliding_window": 512,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 0,
}
_UNIFIED = {
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}  # gemma4_unified_text: where it differs
_OWN = ("head_dim", "num_key_value_heads")


class PerLayerInput(NamedTuple):
    """A second embedding: of each token `width` numbers for every layer, from a table of `rows`
    tokens.
    """

    rows: int
    width: int


def with_gemma4_defaults(config: Config) -> Config:
    """The config with what it leaves out, as transformers has it. ModelFormatError where its last
    layer slides.
    """
    layers = size_of(config, "num_hidden_layers") or 0
    kinds = config.get("layer_types")
    if not kinds:
        kinds = [
            _SLIDING if (i + 1) % _FULL_EVERY and i + 1 < layers else _FULL for i in range(layers)
        ]
    elif isinstance(kinds, (list, tuple)) and kinds[-1] != _FULL:
        raise ModelFormatError(
            f"layer_types of a Gemma 4 end with {_FULL!r}, and this config's with {kinds[-1]!r:.60}"
        )
    sizes = {**_SIZES, **(_UNIFIED if config.get("model_type") == "gemma4_unified_text" else {})}
    filled = {key: value for key, value in sizes.items() if config.get(key) is None}
    return {
        **config,
        **filled,
        "layer_types": kinds,
        "rope_parameters": config.get("rope_parameters") or _ROPES,
    }


def gemma4_shapes(config: Config, windows: Sequence[int]) -> Sequence[LayerShape]:
    """Shapes of the layers with these windows, 0 for full ones; of a config with its defaults."""
    own = _own_sizes(config, windows)
    inner, heads = (
        size_of(config, key) or 0 for key in ("intermediate_size", "num_attention_heads")
    )
    shared = integer_of(config, "num_kv_shared_layers", 0)
    first = len(windows) - shared
    if first < 1:
        raise ModelFormatError(
            f"num_kv_shared_layers={shared} leaves none of the {len(windows)} layers with keys and "
            "values of its own"
        )
    wider = 2 if config.get("use_double_wide_mlp") else 1
    same = bool(config.get("attention_k_eq_v"))
    shapes: list[LayerShape] = []
    for index, window in enumerate(windows):
        dim, kv_heads = own[index]
        if heads % kv_heads:
            raise ModelFormatError(
                f"num_attention_heads={heads} is not a multiple of the {kv_heads} key-value heads "
                f"of layer {index}"
            )
        if index < first:
            shapes.append(
                LayerShape(dim, kv_heads, inner, index, has_values=not (same and window == 0))
            )
            continue
        giver = next((i for i in reversed(range(first)) if (windows[i] > 0) == (window > 0)), None)
        if giver is None:
            kind = _SLIDING if window else _FULL
            raise ModelFormatError(
                f"layer {index} ({kind}) shares keys and values by num_kv_shared_layers={shared}, "
                f"and none of the {first} layers that have their own is of its kind"
            )
        if own[giver] != own[index]:
            raise ModelFormatError(
                f"layer {index} shares the keys and values of layer {giver}, and their heads "
                f"differ: {own[index]} and {own[giver]} of {_OWN}"
            )
        shapes.append(LayerShape(dim, kv_heads, wider * inner, giver, owns_kv=False))
    return shapes


def per_layer_input(config: Config, vocab_size: int) -> PerLayerInput | None:
    """The embedding of each layer; None where the model has none. Of a config with its defaults."""
    width = integer_of(config, "hidden_size_per_layer_input", 0)
    if not width:
        return None
    rows = integer_of(config, "vocab_size_per_layer_input", 1)
    if rows < vocab_size:
        raise ModelFormatError(
            f"vocab_size_per_layer_input={rows} is less than vocab_size={vocab_size}: tokens would "
            "have no row"
        )
    return PerLayerInput(rows, width)


def _own_sizes(config: Config, windows: Sequence[int]) -> list[tuple[int, int]]:
    """(head_dim, kv heads) of each layer: by `per_layer_config`, or by the keys of the full
    layers.
    """
    plain = {key: size_of(config, key) or 0 for key in _OWN}
    given = config.get("per_layer_config")
    if given is None:
        kv_heads = (
            size_of(config, "num_global_key_value_heads")
            if config.get("attention_k_eq_v")
            else None
        )
        full = {"head_dim": size_of(config, "global_head_dim") or 512}
        full["num_key_value_heads"] = kv_heads or plain["num_key_value_heads"]
        return [_pair(plain if window else full) for window in windows]
    if not isinstance(given, Mapping):
        raise ModelFormatError(f"per_layer_config={given!r:.200} must be an object")
    sizes = [dict(plain) for _ in windows]
    for key, changes in given.items():
        index = int(key) if str(key).isdecimal() else -1
        if (
            not 0 <= index < len(windows)
            or not isinstance(changes, Mapping)
            or set(changes) - set(_OWN)
        ):
            raise ModelFormatError(
                f"per_layer_config={{{key!r:.60}: {changes!r:.200}}} must give {_OWN} of layers "
                f"0..{len(windows) - 1}"
            )
        sizes[index].update(
            {name: size_of(changes, name, f"per_layer_config {key}") or 0 for name in changes}
        )
    return [_pair(one) for one in sizes]


def _pair(sizes: Mapping[str, int]) -> tuple[int, int]:
    return sizes["head_dim"], sizes["num_key_value_heads"]
