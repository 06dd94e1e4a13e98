"""GLM-4.5 and GLM-4.6: mixture of experts with a selection bias and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.family import Family, ModelType
from kvboost_edge.models.families.fields import integer_of, number_of
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import (
    EXPERT_KEYS,
    EXPERTS,
    HEAD_NORMS,
    MATRICES,
    GgufArchitecture,
)
from kvboost_edge.models.families.moe import (
    SIGMOID,
    ExpertNames,
    Experts,
    experts_of,
    flag_of,
    gguf_experts,
)
from kvboost_edge.models.families.mtp import LAYER_MTP

__all__ = ["GGUF", "MODEL_TYPES"]

Config = Mapping[str, Any]

_USUAL = {
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}


def _experts(config: Config, layers: int) -> Experts:
    """Return the mixture of experts.

    Routing weights are the sigmoids of the selected logits, divided by their sum and scaled. The
    router adds a bias when it selects experts. The shared experts are treated as one expert of
    their total width.
    """
    full = {**_USUAL, **{key: value for key, value in config.items() if value is not None}}
    dense = integer_of(full, "first_k_dense_replace", 0)
    count = integer_of(full, "n_shared_experts", 1)
    parts = tuple(f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down"))
    groups, used_groups = _groups(full)
    width = integer_of({"moe_intermediate_size": 1408, **full}, "moe_intermediate_size", 1)
    return experts_of(
        full,
        ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
        (128, 8, 1408),
        [index >= dense for index in range(layers)],
        names=ExpertNames(bias="mlp.gate.e_score_correction_bias", shared=parts),
        score="sigmoid",
        eps=1e-20,
        renorm="add" if flag_of(full, "norm_topk_prob", True) else "",
        scale=number_of(full, "routed_scaling_factor", 1e-6, 1e6),
        groups=groups,
        used_groups=used_groups,
        shared=count * width,
    )


def _groups(config: Config) -> tuple[int, int]:
    """Return the number of groups of experts, and the number of groups that a token may use."""
    groups = integer_of(config, "n_group", 1)
    used = integer_of(config, "topk_group", 1)
    if used >= groups:
        return groups, groups
    experts, chosen = (
        integer_of({"n_routed_experts": 128, "num_experts_per_tok": 8, **config}, key, 1)
        for key in ("n_routed_experts", "num_experts_per_tok")
    )
    size, rest = divmod(experts, groups)
    if rest or size < 2:
        raise ModelFormatError(
            f"n_group={groups} must divide n_routed_experts={experts} into groups of at least 2"
        )
    if chosen > used * size:
        raise ModelFormatError(
            f"num_experts_per_tok={chosen} exceeds the {used * size} experts in "
            f"topk_group={used} of n_group={groups}"
        )
    return groups, used


MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "glm4_moe": ModelType(
            "GLM-4.5 and GLM-4.6, mixture of experts with a selection bias and shared experts",
            Family(
                head_norm="head",
                head_norm_key="use_qk_norm",
                output_bias=False,
                eps=1e-5,
                partial=0.5,
                experts=_experts,
                mtp=LAYER_MTP,
            ),
            gguf=True,
        ),
    }
)


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries read from a GGUF file."""
    gating = keys.optional_size("expert_gating_func", 0)
    if gating not in (None, SIGMOID):
        raise keys.error("expert_gating_func", gating, f"must be {SIGMOID} (sigmoid)")
    return {
        **gguf_experts(keys, "n_routed_experts"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "n_shared_experts": keys.optional_size("expert_shared_count"),
        "first_k_dense_replace": keys.optional_size("leading_dense_block_count", 0),
        "norm_topk_prob": bool(keys.header.value(keys.name("expert_weights_norm"), bool)),
        "routed_scaling_factor": keys.number("expert_weights_scale"),
        "n_group": keys.optional_size("expert_group_count", 0) or None,
        "topk_group": keys.optional_size("expert_group_used_count", 0) or None,
        "use_qk_norm": f"{keys.first_block()}attn_q_norm.weight" in keys.header.tensors,
    }


GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "glm4moe": GgufArchitecture(
            "glm4_moe",
            {
                **MATRICES,
                **HEAD_NORMS,
                **EXPERTS,
                **{
                    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj"
                    for part in ("gate", "up", "down")
                },
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
                "exp_probs_b": "mlp.gate.e_score_correction_bias",
            },
            experts=True,
            keys=EXPERT_KEYS
            | {
                "expert_shared_count",
                "expert_weights_norm",
                "expert_weights_scale",
                "expert_gating_func",
                "expert_group_count",
                "expert_group_used_count",
                "leading_dense_block_count",
                "nextn_predict_layers",
            },
            config=_gguf_config,
        ),
    }
)
