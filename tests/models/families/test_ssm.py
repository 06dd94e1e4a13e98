"""Configs of hybrid models: older names, derived widths, and refusals."""

import pytest

from helpers.json_files import read_json
from helpers.models.specs import spec_of
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.runners.native.select_native import native_kv_spec
from models.families.test_granite import MAKERS as GRANITES


def test_lfm2_mlp_width_follows_from_the_config(tmp_path):
    spec = spec_of(save_tiny_model("lfm2", tmp_path))
    assert {layer.intermediate_size for layer in spec.layers} == {96}
    config = read_json(tmp_path / "config.json")
    for change, width in (
        ({"intermediate_size": 12288}, 11488),  # 8192 x 1.4 = 11468, rounded up to a multiple of 32
        (
            {
                "intermediate_size": None,
                "block_ff_dim": 6656,
                "block_ffn_dim_multiplier": 1.0,
                "block_multiple_of": 256,
            },
            4608,
        ),
        ({"block_auto_adjust_ff_dim": False}, 96),
        ({"block_ffn_dim_multiplier": None, "block_multiple_of": 256}, 64),
    ):
        assert describe_model({**config, **change}).intermediate_size == width


def test_older_keys_are_read(tmp_path):
    config = read_json(save_tiny_model("lfm2", tmp_path) / "config.json")
    spec = describe_model(config)
    types = config.pop("layer_types")
    full = [index for index, kind in enumerate(types) if kind == "full_attention"]
    tied = config.pop("tie_word_embeddings")
    assert describe_model({**config, "full_attn_idxs": full, "tie_embedding": tied}) == spec
    assert describe_model({**config, "full_attn_idxs": full, "tie_embedding": False}).tied is False


def _qwen35(layers, value_heads, **fields):
    """Return a config like the makers' ones: every fourth layer attends, and both keys say so."""
    kinds = [
        "full_attention" if (index + 1) % 4 == 0 else "linear_attention" for index in range(layers)
    ]
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "layer_types": kinds,
        "full_attention_interval": 4,
        "linear_num_value_heads": value_heads,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        **fields,
    }


def _lfm2(full, layers, **fields):
    return {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "block_ff_dim": 12288,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "full_attn_idxs": full,
        "conv_L_cache": 3,
        "max_position_embeddings": 128000,
        "rope_theta": 1e6,
        "norm_eps": 1e-5,
        **fields,
    }


MAKERS = {
    "Qwen3.5 4B": (_qwen35(32, 32), 50.25, 32),
    "Qwen3.5 27B": (_qwen35(64, 48), 149.625, 64),
    "Qwen3.5 2B": (_qwen35(24, 16, num_key_value_heads=2), 19.265625, 12),
    "Qwen3.6 35B A3B": (
        _qwen35(
            40,
            32,
            model_type="qwen3_5_moe_text",
            hidden_size=2048,
            num_key_value_heads=2,
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        ),
        62.8125,
        20,
    ),
    "LFM2 1.2B": (_lfm2([2, 5, 8, 10, 12, 14], 16), 160 / 1024, 12),
    "LFM2 2.6B": (_lfm2([2, 6, 9, 12, 15, 18, 21, 27], 30), 352 / 1024, 16),
    **{
        name: (config, 73.79296875 if "micro" in name else 55.37109375, 8)
        for name, config in GRANITES.items()
    },
}
"""Configs, MiB of a sequence's states, and KiB of keys and values of a token as float16."""


@pytest.mark.parametrize("name", MAKERS)
def test_published_models_have_the_expected_state_sizes(name):
    config, states, keys = MAKERS[name]
    spec = native_kv_spec(describe_model(config), "int8", 16)
    assert spec.bytes_per_state == states * 2**20
    assert spec.bytes_per_block / spec.block_size == keys * 2**10


def test_lfm2_mlp_width_equals_the_published_one():
    assert describe_model(_lfm2([2, 5, 8, 10, 12, 14], 16)).intermediate_size == 8192
