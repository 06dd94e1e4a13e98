"""What single families have in their GGUF files beyond what all have, as fields of a config."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.gguf.experts import (
    ernie_moe,
    experts,
    gpt_oss,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from kvboost_edge.models.gguf.gemma4 import gemma4
from kvboost_edge.models.gguf.hybrids import (
    falcon_h1,
    granite_hybrid,
    lfm2,
    lfm2_moe,
    nemotron_h,
    qwen35,
    qwen35_moe,
)

__all__ = ["SPECIAL"]

# Models of these depths scale attention by hidden_size / heads instead of head_dim; llama.cpp knows
# them so, too.
_WIDE_SCALE_LAYERS = {"gemma2": 46, "gemma3_text": 62}
# EXAONE 4 of this depth has windows whether the file says it or not; llama.cpp knows it so, too.
_EXAONE4_WINDOWED = 64


def _gemma2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_attention_scale(config),
        **_layer_types(keys, config, default_period=2),
        "sliding_window": keys.optional_size("attention.sliding_window") or 4096,
        "attn_logit_softcapping": keys.number("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": keys.number("final_logit_softcapping") or 30.0,
    }


def _gemma3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    full = config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa") or 10000.0}
    window = keys.optional_size("attention.sliding_window", 0)
    types = ["full_attention"] * config["num_hidden_layers"]
    return {
        **_attention_scale(config),
        **(_layer_types(keys, config, default_period=6) if window else {"layer_types": types}),
        "sliding_window": window or None,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
    }


def _olmo2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """OLMo 3 where there is a window; its scaled rope is that of the full layers alone."""
    window = keys.optional_size("attention.sliding_window", 0)
    if not window:
        return {}
    full = config["rope_parameters"]
    local = {
        "rope_type": "default",
        "rope_theta": keys.number("rope.freq_base_swa") or full["rope_theta"],
    }
    return {
        **_layer_types(keys, config, default_period=4),
        "model_type": "olmo3",
        "sliding_window": window,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **full},
            "sliding_attention": local,
        },
    }


def _exaone4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    window = keys.optional_size("attention.sliding_window", 0)
    if window is None and layers == _EXAONE4_WINDOWED:
        window = 4096
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    return {"sliding_window": window, **_layer_types(keys, config, default_period=4)}


def _attention_scale(config: dict[str, Any]) -> dict[str, Any]:
    wide = config["num_hidden_layers"] == _WIDE_SCALE_LAYERS[config["model_type"]]
    scalar = config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    return {"query_pre_attn_scalar": scalar}


def _layer_types(keys: Keys, config: dict[str, Any], *, default_period: int) -> dict[str, Any]:
    """Every `period`-th layer sees everything, the others a window; or as a list of truth values
    says.
    """
    key = "attention.sliding_window_pattern"
    layers = config["num_hidden_layers"]
    sliding = keys.sliding(key)
    if sliding is None:
        period = keys.optional_size(key) or default_period
        sliding = [(index + 1) % period != 0 for index in range(layers)]
    return {
        "layer_types": ["sliding_attention" if local else "full_attention" for local in sliding]
    }


def _ministral3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Mistral 3 where queries have no scale. Its yarn leaves cosines and sines alone, as
    mscale_all_dim says.
    """
    rope = config["rope_parameters"]
    rotated = keys.optional_size("rope.dimension_count", 0)
    if rotated not in (None, config["head_dim"]):
        raise keys.error("rope.dimension_count", rotated, f"must be head_dim={config['head_dim']}")
    log_multiplier = keys.number("rope.scaling.yarn_log_multiplier", -math.inf)
    if log_multiplier:
        rope |= {"mscale": 1.0, "mscale_all_dim": log_multiplier}
    beta = keys.number("attention.temperature_scale", -math.inf)
    if not beta:
        return {"model_type": "mistral", "sliding_window": None}
    if rope.get("rope_type") != "yarn":
        raise keys.error("attention.temperature_scale", beta, "needs rope.scaling.type='yarn'")
    rope["llama_4_scaling_beta"] = beta
    return {"sliding_window": None}


def _phi3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    old = config["rope_parameters"].get("original_max_position_embeddings")
    original = {} if old is None else {"original_max_position_embeddings": old}
    return {"sliding_window": keys.optional_size("attention.sliding_window", 0) or None, **original}


def _granite(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    # For this architecture it says whether there is rope at all.
    turned = keys.header.value(keys.name("rope.scaling.finetuned"), bool)
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    found: dict[str, Any] = {
        name: value for name, key in names.items() if (value := keys.number(key)) is not None
    }
    return found if turned is not False else {**found, "position_embedding_type": "nope"}


def _minicpm(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """What older files leave out is what llama.cpp takes for them."""
    hidden = config["hidden_size"]
    layers = config["num_hidden_layers"]
    return {
        "embedding_multiplier": keys.number("embedding_scale") or 12.0,
        "residual_multiplier": keys.number("residual_scale") or 1.4 / math.sqrt(layers),
        "logits_scaling": keys.number("logit_scale") or hidden / 256,
    }


def _smollm3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Every fourth layer has no rope: the file does not say it, llama.cpp computes it so."""
    return {"no_rope_layer_interval": 4}


def _gpt_oss(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {**gpt_oss(keys, config), **_layer_types(keys, config, default_period=2)}


def _granite_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {**_granite(keys, config), **experts(keys, "num_local_experts")}


def _granite_hybrid(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """With rope, as its older kin, unless a file says otherwise; those of the makers' models do.
    One that says no scale of scores, as Bamba's, has the usual one, as llama.cpp computes it.
    """
    usual = {"position_embedding_type": "rope", "attention_multiplier": config["head_dim"] ** -0.5}
    return {**usual, **_granite(keys, config), **granite_hybrid(keys, config)}


SPECIAL: dict[str, Callable[[Keys, dict[str, Any]], dict[str, Any]]] = {
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "exaone4": _exaone4,
    "ministral3": _ministral3,
    "minicpm": _minicpm,
    "gemma4_text": gemma4,
    "llama": mixtral,
    "qwen3_moe": qwen3_moe,
    "qwen2_moe": qwen2_moe,
    "olmoe": olmoe,
    "granitemoe": _granite_moe,
    "ernie4_5_moe": ernie_moe,
    "gpt_oss": _gpt_oss,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "qwen3_5_text": qwen35,
    "qwen3_5_moe_text": qwen35_moe,
    "granitemoehybrid": _granite_hybrid,
    "nemotron_h": nemotron_h,
    "falcon_h1": falcon_h1,
}
"""What only one family has in its config: from the keys of a file and the config that all have."""
