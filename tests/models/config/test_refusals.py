"""Inconsistent or unsupported configs. Each is refused with the key and its value."""

import pytest

from helpers.json_files import read_json
from helpers.models.hybrid_models import HYBRIDS
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.spec import describe_model

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
NAN = float("nan")
INF = float("inf")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
# A tiny model of HYBRIDS, or the type of a model with these sizes -> its changed fields, and the
# message.
REFUSED = {
    "falcon_h1": [
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias=True is not supported"),
        ({"projectors_bias": True}, "projectors_bias=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"key_multiplier": 0.0}, "key_multiplier=0.0 must be a number from"),
        (
            {"ssm_multipliers": [1.0, 2.0]},
            r"ssm_multipliers=\[1.0, 2.0\] must be a list of 5 numbers",
        ),
        ({"mlp_multipliers": [1.0, INF]}, "mlp_multipliers=inf must be a number from"),
        ({"mamba_d_head": 16}, "mamba_n_heads=4 x mamba_d_head=16 must equal mamba_d_ssm=128"),
        ({"mamba_rms_norm": 1}, "mamba_rms_norm=1 must be true or false"),
    ],
    "granitemoehybrid-experts": [
        ({"layer_types": None}, "the model has no attention layers"),
        ({"layer_types": ["mamba", "attention", "rwkv"]}, "must have 3 entries, each one of"),
        ({"layer_types": ["mamba", "attention"]}, "must have 3 entries, each one of"),
        ({"layer_types": ["mamba", "attention", ["mamba"]]}, "must have 3 entries, each one of"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias=True is not supported for Mamba2"),
        ({"mamba_conv_bias": 1}, "mamba_conv_bias=1 is not supported for Mamba2 layers"),
        (
            {"hidden_act": "gelu_pytorch_tanh"},
            "hidden_act='gelu_pytorch_tanh' is not supported for",
        ),
        ({"mamba_d_head": 16}, "mamba_n_heads=4 x mamba_d_head=16 must equal mamba_expand=2 x hid"),
        ({"mamba_d_head": "half"}, "mamba_d_head='half' must be an integer"),
        ({"mamba_n_groups": 3}, "mamba_n_heads=4 is not a multiple of mamba_n_groups=3"),
        ({"mamba_d_state": 24}, "mamba_d_state=24 must be a multiple of 16"),
        ({"mamba_d_conv": 17}, "mamba_d_conv=17 exceeds 16"),
        ({"time_step_limit": [1.0, 0.5]}, "time_step_limit="),
        ({"num_experts_per_tok": 13}, "num_experts_per_tok=13 exceeds num_local_experts"),
        ({"num_local_experts": False}, "num_local_experts=False must be an integer"),
        ({"shared_intermediate_size": 0}, "shared_intermediate_size=0 must be an integer"),
    ],
    "lfm2": [
        (
            {"layer_types": ["conv", "conv", "conv", "conv", "mamba"]},
            r"must have 5 entries, each one of \['conv', 'full_",
        ),
        ({"layer_types": ["conv", "full_attention"]}, "must have 5 entries, each one of"),
        ({"layer_types": "conv"}, "must have 5 entries, each one of"),
        ({"layer_types": ["conv"] * 5}, "the model has no attention layers"),
        (
            {"full_attn_idxs": [1]},
            r"_attention' for layer 3, but full_attn_idxs=\[1\] gives 'conv'",
        ),
        ({"layer_types": None, "full_attn_idxs": [5]}, "must be a list of layer indices below 5"),
        ({"conv_bias": True}, "conv_bias=True is not supported"),
        ({"conv_L_cache": 1}, "conv_L_cache=1 must be an integer from 2"),
        ({"conv_L_cache": 17}, "conv_L_cache=17 exceeds 16, the limit of the recurrent kernels"),
        ({"hidden_size": 80}, "hidden_size=80 must be a multiple of 32"),
        ({"block_auto_adjust_ff_dim": 1}, "must be true or false"),
    ],
    "lfm2_moe": [
        ({"num_experts_per_tok": 13}, "num_experts_per_tok=13 exceeds num_experts=12"),
        ({"routed_scaling_factor": INF}, "routed_scaling_factor=inf must be"),
    ],
    "qwen3_5_text": [
        ({"full_attention_interval": 4}, "for layer 2, but full_attention_interval=4 gives"),
        ({"linear_num_value_heads": 3}, "not a multiple of linear_num_key_h"),
        ({"linear_value_head_dim": 24}, "linear_value_head_dim=24 must be a multiple of 16"),
        ({"linear_key_head_dim": 2064}, "linear_key_head_dim=2064 exceeds 2048"),
        ({"linear_conv_kernel_dim": 17}, "linear_conv_kernel_dim=17 exceeds 16"),
        (
            {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_value_head_dim": 16},
            "linear_num_value_heads=3 x linear_value_head_dim=16 = 48 must be a multiple of 32",
        ),
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ],
    "nemotron_h": [
        (
            {"layers_block_type": ["mlp", "full_attention", "conv"]},
            "must give one of",
        ),
        ({"layers_block_type": None}, "hybrid_override_pattern=None must give one of"),
        (
            {"layers_block_type": None, "hybrid_override_pattern": "M*X"},
            "must give one of",
        ),
        ({"layers_block_type": ["linear_attention", "mlp"]}, "the model has no attention layers"),
        ({"mlp_hidden_act": "silu"}, "activation 'silu' is not supported"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu' is not"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"use_bias": True}, "use_bias=True is not supported"),
        ({"sliding_window": 64}, "sliding_window=64 is not supported"),
        ({"n_groups": 3}, "mamba_num_heads=4 is not a multiple of n_groups=3"),
        ({"time_step_limit": [0.2, 0.1]}, "0 <= minimum <= maximum"),
    ],
    "nemotron_h-moe": [
        ({"n_group": 4}, "n_group=4 is not supported"),
        ({"moe_latent_size": 32}, "moe_latent_size=32 is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts=2 is not supported"),
        ({"num_experts_per_tok": 13}, "num_experts_per_tok=13 exceeds n_routed_experts=12"),
    ],
    "seed_oss": [
        ({}, "seed_oss"),
    ],
    "glm4_moe": [
        ({"n_group": 5, "topk_group": 2}, "n_group=5 must divide n_routed_experts=128"),
        ({"n_group": 128, "topk_group": 8}, "n_group=128 must divide n_routed_experts=128"),
        (
            {"n_group": 64, "topk_group": 3},
            "num_experts_per_tok=8 exceeds the 6 experts in topk_group=3 of n_group=64",
        ),
        ({"n_group": 0}, "n_group=0 must be an integer from 1"),
        ({"use_qk_norm": 1}, "use_qk_norm=1 must be true or false"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob='yes' must be true or false"),
        ({"n_shared_experts": 0}, "n_shared_experts=0 must be an integer from 1"),
        ({"routed_scaling_factor": INF}, "routed_scaling_factor=inf must be"),
    ],
    "gpt_oss": [
        ({"swiglu_limit": 9.0}, "swiglu_limit=9.0 is not supported"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported"),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            "not supported for model_type='gpt_oss'",
        ),
    ],
    "llama": [
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "not supported for model_type='llama'",
        ),
        ({"hidden_act": "relu"}, "relu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 10000.0}}}, "RoPE settings"),
        ({"hidden_act": ["silu"]}, "activation"),
        ({"partial_rotary_factor": "x"}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 7}, "partial_rotary_factor"),
        ({"rope_theta": INF}, "rope_theta"),
        ({"rope_theta": 1, "rope_scaling": YARN}, "rope_theta=1 must be above 1"),
        ({"rope_scaling": {**YARN, "beta_fast": "x"}}, "beta_fast"),
        ({"rope_scaling": {**YARN, "beta_slow": -1}}, "beta_slow"),
        ({"rope_scaling": {**YARN, "attention_factor": "x"}}, "attention_factor"),
        ({"rope_scaling": {**YARN, "mscale": "x", "mscale_all_dim": 1}}, "mscale"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 2,
                    "high_freq_factor": 2,
                }
            },
            "high_freq_factor=2 must be above",
        ),
        (
            {"num_hidden_layers": 1000000000},
            "num_hidden_layers=1000000000 must be an integer from 1 to 10000",
        ),
    ],
    "phi3": [
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "longrope.*list of 8 numbers",
        ),
    ],
    "gemma2": [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"layer_types": ["chunked_attention"] * 8}, "layer_types"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types"),
        ({"sliding_window": 4.5}, "sliding_window"),
        ({"layer_types": [["sliding_attention"]] * 8}, "layer_types"),
        ({"query_pre_attn_scalar": "x"}, "query_pre_attn_scalar"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"attn_logit_softcapping": NAN}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": "x"}, "final_logit_softcapping"),
    ],
    "gemma3_text": [
        ({"use_bidirectional_attention": "vision"}, "use_bidirectional_attention='vision'"),
        ({"sliding_window_pattern": "x"}, "sliding_window_pattern"),
        ({"rope_scaling": 5}, "RoPE settings 5"),
        ({"rope_parameters": {"full_attention": 5, "sliding_attention": {}}}, "RoPE settings"),
    ],
    "smollm3": [
        ({"no_rope_layers": [1]}, "no_rope_layers"),
        ({"no_rope_layer_interval": "x"}, "no_rope_layer_interval"),
        ({"no_rope_layers": 5}, "no_rope_layers"),
    ],
    "granite": [
        ({"logits_scaling": 0}, "logits_scaling"),
        ({"attention_multiplier": NAN}, "attention_multiplier"),
        ({"residual_multiplier": 1e40}, "residual_multiplier"),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": {"type": "yarn", "factor": 4.0},
            },
            r"rope_scaling=.*contradicts rope_parameters=.*\(factor, type\)",
        ),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": 5}, "rope_scaling=5"),
        ({"logits_scaling": 1e-40}, "logits_scaling"),
    ],
    "mistral": [
        ({"sliding_window": "a"}, "sliding_window"),
        ({"sliding_window": -3}, "sliding_window"),
        ({"layer_types": 5}, "layer_types"),
    ],
    "qwen2": [
        ({"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers"),
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "message"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_contradictory_configs_are_refused(name, change, message, tmp_path):
    if name in HYBRIDS:
        config = read_json(save_tiny_model(name, tmp_path) / "config.json")
        describe_model(config)
    else:
        config = {"model_type": name, **SIZES}
    with pytest.raises(ModelFormatError, match=message):
        describe_model({**config, **change})
