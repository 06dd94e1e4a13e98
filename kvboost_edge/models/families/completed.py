"""Configs that say the same as Llama's in other words, rewritten into its words; what cannot be
said so is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.fields import number_of, size_of

__all__ = ["gpt_oss", "hunyuan", "is_static_dynamic", "minicpm", "ministral3"]

Config = Mapping[str, Any]

# What Ministral 3 has where the config does not say its rope.
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

# What gpt-oss has where the config does not say it.
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

# What MiniCPM's own code takes where the config does not say it.
_MINICPM = {"scale_emb": 1.0, "scale_depth": 1.0, "dim_model_base": 1.0}


def _rope_of(config: Config) -> Mapping[str, Any]:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise ModelFormatError(f"rope settings {found!r:.200} must be an object")
    return found


def ministral3(config: Config) -> Config:
    """The rope it has without being told."""
    return config if _rope_of(config) else {**config, "rope_parameters": _MINISTRAL3_ROPE}


def gpt_oss(config: Config) -> Config:
    """The rope and the window it has without being told."""
    rope = {} if _rope_of(config) else {"rope_parameters": _GPT_OSS_ROPE}
    return {"sliding_window": 128, **config, **rope}


def is_static_dynamic(model_type: object, rope: Mapping[str, Any]) -> bool:
    """Whether rope is called dynamic and yet never changes: Hunyuan's has a fixed alpha."""
    return model_type == "hunyuan_v1_dense" and bool(rope.get("alpha"))


def hunyuan(config: Config) -> Config:
    """A fixed alpha is another base: theta * alpha ** (d / (d - 2)), d the size of a head."""
    rope = dict(_rope_of(config))
    if rope.get("rope_type", rope.get("type")) != "dynamic" or not is_static_dynamic(
        config.get("model_type"), rope
    ):
        return config
    theta = config.get("rope_theta") if rope.get("rope_theta") is None else rope["rope_theta"]
    heads = size_of(config, "num_attention_heads")
    hidden = size_of(config, "hidden_size")
    dim = size_of(config, "head_dim") or (hidden // heads if hidden and heads else 0)
    if dim <= 2:
        raise ModelFormatError(f"rope of type 'dynamic' with alpha: head_dim={dim} must be above 2")
    numbers = {"rope_theta": 10000.0 if theta is None else theta, "alpha": rope["alpha"]}
    base, alpha = (number_of(numbers, key, 1e-9, 1e12, "rope of type 'dynamic'") for key in numbers)
    return {
        **config,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": base * alpha ** (dim / (dim - 2)),
        },
    }


def minicpm(config: Config) -> Config:
    """Its scales as Granite's multipliers, which a config may have already (of a GGUF file)."""
    layers = size_of(config, "num_hidden_layers")
    heads = size_of(config, "num_attention_heads")
    hidden = size_of(config, "hidden_size")
    if layers is None or heads is None or hidden is None:
        return config  # refused by name where sizes are read
    scale = {
        key: number_of({key: config.get(key, usual)}, key, 1e-6, 1e6)
        for key, usual in _MINICPM.items()
    }
    multipliers = {
        "attention_multiplier": 1 / math.sqrt(size_of(config, "head_dim") or hidden // heads),
        "embedding_multiplier": scale["scale_emb"],
        "residual_multiplier": scale["scale_depth"] / math.sqrt(layers),
        "logits_scaling": hidden / scale["dim_model_base"],
    }
    return {**multipliers, **config}
