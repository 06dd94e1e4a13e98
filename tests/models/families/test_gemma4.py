"""Configs of Gemma 4: KV sharing between layers, sizes by kind of layer, and refusals."""

import pytest
import torch
from transformers import Gemma4TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.architectures import check_model_compatibility
from kvboost_edge.models.config.spec import describe_model, heads_by_layer
from kvboost_edge.models.packed.pack_plan import pack_plan

FULL = "full_attention"
SLIDING = "sliding_attention"
# The sizes of E2B.
E2B = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "layer_types": [FULL if i % 5 == 4 else SLIDING for i in range(35)],
    "sliding_window": 512,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "final_logit_softcapping": 30.0,
}


def test_shapes_of_e2b():
    spec = describe_model(E2B)
    assert [layer.kv for layer in spec.layers] == [
        *range(15),
        *[14 if i % 5 == 4 else 13 for i in range(15, 35)],
    ]
    assert [layer.intermediate_size for layer in spec.layers] == [6144] * 15 + [12288] * 20
    assert {layer.head_dim for layer in spec.layers if layer.window} == {256}
    assert {layer.head_dim for layer in spec.layers if not layer.window} == {512}
    assert (spec.first_shared, len(spec.kv_layers), spec.softmax_scale, spec.logit_cap) == (
        15,
        15,
        1.0,
        30.0,
    )
    assert (
        sum(4 * layer.num_kv_heads * layer.head_dim for layer in spec.kv_layers) == 18 * 1024
    )  # bytes in float16
    assert spec.per_layer == (262144, 256)


MIXTURE = {
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}


@pytest.mark.parametrize(
    "changes", [{}, {"num_kv_shared_layers": 7}, {"layer_types": [SLIDING, FULL] * 17 + [FULL]}]
)
def test_shared_kv_layers_equal_transformers(changes):
    """Each sharing layer reads the KV of the layer of its kind that stores it according to
    transformers.
    """
    spec = describe_model({**E2B, **changes})
    config = Gemma4TextConfig(**{**E2B, **changes})
    modes = config.kv_sharing_modes
    givers = {
        config.layer_types[index]: index for index, mode in enumerate(modes) if mode == "store"
    }
    for index, layer in enumerate(spec.layers):
        assert layer.owns_kv == (modes[index] != "reuse")
        assert layer.kv == (index if layer.owns_kv else givers[config.layer_types[index]])


def test_full_attention_sizes_if_values_equal_keys():
    changes = {
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": True,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
    }
    spec = describe_model({**E2B, **changes})
    assert {(layer.num_kv_heads, layer.has_values) for layer in spec.layers if layer.window} == {
        (8, True)
    }
    assert {
        (layer.num_kv_heads, layer.has_values) for layer in spec.layers if not layer.window
    } == {(2, False)}
    assert heads_by_layer({**E2B, **changes})[4] == (512, 2)
    written = Gemma4TextConfig(**{**E2B, **changes}).to_dict()
    assert describe_model(written).layers == spec.layers
    # Without it the key for full-attention layers has no effect, as in transformers.
    assert {
        layer.num_kv_heads
        for layer in describe_model({**E2B, "num_global_key_value_heads": 2}).layers
    } == {1}


def test_full_attention_has_partial_rope():
    full, sliding = describe_model(E2B).ropes
    config = Gemma4TextConfig(**E2B)
    expected, factor = ROPE_INIT_FUNCTIONS["proportional"](config, "cpu", layer_type=FULL)
    torch.testing.assert_close(torch.tensor(full.frequencies), expected, rtol=1e-6, atol=0)
    assert (full.factor, full.half, sliding.half) == (factor, 256, 128)
    assert full.frequencies[64:] == (0.0,) * 192
    assert min(full.frequencies[:64]) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers=35 must be less than .* 35"),
        ({"num_kv_shared_layers": 100}, "num_kv_shared_layers=100 must be less than .* 35"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers=-1"),
        (
            {"num_kv_shared_layers": 31},
            r"layer 4 \(full_attention\) needs the KV .*none of the first 4 layers",
        ),
        ({"num_kv_shared_layers": "x"}, "num_kv_shared_layers='x'"),
        (
            {"layer_types": [FULL] * 34 + [SLIDING]},
            "must be 'full_attention' for Gemma 4, not 'sliding_",
        ),
        ({"layer_types": [FULL] * 3}, "layer_types"),
        (
            {"vocab_size_per_layer_input": 1000},
            "vocab_size_per_layer_input=1000 is less than vocab_size=262144",
        ),
        ({"hidden_size_per_layer_input": -4}, "hidden_size_per_layer_input=-4"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads=8 is not a multiple of the 3 KV heads of layer 0",
        ),
        (
            {"per_layer_config": {"4": {"head_dim": 512}, "40": {"head_dim": 512}}},
            "per_layer_config={'40'",
        ),
        ({"per_layer_config": {"4": {"num_experts": 2}}}, "per_layer_config={'4'"),
        ({"per_layer_config": 5}, "per_layer_config=5 must be an object"),
        (
            {"per_layer_config": {"4": {"head_dim": 512}}},
            r"layers with the same RoPE have different head sizes \[256, 512\]|"
            "layer 19 shares the KV of layer 14",
        ),
        (
            {"per_layer_config": {"13": {"num_key_value_heads": 2}}},
            "layer 15 shares the KV of layer 13",
        ),
        ({"enable_moe_block": True}, "num_experts=None must be an integer"),
        ({"enable_moe_block": 1}, "enable_moe_block=1 must be true or false"),
        ({**MIXTURE, "top_k_experts": 129}, "top_k_experts=129 exceeds num_experts=128"),
        ({**MIXTURE, "top_k_experts": 0}, "top_k_experts=0 must be an integer from 1"),
        (
            {**MIXTURE, "moe_intermediate_size": 700},
            "moe_intermediate_size=700 of the experts must be a multiple of 32",
        ),
        (
            {**MIXTURE, "moe_intermediate_size": None},
            "moe_intermediate_size=None must be an integer",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
    ],
)
def test_contradictory_configs_are_refused(changes, message):
    with pytest.raises(ModelFormatError, match=message):
        describe_model({**E2B, **changes})


def test_experts_run_in_parallel_to_the_mlp():
    """The MLP keeps its own width. The MLP's output, the experts' input and their output each have
    a norm.
    """
    spec = describe_model({**E2B, **MIXTURE})
    assert spec.experts is not None
    assert (spec.experts.count, spec.experts.used, spec.experts.width) == (128, 8, 704)
    assert spec.experts.beside
    assert all(spec.experts.sparse)
    assert spec.layers == describe_model(E2B).layers
    entries = {entry.name: entry for entry in pack_plan(spec, "int4")}
    assert entries["layer7.gate_up"].rows == 2 * spec.layers[7].intermediate_size
    assert entries["layer7.experts_gate_up"].rows == 128 * 2 * 704
    assert entries["layer7.router"].kind == "f32"
    assert entries["layer7.router_in"].parts == (("model.layers.7.router.scale", 1536),)
    assert entries["layer7.shares"].parts == (("model.layers.7.router.per_expert_scale", 128),)
    norms = {
        name: entries[f"layer7.{name}"].parts[0][0]
        for name in ("beside_out", "experts_in", "experts_out")
    }
    assert norms == {
        "beside_out": "model.layers.7.post_feedforward_layernorm_1.weight",
        "experts_in": "model.layers.7.pre_feedforward_layernorm_2.weight",
        "experts_out": "model.layers.7.post_feedforward_layernorm_2.weight",
    }
    check_model_compatibility({**E2B, **MIXTURE})
    assert describe_model({**E2B, "enable_moe_block": False}).experts is None


def test_bidirectional_attention_is_refused_by_name():
    with pytest.raises(ModelFormatError, match="bidirectional attention is supported"):
        check_model_compatibility({**E2B, "use_bidirectional_attention": "all"})


def test_nested_configs_that_contradict_are_refused():
    nested = {"model_type": "gemma4", "text_config": E2B}
    assert describe_model(nested).layers == describe_model(E2B).layers
    with pytest.raises(ModelFormatError, match="hidden_size=2560, but its text_config gives 1536"):
        describe_model({**nested, "hidden_size": 2560})
    with pytest.raises(ModelFormatError, match="'gemma4_unified' has model_type='gemma4_text'"):
        describe_model({**nested, "model_type": "gemma4_unified"})
