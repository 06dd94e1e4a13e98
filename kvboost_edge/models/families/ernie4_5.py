"""ERNIE 4.5, either dense or a mixture of experts with a selection bias and shared experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.models.families.family import Family, ModelType
from kvboost_edge.models.families.fields import integer_of, number_of
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import (
    EXPERT_KEYS,
    EXPERTS,
    MATRICES,
    PRE_NORMS,
    GgufArchitecture,
)
from kvboost_edge.models.families.moe import ExpertNames, Experts, experts_of, gguf_experts

__all__ = ["GGUF", "MODEL_TYPES"]

Config = Mapping[str, Any]


def _experts(config: Config, layers: int) -> Experts:
    """Return the mixture of experts.

    The router adds a bias when it selects experts. Routing weights are the softmax of all logits,
    divided by the sum over the selected experts. The shared experts are treated as one expert of
    their total width.
    """
    usual = {
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    }
    full = {**usual, **{key: value for key, value in config.items() if value is not None}}
    start, step, shared = (
        integer_of(full, key, low)
        for key, low in (
            ("moe_layer_start_index", 0),
            ("moe_layer_interval", 1),
            ("moe_num_shared_experts", 0),
        )
    )
    end = (
        layers - 1
        if full["moe_layer_end_index"] == -1
        else integer_of(full, "moe_layer_end_index", 0)
    )
    sparse = [(index + 1) % step == 0 and start <= index <= end for index in range(layers)]
    parts = (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj",
    )
    names = ExpertNames(
        bias="mlp.moe_statics.e_score_correction_bias", shared=parts if shared else ()
    )
    found = experts_of(
        full,
        ("moe_num_experts", "moe_k", "moe_intermediate_size"),
        (64, 6, 1536),
        sparse,
        names=names,
        renorm="least",
        eps=number_of(full, "moe_norm_min", 0.0, 1.0),
    )
    return dataclasses.replace(found, shared=shared * found.width)


_FAMILY = Family(
    qkv_bias=False,
    tied=True,
    head_dim=128,
    eps=1e-5,
    theta=5e5,
    paired_rope=True,
    unless=(("use_bias", (None, False)),),
)
MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "ernie4_5": ModelType("the dense models of ERNIE 4.5", _FAMILY, gguf=True),
        "ernie4_5_moe": ModelType(
            "ERNIE 4.5, mixture of experts with a selection bias and shared experts",
            dataclasses.replace(_FAMILY, head_dim=None, experts=_experts),
            gguf=True,
        ),
    }
)

_LEADING = "leading_dense_block_count"


def _gguf_moe_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries for a mixture of experts, read from a GGUF file."""
    # Converters compute the width of the shared experts from other numbers. Here it is computed
    # from their count, and tensors of a different width are refused.
    shared = keys.optional_size("expert_shared_count", 0) or 0
    return {
        **gguf_experts(keys, "moe_num_experts", "moe_k"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": keys.optional_size(_LEADING, 0) or 0,
        "moe_layer_end_index": config["num_hidden_layers"] - 1,
        "moe_layer_interval": keys.optional_size("interleave_moe_layer_step", 0) or 1,
    }


GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "ernie4_5": GgufArchitecture("ernie4_5", {**MATRICES, **PRE_NORMS}),
        "ernie4_5-moe": GgufArchitecture(
            "ernie4_5_moe",
            {
                **MATRICES,
                **PRE_NORMS,
                **EXPERTS,
                **{
                    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj"
                    for part in ("gate", "up", "down")
                },
                "exp_probs_b": "mlp.moe_statics.e_score_correction_bias",
            },
            experts=True,
            keys=EXPERT_KEYS
            | {
                "expert_shared_count",
                "expert_shared_feed_forward_length",
                "leading_dense_block_count",
                "interleave_moe_layer_step",
            },
            config=_gguf_moe_config,
        ),
    }
)
