"""Ministral 3 and Mistral Small, which share a GGUF architecture.

Ministral 3 scales queries by a factor that depends on the position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.models.families.family import Family, ModelType, Wrapper
from kvboost_edge.models.families.fields import rope_of
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import MATRICES, PRE_NORMS, GgufArchitecture
from kvboost_edge.models.families.windows import same_window

__all__ = ["GGUF", "MODEL_TYPES"]

Config = Mapping[str, Any]

# Default RoPE settings.
_ROPE = {
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


def _complete(config: Config) -> Config:
    """Return the config with the default RoPE settings."""
    return config if rope_of(config) else {**config, "rope_parameters": _ROPE}


MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "ministral3": ModelType(
            "Ministral 3, queries scaled by position",
            Family(
                qkv_bias=False,
                head_dim=128,
                eps=1e-5,
                query_scaled=True,
                complete=_complete,
                windows=same_window(0),
            ),
            gguf=True,
        ),
        "mistral3": ModelType(
            "Mistral and Ministral 3 (vision model), text only",
            wrapper=Wrapper(("mistral", "ministral3"), tied=True),
            torch=False,
            gguf=True,
        ),
    }
)


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries read from a GGUF file. A model without a query scale is a Mistral."""
    rope = config["rope_parameters"]
    rotated = keys.optional_size("rope.dimension_count", 0)
    if rotated not in (None, config["head_dim"]):
        raise keys.error("rope.dimension_count", rotated, f"must be head_dim={config['head_dim']}")
    log_multiplier = keys.number("rope.scaling.yarn_log_multiplier", -math.inf)
    if log_multiplier:
        # mscale_all_dim cancels the factor that YaRN applies to cosines and sines.
        rope |= {"mscale": 1.0, "mscale_all_dim": log_multiplier}
    beta = keys.number("attention.temperature_scale", -math.inf)
    if not beta:
        return {"model_type": "mistral", "sliding_window": None}
    if rope.get("rope_type") != "yarn":
        raise keys.error("attention.temperature_scale", beta, "needs rope.scaling.type='yarn'")
    rope["llama_4_scaling_beta"] = beta
    return {"sliding_window": None}


GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "mistral3": GgufArchitecture(
            "ministral3",
            {**MATRICES, **PRE_NORMS},
            permuted=True,
            # Ollama's files have the last two keys, which are for the vision part.
            keys=frozenset(
                {
                    "rope.scaling.yarn_log_multiplier",
                    "attention.temperature_scale",
                    "image_token_index",
                    "spatial_merge_size",
                }
            ),
            config=_gguf_config,
        )
    }
)
