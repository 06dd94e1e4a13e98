"""Qwen2 and Qwen3, either dense or with a mixture of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.models.families.family import Family, ModelType, Wrapper
from kvboost_edge.models.families.fields import integer_of
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import (
    EXPERT_KEYS,
    EXPERTS,
    HEAD_NORMS,
    MATRICES,
    PRE_NORMS,
    SHARED_EXPERT,
    GgufArchitecture,
)
from kvboost_edge.models.families.moe import ExpertNames, Experts, experts_by_step, gguf_experts
from kvboost_edge.models.families.windows import (
    qwen2_moe_windows,
    qwen3_moe_windows,
    qwen_windows,
)

__all__ = ["GGUF", "MODEL_TYPES", "qwen2_experts"]

Config = Mapping[str, Any]


def _qwen3_experts(config: Config, layers: int) -> Experts:
    return experts_by_step(config, layers, (128, 8, 768))


def qwen2_experts(config: Config, layers: int) -> Experts:
    """Return a mixture of experts with a gated shared expert."""
    found = experts_by_step(config, layers, (60, 4, 1408))
    config = {"shared_expert_intermediate_size": 5632, **config}
    parts = (
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_expert.down_proj",
    )
    names = ExpertNames(shared=parts, shared_gate="mlp.shared_expert_gate")
    return dataclasses.replace(
        found, shared=integer_of(config, "shared_expert_intermediate_size", 1), names=names
    )


_QWEN2 = Family(qkv_bias=True, windows=qwen_windows)
MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "qwen2": ModelType("Qwen2 and Qwen2.5", _QWEN2, gguf=True, onnx=True),
        "qwen2_moe": ModelType(
            "Qwen1.5 and Qwen2, mixture of experts with a gated shared expert",
            dataclasses.replace(
                _QWEN2,
                windows=qwen2_moe_windows,
                experts=qwen2_experts,
                unless=(("qkv_bias", (None, True)),),
            ),
            gguf=True,
        ),
        "qwen3": ModelType(
            "Qwen3, dense; normalized queries and keys",
            Family(head_norm="head", head_dim=128, windows=qwen_windows),
            gguf=True,
            onnx=True,
        ),
        "qwen3_moe": ModelType(
            "Qwen3, mixture of experts",
            Family(head_norm="head", windows=qwen3_moe_windows, experts=_qwen3_experts),
            gguf=True,
        ),
        "qwen3_vl_text": ModelType(
            "Qwen3-VL, the language model on its own",
            Family(head_norm="head", head_dim=128, theta=5e5),
            torch=False,
            gguf=True,
        ),
        "qwen3_vl": ModelType(
            "Qwen3-VL (vision model), text only",
            wrapper=Wrapper(("qwen3_vl_text",), tied=False),
            torch=False,
            gguf=True,
        ),
    }
)


def _gguf_qwen3_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries read from a GGUF file. Routing weights are normalized."""
    return {
        **gguf_experts(keys),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gguf_qwen2_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries read from a GGUF file. Routing weights are not normalized."""
    shared = keys.size("expert_shared_feed_forward_length")
    return {
        **_gguf_qwen3_moe(keys, config),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": False,
    }


GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "qwen2": GgufArchitecture("qwen2", {**MATRICES, **PRE_NORMS}),
        "qwen2moe": GgufArchitecture(
            "qwen2_moe",
            {**MATRICES, **PRE_NORMS, **EXPERTS, **SHARED_EXPERT},
            keys=EXPERT_KEYS | {"expert_shared_feed_forward_length"},
            experts=True,
            config=_gguf_qwen2_moe,
        ),
        "qwen3": GgufArchitecture("qwen3", {**MATRICES, **PRE_NORMS, **HEAD_NORMS}),
        "qwen3moe": GgufArchitecture(
            "qwen3_moe",
            {**MATRICES, **PRE_NORMS, **HEAD_NORMS, **EXPERTS},
            keys=EXPERT_KEYS,
            experts=True,
            config=_gguf_qwen3_moe,
        ),
        "qwen3vl": GgufArchitecture(
            "qwen3_vl_text",
            {**MATRICES, **PRE_NORMS, **HEAD_NORMS},
            keys=frozenset({"rope.dimension_sections", "n_deepstack_layers"}),
        ),
    }
)
