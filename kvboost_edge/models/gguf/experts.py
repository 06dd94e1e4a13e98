"""What a file says of a mixture of experts, as fields of transformers' config. Of each architecture
llama.cpp knows how shares are made; the files do not say it.
"""

from __future__ import annotations

from typing import Any

from kvboost_edge.models.families.gguf_keys import Keys

__all__ = ["ernie_moe", "experts", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]

_LEADING = "leading_dense_block_count"


def experts(
    keys: Keys, count: str = "num_experts", used: str = "num_experts_per_tok"
) -> dict[str, Any]:
    """The number of experts, and of those a token goes to."""
    return {count: keys.size("expert_count"), used: keys.size("expert_used_count")}


def qwen3_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Shares are divided by their sum."""
    return {
        **experts(keys),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def qwen2_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Shares are not divided by their sum."""
    shared = keys.size("expert_shared_feed_forward_length")
    return {
        **qwen3_moe(keys, config),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": False,
    }


def olmoe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Shares are not divided by their sum."""
    return {**experts(keys), "norm_topk_prob": False}


def mixtral(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """A file of architecture llama is a Mixtral where it has experts."""
    if not keys.optional_size("expert_count", 0):
        return {}
    return {**experts(keys, "num_local_experts"), "model_type": "mixtral", "sliding_window": None}


def gpt_oss(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Its yarn has borders that are no whole numbers, which files do not say: config.json has
    "truncate": false.
    """
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "yarn":
        rope["truncate"] = False
    return {
        **experts(keys, "num_local_experts"),
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "sliding_window": keys.size("attention.sliding_window"),
    }


def ernie_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Converters make the width of the shared experts from other numbers, so it follows from how
    many they are; of another width the tensors are refused.
    """
    shared = keys.optional_size("expert_shared_count", 0) or 0
    return {
        **experts(keys, "moe_num_experts", "moe_k"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": keys.optional_size(_LEADING, 0) or 0,
        "moe_layer_end_index": config["num_hidden_layers"] - 1,
        "moe_layer_interval": keys.optional_size("interleave_moe_layer_step", 0) or 1,
    }
