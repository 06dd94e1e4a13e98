"""Configs of Granite 4: older names, layers with and without recurrent state, and refusals."""

import pytest

from helpers.json_files import read_json
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.models.config.spec import describe_model, may_keep_states


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = save_tiny_model("granitemoehybrid-experts", tmp_path_factory.mktemp("granite"))
    return read_json(path / "config.json")


def test_older_and_newer_keys_are_equivalent(config):
    spec = describe_model(config)
    assert config["layer_types"] == ["linear_attention", "full_attention", "linear_attention"]
    older = {key: value for key, value in config.items() if key != "layer_types"}
    for key in ("layer_types", "layers_block_type"):
        assert describe_model({**older, key: ["mamba", "attention", "mamba"]}) == spec
    assert describe_model({**config, "mamba_d_head": "auto"}) == spec
    assert spec.mixer == (
        "ssd",
        3,
        4 * 32 + 2 * 2 * 16,
        2,
        4,
        16,
        32,
        False,
        "gated_before",
        2,
        (0.0, float("inf")),
    )
    assert [layer.attends for layer in spec.layers] == [False, True, False]
    assert [layer.keeps_state for layer in spec.layers] == [True, False, True]
    assert [layer.rope for layer in spec.layers] == [-1, -1, -1]
    assert spec.experts is not None
    assert (spec.experts.count, spec.experts.used, spec.experts.width, spec.experts.shared) == (
        12,
        3,
        64,
        96,
    )
    assert spec.experts.score == "chosen"


def test_time_step_limits_and_biases_follow_the_config(config):
    spec = describe_model({**config, "time_step_limit": [0.01, 0.5], "mamba_conv_bias": False})
    assert spec.mixer is not None
    assert spec.mixer.time_limit == (0.01, 0.5)
    assert spec.named_mixer[1].conv_bias == ""
    assert describe_model(config).named_mixer[1].conv_bias == "mamba.conv1d.bias"


def test_without_states_other_runners_support_it(config):
    dense = {"num_local_experts": None, "layer_types": ["attention"] * 3}
    assert may_keep_states(config)
    assert may_keep_states({**config, "layer_types": None})
    assert not may_keep_states({**config, **dense})
    spec = describe_model({**config, **dense})
    assert (spec.hybrid, spec.mixer, spec.experts) == (None, None, None)
    # Sizes of parts that no layer has are ignored.
    assert describe_model({**config, **dense, "mamba_n_heads": 7}) == spec


def _granite(hidden, heads, kv_heads, state_heads, **fields):
    """Return a config like the makers' ones, in which four of forty layers attend."""
    kinds = ["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)]
    return {
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "hidden_size": hidden,
        "num_hidden_layers": 40,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "layer_types": kinds,
        "position_embedding_type": "nope",
        "mamba_n_heads": state_heads,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "max_position_embeddings": 131072,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "tie_word_embeddings": True,
        **fields,
    }


MAKERS = {
    "Granite 4 h-1B": _granite(
        1536, 12, 4, 48, intermediate_size=4096, shared_intermediate_size=4096
    ),
    "Granite 4 h-micro": _granite(
        2048, 32, 8, 64, intermediate_size=8192, shared_intermediate_size=8192
    ),
    "Granite 4 h-tiny": _granite(
        1536,
        12,
        4,
        48,
        intermediate_size=512,
        shared_intermediate_size=1024,
        num_local_experts=64,
        num_experts_per_tok=6,
    ),
}


def test_experts_and_shared_mlp_have_their_own_widths():
    spec = describe_model(MAKERS["Granite 4 h-tiny"])
    assert spec.experts is not None
    assert (spec.experts.width, {layer.intermediate_size for layer in spec.layers}) == (512, {1024})
    dense = describe_model(MAKERS["Granite 4 h-1B"])
    assert (dense.experts, {layer.intermediate_size for layer in dense.layers}) == (None, {4096})
