"""Supported architectures: runners, tests, and the reasons why the rest is refused."""

import json
import warnings

import pytest
from gguf import MODEL_ARCH_NAMES
from transformers import LlamaConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from helpers.gguf.hybrids import HYBRID_ARCHS, HYBRID_FAMILIES
from helpers.gguf.writer import ARCHS
from helpers.gguf.writer import FAMILIES as GGUF_FAMILIES
from helpers.models.hybrid_models import HYBRID_NESTED, HYBRIDS
from helpers.models.tiny_models import FAMILIES, NESTED
from helpers.raising import assert_raises
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config import architectures
from kvboost_edge.models.config.architectures import (
    SUPPORTED_ARCHITECTURES,
    PinnedContext,
    check_model_compatibility,
    pinned_context,
)
from kvboost_edge.models.config.json_readers import read_config
from kvboost_edge.models.families.registry import ARCHITECTURES as GGUF
from kvboost_edge.models.families.registry import ASSISTANTS, WRAPPERS
from kvboost_edge.models.families.registry import FAMILIES as NATIVE


@pytest.fixture(autouse=True)
def forget_warnings():
    architectures._warn_once.cache_clear()


def test_tested_families_are_those_of_the_suite():
    alone = {**FAMILIES, **HYBRIDS}
    in_suite = {
        str(fields.get("model_type", name)).partition("-")[0] for name, fields in alone.items()
    }
    nested = {**NESTED, **HYBRID_NESTED}
    in_suite |= {
        part for name, (text, _, _) in nested.items() for part in (name.partition("-")[0], text)
    }
    in_suite.add("minicpm")  # missing in transformers: tests/runners/native/test_minicpm.py
    assert in_suite == {name for name, known in SUPPORTED_ARCHITECTURES.items() if known.tested}


def _names(runner="", files="", *, tested=True):
    """Return the families that a runner computes, or that are read from such files."""
    return {
        name
        for name, known in SUPPORTED_ARCHITECTURES.items()
        if known.tested is tested and (runner in known.runners or files in known.files)
    }


def test_listed_runners_support_the_family():
    whole = {name for name, wrapper in WRAPPERS.items() if set(wrapper.texts) <= set(NATIVE)}
    assert _names("native") == {*NATIVE, *whole}
    assert _names("torch") == {
        str(fields.get("model_type", name)).partition("-")[0] for name, fields in FAMILIES.items()
    }
    assert _names("native", tested=False) == set()


def test_listed_gguf_architectures_are_read_and_tested():
    read = {known.model_type for known in GGUF.values()} - set(ASSISTANTS)
    archs = {**ARCHS, **HYBRID_ARCHS}
    assert _names(files="GGUF") == read | set(archs)
    # EmbeddingGemma's is Gemma 3's with bidirectional attention and gives vectors only; Nemotron-H
    # has two; gguf does not know that of assistants.
    assert {MODEL_ARCH_NAMES[arch] for arch in archs.values()} == set(GGUF) - {
        "gemma-embedding",
        "gemma4-assistant",
        "nemotron_h_moe",
    }
    types = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
    compared = {
        name.partition("-")[0] for name in (*GGUF_FAMILIES, *HYBRID_FAMILIES)
    }  # measured by make bench-peers
    assert {types.get(name, name) for name in compared} == set(archs)


@pytest.mark.parametrize(
    ("name", "proof"),
    [
        ("qwen3", "transformers; llama.cpp (GGUF)"),
        ("stablelm", "transformers"),
        ("minicpm", "a NumPy model; llama.cpp (GGUF)"),
        ("gpt_oss", "transformers; llama.cpp (GGUF)"),
        ("seed_oss", "nothing"),
    ],
)
def test_the_proof_of_each_family(name, proof):
    assert SUPPORTED_ARCHITECTURES[name].proof == proof


@pytest.mark.parametrize("model_type", sorted(SUPPORTED_ARCHITECTURES))
def test_listed_families_are_causal_models_of_transformers(model_type):
    alone = {"model_type": model_type}
    if model_type in WRAPPERS:
        assert model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        alone["text_config"] = {}
    elif model_type != "minicpm" and model_type not in {
        text for wrapper in WRAPPERS.values() for text in wrapper.texts
    }:
        assert model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    report = check_model_compatibility(alone, strict=False)
    assert report.supported
    assert report.tested == SUPPORTED_ARCHITECTURES[model_type].tested


REFUSED = {
    "encoder-decoder": ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
    "state space": ({"model_type": "mamba"}, "this kind of recurrent state is not supported"),
    "gemma 3n": ({"model_type": "gemma3n"}, "several streams of hidden states"),
    "hybrid": ({"model_type": "jamba"}, "recurrent state"),
    "known states": (
        {"model_type": "qwen3_next"},
        "its kind of recurrent state is supported, but not this arrangement",
    ),
    "states alone": ({"model_type": "mamba2"}, "models without attention layers"),
    "decays by channel": ({"model_type": "kimi_linear"}, "a decay per channel"),
    "head gates": ({"model_type": "lfm3"}, "gates per head"),
    "hyper-connections": ({"model_type": "qwen4_exp"}, "several streams"),
    "ALiBi": ({"model_type": "bloom"}, "ALiBi"),
    "own attention": ({"model_type": "gptj"}, "in its own modules"),
    "Falcon of 2023": ({"model_type": "falcon"}, "Falcon models of 2023 use LayerNorm"),
    "Falcon-7B's first name": (
        {"model_type": "RefinedWebModel", "auto_map": {"AutoModelForCausalLM": "code.New"}},
        "parallel attention and MLP",
    ),
    "Falcon-40B's first name": ({"model_type": "RefinedWeb"}, "Falcon-H1 are"),
    "latent": ({"model_type": "deepseek_v3"}, "latent"),
    "GLM-4.7-Flash": ({"model_type": "glm4_moe_lite"}, "latent"),
    "latent with code": (
        {"model_type": "kimi_k2", "auto_map": {"AutoModelForCausalLM": "code.New"}},
        "latent",
    ),
    "latent, with an unknown name": (
        {"model_type": "no_such_model", "kv_lora_rank": 512},
        "latent",
    ),
    "latent inside": ({"model_type": "kimi_k25", "text_config": {"kv_lora_rank": 512}}, "latent"),
    "unknown": ({"model_type": "no_such_model"}, "no_such_model"),
    "remote code": (
        {"model_type": "new", "auto_map": {"AutoModelForCausalLM": "code.New"}},
        "code.New",
    ),
    "quantized": (
        {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
        "quantization is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_refused_with_the_reason(name):
    config, reason = REFUSED[name]
    with pytest.raises(ModelFormatError, match=reason):
        check_model_compatibility(config)
    report = check_model_compatibility(config, strict=False)
    assert not report.supported
    assert not report.tested
    assert reason in f"{report.model_type} {report.reason}"


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "llama3"},
        {"rope_type": "yarn"},
        {"rope_type": "default"},
        {"rope_type": "longrope", "original_max_position_embeddings": 4096},
        {"rope_type": "dynamic", "factor": 2.0},
        None,
    ],
)
def test_length_independent_rope_covers_the_whole_context(rope):
    config = {"model_type": "llama", "rope_scaling": rope, "max_position_embeddings": 4096}
    report = check_model_compatibility(config)
    assert (report.supported, report.reason) == (True, "")


@pytest.mark.parametrize(
    ("config", "rope_type", "length"),
    [
        (
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096},
            "longrope",
            4096,
        ),
        (
            {
                "model_type": "phi3",
                "rope_scaling": {"type": "yarn"},
                "original_max_position_embeddings": 4096,
            },
            "longrope",
            4096,
        ),
        (
            {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096},
            "longrope",
            4096,
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
            "longrope",
            64,
        ),
        (
            {"rope_scaling": {"type": "dynamic", "original_max_position_embeddings": 64}},
            "dynamic",
            64,
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "dynamic",
                        "original_max_position_embeddings": 99,
                    },
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            "dynamic",
            99,
        ),
        (
            {
                "text_config": {
                    "rope_scaling": {"rope_type": "longrope"},
                    "original_max_position_embeddings": 80,
                    "max_position_embeddings": 131072,
                }
            },
            "longrope",
            80,
        ),
    ],
)
def test_length_dependent_rope_limits_the_context(config, rope_type, length):
    config = {"model_type": "llama", "max_position_embeddings": 131072, **config}
    assert pinned_context(config) == PinnedContext(rope_type, length)
    report = check_model_compatibility(config)
    assert report.supported
    assert report.tested
    assert f"limited to {length} tokens" in report.reason
    assert rope_type in report.reason


@pytest.mark.parametrize("length", [0, -1, "4096", 4096.0, True])
def test_an_invalid_rope_length_is_refused(length):
    rope = {"type": "longrope", "original_max_position_embeddings": length}
    with pytest.raises(ModelFormatError, match="original_max_position_embeddings="):
        check_model_compatibility({"model_type": "llama", "rope_scaling": rope})


def test_remote_code_of_a_known_family_is_ignored():
    config = {
        "model_type": "phi3",
        "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    }
    assert check_model_compatibility(config).tested


def test_untested_warns_once_and_only_when_strict():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = check_model_compatibility({"model_type": "cohere"}, strict=False)
    assert report.supported
    assert not report.tested
    with pytest.warns(UserWarning, match="cohere"):
        check_model_compatibility({"model_type": "cohere"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_model_compatibility({"model_type": "cohere"})


def test_takes_a_directory_a_config_or_a_model(tiny_model_dir):
    class Model:
        config = LlamaConfig()

    for model in (tiny_model_dir, str(tiny_model_dir), LlamaConfig(), Model()):
        assert check_model_compatibility(model).model_type == "llama"


@pytest.mark.parametrize("model", [{}, {"model_type": ""}, {"model_type": 3}, 3, object()])
def test_invalid_models_are_refused(model):
    with pytest.raises(ModelFormatError):
        check_model_compatibility(model)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"model_type": "t5", "is_encoder_decoder": True, "d_model": 8, "num_layers": 1},
            "encoder-decoder",
        ),
        ({"model_type": "mamba", "hidden_size": 8}, "recurrent state"),
    ],
)
def test_an_unsupported_directory_is_refused_with_the_reason(tmp_path, config, reason):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_raises(ModelFormatError, reason, check_model_compatibility, tmp_path)
    assert_raises(ModelFormatError, reason, check_model_compatibility, read_config(tmp_path))


def test_a_directory_without_config_is_refused(tmp_path):
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        check_model_compatibility(tmp_path)
