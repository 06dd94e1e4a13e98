"""Configs read into specs: the defaults of each family, kinds of RoPE, and refusals with their
reason.
"""

import math

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.architectures import pinned_context
from kvboost_edge.models.config.rope_kinds import rope_kind
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.families.registry import FAMILIES

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def _spec(model_type, **fields):
    return describe_model({"model_type": model_type, **SIZES, **fields})


@pytest.mark.parametrize("model_type", sorted({*FAMILIES} - {"minicpm"}))  # missing in transformers
def test_defaults_equal_transformers(model_type):
    """A config.json without the keys that have default values means the same here as in
    transformers.
    """
    extra = {"head_dim": 32} if model_type == "mistral" else {}
    if model_type == "granitemoehybrid":
        extra = {"layer_types": ["attention"] * 8, "num_local_experts": 0}
    # The default width of its experts is not supported, nor are the head counts of the other family
    # with so few channels.
    elif model_type == "nemotron_h":
        extra = {"layers_block_type": ["linear_attention", "full_attention", "mlp", "mlp"]}
    elif model_type == "falcon_h1":
        extra = {"mamba_n_heads": 32}
    config = AutoConfig.for_model(model_type, pad_token_id=0, **SIZES, **extra)
    spec = _spec(model_type, **extra)
    config.allow_global_per_layer_attribute_access = True  # for configs whose layers differ
    eps = {"lfm2": "norm_eps", "lfm2_moe": "norm_eps", "nemotron_h": "layer_norm_epsilon"}
    assert spec.eps == getattr(config, eps.get(model_type, "rms_norm_eps"))
    # The language model of a vision model does not set it: the LM head belongs to the whole model.
    assert spec.tied == getattr(config, "tie_word_embeddings", False)
    assert spec.head_dim == (getattr(config, "head_dim", None) or 16)
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or 0
    if types:
        assert [layer.window for layer in spec.layers] == [
            window * (t == "sliding_attention") for t in types
        ]
    else:
        assert {layer.window for layer in spec.layers} == {window}
    for written in (config.to_dict(), config.to_diff_dict()):
        assert describe_model({**written, "model_type": model_type}) == spec


def test_older_config_keys_are_read():
    old = _spec("llama", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = _spec("llama", rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0})
    assert old == new
    old = _spec("gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=6)
    assert old == _spec("gemma3_text")
    assert [layer.rope for layer in old.layers] == [1, 1, 1, 1, 1, 0, 1, 1]


def test_rope_settings_may_be_given_twice():
    once = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    older = {"type": "linear", "factor": 2.0}
    assert _spec("llama", rope_parameters=once, rope_scaling=older) == _spec(
        "llama", rope_parameters=once
    )
    assert _spec("llama", rope_theta=None) == _spec("llama")


def test_layers_without_rope_are_read():
    assert [layer.rope for layer in _spec("exaone4").layers] == [0, 0, 0, -1] * 2
    assert [layer.rope for layer in _spec("exaone4", sliding_window=None).layers] == [0] * 8
    written = _spec("exaone4", sliding_window_pattern="LLLG", layer_types=["full_attention"] * 8)
    assert [layer.rope for layer in written.layers] == [-1] * 8
    assert [layer.rope for layer in _spec("smollm3").layers] == [0, 0, 0, -1, 0, 0, 0, -1]
    spec = _spec("smollm3", no_rope_layers=[1, 0] * 4)
    assert [layer.rope for layer in spec.layers] == [0, -1] * 4


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16,
            "mscale": 0.7,
            "mscale_all_dim": 0.5,
        },
    ],
)
def test_rope_frequencies_equal_transformers(settings):
    settings = {**settings, "rope_theta": 10000.0}
    found = rope_kind(settings, 64, 512)
    config = AutoConfig.for_model(
        "llama", **{**SIZES, "hidden_size": 256}, rope_parameters=settings
    )
    if settings["rope_type"] == "default":
        expected = 1 / 10000 ** (np.arange(0, 64, 2) / 64)
        factor = 1.0
    else:
        tensor, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, "cpu")
        expected = tensor.numpy()
    np.testing.assert_allclose(found.frequencies, expected, rtol=1e-6)
    assert found.factor == pytest.approx(factor)


def test_a_bidirectional_window_is_centred():
    fields = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 4}
    spec = _spec("gemma3_text", use_bidirectional_attention=True, **fields)
    assert spec.bidirectional
    assert [(layer.window, layer.ahead) for layer in spec.layers[:2]] == [
        (257, 256),
        (0, spec.max_context),
    ]
    spec = _spec("gemma3_text", use_bidirectional_attention=False, **fields)
    assert not spec.bidirectional
    assert [(layer.window, layer.ahead) for layer in spec.layers[:2]] == [(512, 0), (0, 0)]


@pytest.mark.parametrize("value", ["x", None, math.nan, -1, math.inf, True, []])
def test_eps_must_be_a_number(value):
    with pytest.raises(ModelFormatError, match=r"rms_norm_eps=.* must be a number from 0 to 1"):
        _spec("llama", rms_norm_eps=value)


def test_null_and_zero_windows_mean_none():
    spec = _spec(
        "gemma2",
        sliding_window=None,
        layer_types=["full_attention"] * 8,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    )
    assert (spec.softcap, spec.logit_cap) == (0.0, 0.0)
    assert {layer.window for layer in spec.layers} == {0}
    assert {layer.window for layer in _spec("mistral", sliding_window=None).layers} == {0}


LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [3.0] * 8,
}


@pytest.mark.parametrize("extra", [{}, {"factor": 3.0}, {"attention_factor": 1.5}])
@pytest.mark.parametrize(("longest", "original"), [(512, 64), (64, 64), (64, 512)])
def test_longrope_uses_its_short_range(extra, longest, original):
    settings = {**LONG, **extra, "original_max_position_embeddings": original}
    sizes = {**SIZES, "max_position_embeddings": longest}
    spec = describe_model({"model_type": "llama", **sizes, "rope_parameters": settings})
    config = AutoConfig.for_model(
        "llama", **sizes, rope_parameters={**settings, "rope_theta": 10000.0}
    )
    assert_longrope(spec, config, min(longest, original))


def assert_longrope(spec, config, length):
    """Assert that the RoPE equals that of transformers' config and that the context has this
    length.
    """
    tensor, factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")
    np.testing.assert_allclose(spec.ropes[0].frequencies, tensor.numpy(), rtol=1e-6)
    assert spec.ropes[0].factor == pytest.approx(factor)
    assert spec.max_context == length


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("original", [64, None])
def test_phi3_longrope_names_and_length(name, original):
    """The original length is a key next to the RoPE settings. Without it, 4096 applies."""
    settings = {**{key: value for key, value in LONG.items() if key != "rope_type"}, "type": name}
    outer = {} if original is None else {"original_max_position_embeddings": original}
    sizes = {**SIZES, "max_position_embeddings": 8192}
    spec = describe_model({"model_type": "phi3", **sizes, **outer, "rope_scaling": settings})
    config = AutoConfig.for_model(
        "phi3", pad_token_id=0, **sizes, **outer, rope_scaling={**settings, "type": "longrope"}
    )
    assert_longrope(spec, config, original or 4096)


def test_ministral3_scales_queries_by_position():
    scale = _spec("ministral3").query_scale
    assert (scale.beta, scale.length) == (0.1, 16384)
    factors = scale.factors(40000)
    assert factors.dtype == np.float32
    for position in (0, 16383, 16384, 32767, 32768, 39999):
        expected = 1 + 0.1 * math.log(1 + position // 16384)
        assert factors[position] == np.float32(expected)
    assert np.array_equal(scale.factors(16385), factors[:16385])
    for name, value in (("llama_4_scaling_beta", None), ("original_max_position_embeddings", -4)):
        rope = {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
            name: value,
        }
        with pytest.raises(ModelFormatError, match=name):
            _spec("ministral3", rope_parameters=rope)


def test_hunyuans_dynamic_rope_is_static_with_an_alpha():
    rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    spec = _spec("hunyuan_v1_dense", head_dim=128, rope_theta=10000.0, rope_scaling=rope)
    base = 10000.0 * 1000.0 ** (128 / 126)
    assert spec.ropes[0].frequencies[1] == pytest.approx(base ** (-2 / 128), rel=1e-6)
    assert spec.max_context == 512
    assert (
        pinned_context(
            {
                "model_type": "hunyuan_v1_dense",
                "original_max_position_embeddings": 64,
                "rope_scaling": rope,
            }
        )
        is None
    )
    with pytest.raises(ModelFormatError, match="'dynamic' is not supported"):
        _spec("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "factor": 2.0})
    for change, message in (
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"rope_theta": "x"}, "rope_theta='x'"),
    ):
        with pytest.raises(ModelFormatError, match=message):
            _spec("hunyuan_v1_dense", rope_scaling={**rope, **change})
    with pytest.raises(ModelFormatError, match="head_dim=2 must be above 2"):
        _spec("hunyuan_v1_dense", head_dim=2, rope_scaling=rope)


def test_granite_4_rope_follows_the_config():
    dense = {
        "layer_types": ["attention"] * 8,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
    }
    assert {layer.rope for layer in _spec("granitemoehybrid", **dense).layers} == {-1}
    rope = _spec("granitemoehybrid", **dense, position_embedding_type="rope")
    assert {layer.rope for layer in rope.layers} == {0}
    assert rope.hybrid is None
    with pytest.raises(ModelFormatError, match="position_embedding_type='alibi' is not supported"):
        _spec("granitemoehybrid", **dense, position_embedding_type="alibi")


def test_rope_bases_per_layer():
    spec = _spec("granite_swa", layer_rope_theta=[1e4, 0, 1e6, 1e4] * 2)
    assert [layer.rope for layer in spec.layers] == [0, -1, 1, 0] * 2
    assert [layer.window for layer in spec.layers] == [0, 128, 128, 128] * 2
    assert {layer.rope for layer in _spec("granite_swa", layer_rope_theta=[0] * 8).layers} == {-1}
    assert {layer.rope for layer in _spec("granite_swa", layer_rope_theta=None).layers} == {0}
    for thetas, message in (
        ([1e4] * 7, "for each of the 8 layers"),
        ([-1.0] * 8, "layer_rope_theta=-1.0"),
    ):
        with pytest.raises(ModelFormatError, match=message):
            _spec("granite_swa", layer_rope_theta=thetas)


@pytest.mark.parametrize("model_type", ["gemma3_text", "olmo3"])
def test_a_single_rope_for_a_family_with_two_is_refused(model_type):
    """Flat RoPE settings raise an error. The package once ignored them and used the defaults."""
    flat = {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0}
    for settings in (flat, {**flat, "full_attention": flat}, [flat], {"full_attention": 3.0}):
        with pytest.raises(ModelFormatError, match="full_attention and sliding_attention"):
            _spec(model_type, rope_parameters=settings)
    full = _spec(model_type, rope_parameters={"full_attention": flat})
    assert full.ropes[1] == _spec(model_type).ropes[1]
    assert full.ropes[0].frequencies[0] == 0.125
