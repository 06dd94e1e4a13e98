"""Llama, Mistral and Mixtral, which share a GGUF architecture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.models.families.family import Family, ModelType
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import MATRICES, PRE_NORMS, GgufArchitecture
from kvboost_edge.models.families.moe import (
    LOCAL_KEYS,
    ExpertNames,
    Experts,
    experts_of,
    gguf_experts,
)
from kvboost_edge.models.families.windows import same_window

__all__ = ["GGUF", "MODEL_TYPES"]

Config = Mapping[str, Any]


def _experts(config: Config, layers: int) -> Experts:
    """Return Mixtral's mixture of experts.

    Routing weights are the softmax of all logits, divided by the sum over the selected experts.
    """
    names = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.", ("w1", "w3", "w2"))
    return experts_of(config, LOCAL_KEYS, (8, 2, None), [True] * layers, renorm="add", names=names)


MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "llama": ModelType(
            "Llama, TinyLlama, SmolLM2 and others; default, linear, llama3, yarn and longrope",
            Family(),
            gguf=True,
            onnx=True,
        ),
        "mistral": ModelType(
            "Mistral 7B and others, sliding window",
            Family(qkv_bias=False, windows=same_window(4096)),
            gguf=True,
            onnx=True,
        ),
        "mixtral": ModelType(
            "Mixtral, mixture of experts",
            Family(qkv_bias=False, eps=1e-5, theta=1e6, windows=same_window(0), experts=_experts),
            gguf=True,
        ),
    }
)


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries read from a GGUF file. A model with experts is a Mixtral."""
    if not keys.optional_size("expert_count", 0):
        return {}
    return {
        **gguf_experts(keys, "num_local_experts"),
        "model_type": "mixtral",
        "sliding_window": None,
    }


GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture(
            "llama",
            {
                **MATRICES,
                **PRE_NORMS,
                "ffn_gate_inp": "block_sparse_moe.gate",
                "ffn_gate_exps": "block_sparse_moe.experts.w1",
                "ffn_up_exps": "block_sparse_moe.experts.w3",
                "ffn_down_exps": "block_sparse_moe.experts.w2",
            },
            permuted=True,
            experts=True,
            config=_gguf_config,
        )
    }
)
