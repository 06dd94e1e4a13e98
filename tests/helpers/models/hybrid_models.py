"""Config fields of tiny hybrid models, which only the native runner runs."""

from __future__ import annotations

from typing import Any

_CONV = "conv"
_DELTA = "linear_attention"
_SPACE = "mamba"
_FULL = "full_attention"
_MLP = "mlp"
_MOE = "moe"

_LFM2 = {
    "num_hidden_layers": 5,
    # The last layer is recurrent, as in the makers' models, so all of its rows are needed.
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
_FALCON = {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.5,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.7, 1.3, 0.9, 1.1, 0.8],
    "mlp_multipliers": [0.8, 1.3],
}
_NEMOTRON = {
    # Two mixer layers follow each other, and the last layer is an MLP.
    "layers_block_type": [_DELTA, _MLP, _FULL, _DELTA, _MLP],
    "head_dim": 16,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "conv_kernel": 4,
    # Only transformers clips time steps by these limits.
    "time_step_min": 1e-30,
}
_GRANITE = {
    # Older layer names, as in the makers' configs.
    "layer_types": [_SPACE, "attention", _SPACE],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 96,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.4,
    "tie_word_embeddings": True,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    # Two thirds of 96, times 1.4, rounded up to a multiple of 32, is 96 again.
    "lfm2": {**_LFM2, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.4},
    "lfm2-plain": {
        **_LFM2,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 5,
        "tie_word_embeddings": False,
    },
    "lfm2_moe": {
        **_LFM2,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "num_dense_layers": 2,
        "routed_scaling_factor": 1.5,
    },
    "qwen3_5_text": _QWEN35,
    # Equal numbers of key and value heads, and a recurrent last layer.
    "qwen3_5_text-even": {
        **_QWEN35,
        "layer_types": [_FULL, _DELTA, _FULL, _DELTA, _DELTA],
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe_text": _QWEN35_MOE,
    "falcon_h1": _FALCON,
    # The grouped norm is before the gate or after it.
    "falcon_h1-before": {
        **_FALCON,
        "mamba_rms_norm": True,
        "mamba_n_groups": 1,
        "tie_word_embeddings": True,
    },
    "falcon_h1-after": {
        **_FALCON,
        "num_hidden_layers": 2,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mamba_conv_bias": False,
    },
    "nemotron_h": _NEMOTRON,
    # The last layer is recurrent.
    "nemotron_h-moe": {
        **_NEMOTRON,
        "layers_block_type": [_FULL, _MOE, _DELTA, _MLP, _FULL, _MOE, _DELTA],
        "n_groups": 1,
        "use_conv_bias": False,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 96,
        "routed_scaling_factor": 2.5,
    },
    "granitemoehybrid-h": _GRANITE,
    # Groups of value heads share keys and queries. The first and the last layer attend.
    "granitemoehybrid-groups": {
        **_GRANITE,
        "num_hidden_layers": 4,
        "layer_types": ["attention", _SPACE, _SPACE, "attention"],
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 32,
        "mamba_conv_bias": False,
        "tie_word_embeddings": False,
    },
    "granitemoehybrid-experts": {
        **_GRANITE,
        "intermediate_size": 64,
        "num_local_experts": 12,
        "num_experts_per_tok": 3,
        "mamba_n_groups": 2,
    },
}
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
}
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
