"""gpt-oss: a mixture of experts with biases, MXFP4 weights, local layers and attention sinks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.models.families.family import Family, ModelType
from kvboost_edge.models.families.fields import rope_of
from kvboost_edge.models.families.gguf_keys import Keys, layer_types
from kvboost_edge.models.families.gguf_names import (
    EXPERT_KEYS,
    EXPERTS,
    MATRICES,
    WINDOW,
    GgufArchitecture,
)
from kvboost_edge.models.families.moe import (
    LOCAL_KEYS,
    ExpertNames,
    Experts,
    experts_of,
    gguf_experts,
)
from kvboost_edge.models.families.windows import every_second

__all__ = ["GGUF", "MODEL_TYPES"]

Config = Mapping[str, Any]

# Default RoPE settings.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _complete(config: Config) -> Config:
    """Return the config with the default RoPE settings and window."""
    rope = {} if rope_of(config) else {"rope_parameters": _ROPE}
    return {"sliding_window": 128, **config, **rope}


def _experts(config: Config, layers: int) -> Experts:
    """Return the mixture of experts.

    Routing weights are the softmax of the selected logits. All matrices have biases, and the
    activation clamps its inputs.
    """
    names = ExpertNames("mlp.router")
    usual = (128, 4, 2880)
    found = experts_of(config, LOCAL_KEYS, usual, [True] * layers, names=names, score="chosen")
    return dataclasses.replace(found, biased=True, activation="clamped_swiglu")


MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "gpt_oss": ModelType(
            "gpt-oss, mixture of experts with biases, local and global layers, attention sinks",
            Family(
                biased=True,
                head_dim=64,
                eps=1e-5,
                theta=150000.0,
                sinks=True,
                windows=every_second,
                experts=_experts,
                in_columns=True,
                mxfp4=True,
                complete=_complete,
                unless=(("swiglu_alpha", (None, 1.702)), ("swiglu_limit", (None, 7.0))),
            ),
            gguf=True,
        )
    }
)


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries read from a GGUF file."""
    rope = config["rope_parameters"]
    # The model does not round the correction range of YaRN (config.json has "truncate": false).
    # GGUF files do not store this setting.
    if rope.get("rope_type") == "yarn":
        rope["truncate"] = False
    return {
        **gguf_experts(keys, "num_local_experts"),
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "sliding_window": keys.size("attention.sliding_window"),
        **layer_types(keys, config, default_period=2),
    }


GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "gpt-oss": GgufArchitecture(
            "gpt_oss",
            {
                **MATRICES,
                **EXPERTS,
                "ffn_gate_inp": "mlp.router",
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
                "attn_sinks": "self_attn.sinks",
            },
            keys=EXPERT_KEYS | WINDOW,
            experts=True,
            config=_gguf_config,
        )
    }
)
