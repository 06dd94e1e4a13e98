"""OLMo 2 and 3, which have norms after the blocks and share a GGUF architecture, and OLMoE."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.models.families.family import Family, ModelType
from kvboost_edge.models.families.gguf_keys import Keys, layer_types
from kvboost_edge.models.families.gguf_names import (
    EXPERTS,
    HEAD_NORMS,
    MATRICES,
    POST_NORMS,
    PRE_NORMS,
    WINDOW,
    GgufArchitecture,
)
from kvboost_edge.models.families.moe import Experts, experts_of, gguf_experts, renorm_of
from kvboost_edge.models.families.windows import all_but_every

__all__ = ["GGUF", "MODEL_TYPES"]

Config = Mapping[str, Any]


def _experts(config: Config, layers: int) -> Experts:
    """Return the experts of OLMoE, whose layers all have a mixture of experts."""
    keys = ("num_experts", "num_experts_per_tok", "intermediate_size")
    return experts_of(config, keys, (64, 8, None), [True] * layers, renorm=renorm_of(config))


MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "olmo": ModelType("Llama's attention", tested=False),
        "olmo2": ModelType(
            "OLMo 2, norms after the blocks",
            Family(norms="post", head_norm="all", eps=1e-5),
            gguf=True,
        ),
        "olmo3": ModelType(
            "OLMo 3, local and global layers, norms after the blocks",
            Family(
                norms="post",
                head_norm="all",
                eps=1e-5,
                theta=5e5,
                local_rope=True,
                local_theta=5e5,
                windows=all_but_every(4),
            ),
            gguf=True,
        ),
        "olmoe": ModelType(
            "OLMoE, mixture of experts",
            Family(head_norm="all", eps=1e-5, experts=_experts, unless=(("clip_qkv", (None,)),)),
            gguf=True,
        ),
    }
)


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries read from a GGUF file.

    A model with a window is an OLMo 3, whose RoPE scaling applies only to full layers.
    """
    window = keys.optional_size("attention.sliding_window", 0)
    if not window:
        return {}
    full = config["rope_parameters"]
    local = {
        "rope_type": "default",
        "rope_theta": keys.number("rope.freq_base_swa") or full["rope_theta"],
    }
    return {
        **layer_types(keys, config, default_period=4),
        "model_type": "olmo3",
        "sliding_window": window,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **full},
            "sliding_attention": local,
        },
    }


def _gguf_moe_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries of OLMoE, read from a GGUF file. Routing weights are not normalized."""
    return {**gguf_experts(keys), "norm_topk_prob": False}


GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "olmo2": GgufArchitecture(
            "olmo2",
            {**MATRICES, **POST_NORMS, **HEAD_NORMS},
            keys=WINDOW | {"rope.freq_base_swa"},
            config=_gguf_config,
        ),
        "olmoe": GgufArchitecture(
            "olmoe",
            {**MATRICES, **PRE_NORMS, **HEAD_NORMS, **EXPERTS},
            experts=True,
            config=_gguf_moe_config,
        ),
    }
)
