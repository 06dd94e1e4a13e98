"""Granite 4 as its configs say it: older words, and which of its layers keep a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.fields import integer_of
from kvboost_edge.models.families.ssd import MAMBA_KEYS, ssd_mixer, ssd_names, time_limit_of
from kvboost_edge.models.families.ssm import Hybrid, hybrid_of, kinds_of_layers

__all__ = ["granite_layers", "with_granite_words"]

Config = Mapping[str, Any]

_STATE = "linear_attention"
_FULL = "full_attention"
# What transformers called them first, and makers' configs still do.
_OLDER = {"mamba": _STATE, "attention": _FULL}
_USUAL = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "hidden_act": "silu",
}


def with_granite_words(config: Config) -> Config:
    """The config in newer words, with what it leaves out: no rope where it does not ask for some,
    and a state in every layer where it does not say which have one.
    """
    types = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(types, (list, tuple)):
        types = [_OLDER.get(one, one) if isinstance(one, str) else one for one in types]
    experts = config.get("num_local_experts", 8)
    usual = {"shared_intermediate_size": 1024, "position_embedding_type": None}
    return {
        **usual,
        **config,
        "layer_types": types,
        "num_local_experts": 0 if experts is None else experts,
    }


def granite_layers(config: Config, layers: int) -> Hybrid | None:
    """State spaces by layer_types; None where all layers attend."""
    types = config["layer_types"] or [_STATE] * layers
    kinds = kinds_of_layers({**config, "layer_types": types}, layers, _STATE, "ssd", None)
    if "ssd" not in kinds:
        return None
    given = {**_USUAL, **{key: value for key, value in config.items() if value is not None}}
    for key, allowed in (
        ("mamba_conv_bias", (True, False)),
        ("mamba_proj_bias", (False,)),
        ("hidden_act", ("silu", "swish")),
    ):
        if not any(
            given[key] is one or (isinstance(one, str) and given[key] == one) for one in allowed
        ):
            raise ModelFormatError(
                f"{key}={given[key]!r} is not known for layers with a state (known: {allowed})"
            )
    expand, hidden, heads = (
        integer_of(given, key, 1) for key in ("mamba_expand", "hidden_size", "mamba_n_heads")
    )
    if given["mamba_d_head"] == "auto":
        given["mamba_d_head"] = max(expand * hidden // heads, 1)
    dim = integer_of(given, "mamba_d_head", 1)
    if heads * dim != expand * hidden:
        raise ModelFormatError(
            f"mamba_n_heads={heads} x mamba_d_head={dim} are not mamba_expand={expand} x "
            f"hidden_size={hidden}"
        )
    mixer = ssd_mixer(given, MAMBA_KEYS, "gated_before", time_limit_of(given))
    return hybrid_of(kinds, mixer, ssd_names("mamba", mixer, conv_bias=given["mamba_conv_bias"]))
