"""Fields of tiny models with layers that keep a state instead of keys and values; the native runner alone runs them."""

from __future__ import annotations

from typing import Any

__all__ = ["HYBRIDS", "HYBRID_NESTED"]

_CONV, _DELTA, _FULL = "conv", "linear_attention", "full_attention"

_LFM2 = {
    "num_hidden_layers": 5,
    # The last layer keeps a state, as in the makers' models: its rows are all needed.
    "layer_types": [_CONV, _FULL, _CONV, _FULL, _CONV],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
}
_QWEN35 = {
    "num_hidden_layers": 5,
    "layer_types": [_DELTA, _DELTA, _FULL, _DELTA, _FULL],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_QWEN35_MOE = {
    **_QWEN35,
    "intermediate_size": None,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    # Two thirds of 96, times 1.4, up to the next multiple of 32: 96 again.
    "lfm2": {**_LFM2, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.4},
    "lfm2-plain": {**_LFM2, "block_auto_adjust_ff_dim": False, "conv_L_cache": 5, "tie_word_embeddings": False},
    "lfm2_moe": {
        **_LFM2,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "num_dense_layers": 2,
        "routed_scaling_factor": 1.5,
    },
    "qwen3_5_text": _QWEN35,
    # As many heads of keys as of values, and a last layer that keeps a state.
    "qwen3_5_text-even": {
        **_QWEN35,
        "layer_types": [_FULL, _DELTA, _FULL, _DELTA, _DELTA],
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe_text": _QWEN35_MOE,
}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
HYBRID_NESTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "lfm2_vl": (
        "lfm2",
        {**_LFM2, "block_auto_adjust_ff_dim": False},
        {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_patches": 16,
            "patch_size": 4,
        },
    ),
    "qwen3_5": ("qwen3_5_text", _QWEN35, _VISION),
    "qwen3_5_moe": ("qwen3_5_moe_text", _QWEN35_MOE, _VISION),
}
"""The language model's type, its fields, and those of the part for images."""
