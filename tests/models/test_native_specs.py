"""Configs read into specs: the defaults of each family, rope kinds, and what is refused with its reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families import FAMILIES, describe_model
from kvboost_edge.models.rope_kinds import rope_kind

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def _spec(model_type: str, **fields: Any) -> Any:
    return describe_model({"model_type": model_type, **SIZES, **fields})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """A config.json that leaves out what equals the default means the same here as there."""
    extra = {"head_dim": 32} if model_type == "mistral" else {}
    config = AutoConfig.for_model(model_type, pad_token_id=0, **SIZES, **extra)
    spec = _spec(model_type, **extra)
    assert spec.eps == config.rms_norm_eps
    assert spec.tied == config.tie_word_embeddings
    assert spec.head_dim == (getattr(config, "head_dim", None) or 16)
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or 0
    if types:
        assert [layer.window for layer in spec.layers] == [window * (t == "sliding_attention") for t in types]
    else:
        assert {layer.window for layer in spec.layers} == {window}
    for written in (config.to_dict(), config.to_diff_dict()):
        assert describe_model({**written, "model_type": model_type}) == spec


def test_older_config_keys() -> None:
    old = _spec("llama", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = _spec("llama", rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0})
    assert old == new
    old = _spec("gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=6)
    assert old == _spec("gemma3_text")
    assert [layer.rope for layer in old.layers] == [1, 1, 1, 1, 1, 0, 1, 1]


def test_layers_without_rope() -> None:
    assert [layer.rope for layer in _spec("smollm3").layers] == [0, 0, 0, -1, 0, 0, 0, -1]
    spec = _spec("smollm3", no_rope_layers=[1, 0] * 4)
    assert [layer.rope for layer in spec.layers] == [0, -1] * 4


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16, "mscale": 0.7,
         "mscale_all_dim": 0.5},
    ],
)  # fmt: skip
def test_rope_frequencies_equal_transformers(settings: dict[str, Any]) -> None:
    settings = {**settings, "rope_theta": 10000.0}
    found = rope_kind(settings, 64, 512)
    config = AutoConfig.for_model("llama", **{**SIZES, "hidden_size": 256}, rope_parameters=settings)
    if settings["rope_type"] == "default":
        expected, factor = 1 / 10000 ** (np.arange(0, 64, 2) / 64), 1.0
    else:
        tensor, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, "cpu")
        expected = tensor.numpy()
    np.testing.assert_allclose(found.frequencies, expected, rtol=1e-6)
    assert found.factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("mixtral", {}, "mixtral"),
        ("llama", {"hidden_act": "relu"}, "relu"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 8}, "layer_types"),
        ("gemma2", {"layer_types": ["full_attention"] * 7}, "layer_types"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("granite", {"logits_scaling": 0}, "logits_scaling"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope settings"),
    ],
)
def test_what_is_not_known_is_refused_with_the_reason(model_type: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        _spec(model_type, **fields)
