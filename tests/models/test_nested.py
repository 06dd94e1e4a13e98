"""Models of several parts: the nested language model equals transformers' own, and contradictions
are refused.
"""

import json
import logging

import pytest

from helpers.models.specs import spec_of
from helpers.models.tensor_files import change_tensors, tensors_of
from helpers.models.tiny_models import NESTED, build_nested_model, save_nested_model
from helpers.oracles.transformers_logits import assert_native_equals
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource
from kvboost_edge.runners.native.runner import NativeRunner

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def _change(directory, change, text=None):
    """Change fields of the config and of its text_config; None removes a field."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for part, fields in ((config, change), (config.get("text_config"), text or {})):
        for name, value in fields.items():
            part.pop(name, None)
            if value is not None:
                part[name] = value
    path.write_text(json.dumps(config))
    return directory


def _rename(directory, **prefixes):
    """Rename prefixes of tensors in the file; "__" stands for "."."""

    def rename(tensors):
        for name in list(tensors):
            for old, new in prefixes.items():
                if name.startswith(old.replace("__", ".")):
                    tensors[new + name.removeprefix(old.replace("__", "."))] = tensors.pop(name)
                    break

    change_tensors(directory, rename)


@pytest.mark.parametrize("name", NESTED)
def test_the_language_model_equals_transformers(name, tmp_path, caplog):
    save_nested_model(name, tmp_path)
    with caplog.at_level(logging.INFO, "kvboost_edge"):
        assert_native_equals(build_nested_model(name), tmp_path)
    parts = Checkpoint.open(tmp_path).unused_parts
    assert sum(parts.values()) > 5
    said = ", ".join(f"{part} ({count})" for part, count in sorted(parts.items()))
    assert f"text only; tensors of {said} are not used" in caplog.text


@pytest.mark.parametrize("tied", [True, False])
def test_contradictory_tie_settings_follow_the_file(tied, tmp_path):
    save_nested_model("qwen3_vl", tmp_path, tie_word_embeddings=tied)
    for outer, inner in ((not tied, tied), (tied, not tied), (None, tied), (None, None)):
        _change(tmp_path, {"tie_word_embeddings": outer}, {"tie_word_embeddings": inner})
        assert spec_of(tmp_path).tied == tied
    assert_native_equals(build_nested_model("qwen3_vl", tie_word_embeddings=tied), tmp_path)


def test_older_tensor_names_are_read(tmp_path):
    save_nested_model("qwen3_vl", tmp_path)
    _rename(
        tmp_path,
        model__language_model__="language_model.model.",
        lm_head__="language_model.lm_head.",
        model__visual__="visual.",
    )
    with SafetensorsSource(tmp_path) as source:
        assert "lm_head.weight" in source.names()
        assert not [name for name in source.names() if "visual" in name or "language_model" in name]
    assert_native_equals(build_nested_model("qwen3_vl"), tmp_path)


REFUSED = {
    "two widths": ({"hidden_size": 128}, {}, "hidden_size=128, but its text_config gives 64"),
    "two vocabularies": (
        {"vocab_size": 301},
        {},
        "vocab_size=301, but its text_config gives 300",
    ),
    "two ropes": (
        {"rope_theta": 1e4},
        {"rope_theta": 1e6},
        "rope_theta=10000.0, but its text_config gives ",
    ),
    "another language model": (
        {},
        {"model_type": "llama"},
        "of model_type='qwen3_vl' has model_type='llama'",
    ),
    "no language model": ({"text_config": None}, {}, "lacks the key 'text_config'"),
    "text for an object": ({"text_config": "qwen3"}, {}, "text_config='qwen3', not an object"),
    "no layers": ({}, {"num_hidden_layers": None}, "lacks the key 'num_hidden_layers'"),
    "damaged heads": ({}, {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradictory_nested_configs_are_refused(name, tmp_path):
    change, text, message = REFUSED[name]
    save_nested_model("qwen3_vl", tmp_path)
    _change(tmp_path, {}, text)
    _change(tmp_path, change)
    with pytest.raises(ModelFormatError, match=message):
        NativeRunner.from_dir(tmp_path, weights="f32")


def test_equal_sizes_in_both_configs_are_accepted(tmp_path):
    save_nested_model("qwen3_vl", tmp_path)
    expected = spec_of(tmp_path)
    _change(tmp_path, {"hidden_size": 64, "vocab_size": 300})
    assert spec_of(tmp_path) == expected


def test_a_duplicate_tensor_is_refused(tmp_path):
    save_nested_model("qwen3_vl", tmp_path)
    norm = tensors_of(tmp_path)["model.language_model.norm.weight"]
    change_tensors(tmp_path, {"model.norm.weight": norm})
    with pytest.raises(ModelFormatError, match=r"duplicates 'model\.norm\.weight'"):
        SafetensorsSource(tmp_path)


def test_unknown_model_parts_are_refused(tmp_path):
    save_nested_model("qwen3_vl", tmp_path)
    _rename(tmp_path, model__visual__="model.smell.")
    with pytest.raises(ModelFormatError, match=r"model\.smell\..*is not supported"):
        NativeRunner.from_dir(tmp_path, weights="f32")


def test_gemma3_defaults_apply(tmp_path):
    """The text_config of Gemma 3 4B sets only five fields."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = describe_model({"model_type": "gemma3", "text_config": text})
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (
        8,
        4,
        256,
        262208,
    )
    assert (spec.max_context, spec.tied, spec.ropes[0].frequencies[0]) == (131072, True, 0.125)
    assert [layer.window for layer in spec.layers[:6]] == [1024] * 5 + [0]
