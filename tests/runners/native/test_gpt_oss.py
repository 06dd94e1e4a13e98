"""gpt-oss: all logits against transformers around window and block boundaries, and equal results
from all file formats.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.distance import distance
from helpers.gguf.experts import dequantized
from helpers.gguf.writer import write_gguf
from helpers.models.gpt_oss_files import ROPE, save_gpt_oss
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.oracles.gpt_oss import GptOssOracle
from helpers.oracles.transformers_logits import driver_of
from helpers.random_ids import random_ids
from helpers.runners.logits import dense_logits, native_logits
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.families.moe import ExpertNames, Experts
from kvboost_edge.runners.native.runner import NativeRunner

WINDOW = 24
BLOCK = 16
PROMPT = random_ids(100, 7)


@pytest.mark.usefixtures("one_torch_thread")
def test_logits_around_window_and_block_borders_equal_transformers(tmp_path):
    save_tiny_model("gpt_oss", tmp_path)
    model = build_tiny_model("gpt_oss")
    model.set_attn_implementation("eager")
    assert model.config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    runner = NativeRunner.from_dir(tmp_path, weights="f32")
    driver = driver_of(runner)
    for length in (
        1,
        BLOCK - 1,
        BLOCK,
        BLOCK + 1,
        WINDOW - 1,
        WINDOW,
        WINDOW + 1,
        WINDOW + BLOCK,
        100,
    ):
        expected = dense_logits(model, PROMPT[:length])
        sequence = driver.open(PROMPT[:length])
        first = sequence.table.num_cached_tokens
        found = driver.prefill(sequence, 13)
        assert distance(found, expected[first:]) <= 1e-4, length
        driver.close(sequence)
    runner.close()


def _transformers(directory):
    """Compute the logits of PROMPT with transformers for a directory that save_gpt_oss wrote, with
    MXFP4 as floats.
    """
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    settings = AutoConfig.for_model(config.pop("model_type"), **config)
    model = AutoModelForCausalLM.from_config(
        settings, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    state = {}
    for name, values in tensors.items():
        if name.endswith("_blocks"):
            values = dequantized(values, tensors[name.replace("_blocks", "_scales")]).swapaxes(1, 2)
        if not name.endswith("_scales"):
            state[name.removesuffix("_blocks")] = torch.from_numpy(np.ascontiguousarray(values))
    model.load_state_dict(state)
    return dense_logits(model, PROMPT)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("mxfp4", [False, True])
def test_synthetic_checkpoints_equal_transformers(mxfp4, tmp_path):
    """The native runner and the float64 oracle both equal transformers on the checkpoints that
    other tests use.
    """
    save_gpt_oss(tmp_path, mxfp4=mxfp4)
    expected = _transformers(tmp_path)
    for found in (
        native_logits(tmp_path, "f32", PROMPT, 100),
        GptOssOracle(tmp_path, "f32").logits(PROMPT),
    ):
        assert distance(found, expected) <= 1e-4


@pytest.mark.parametrize("weights", ["int8", "int4", "auto"])
def test_formats_are_close_to_numpy_on_the_same_weights(weights, tmp_path):
    """Most rows are close. Rounded activations send some tokens to another expert with nearly the
    same share. Measured medians are 1.9e-2 to 2.3e-2, with weights that make gates large.
    """
    save_gpt_oss(tmp_path, mxfp4=weights == "auto")
    found = native_logits(tmp_path, weights, PROMPT, 31)
    expected = GptOssOracle(tmp_path, weights).logits(PROMPT)
    apart = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(apart) <= 3e-2
    assert (apart <= 8e-2).mean() >= 0.75


@pytest.mark.parametrize("weights", ["auto", "f32", "int4"])
def test_mxfp4_of_safetensors_and_gguf_is_equal(weights, tmp_path):
    """A GGUF file orders nibbles and rows differently and uses other names, but gives the same
    bits.
    """
    model = save_gpt_oss(tmp_path / "model", mxfp4=True, rope_parameters=ROPE)
    path = write_gguf(
        model, tmp_path / "m.gguf", kind=lambda name: "MXFP4" if "_exps" in name else "F32"
    )
    specs = [describe_model(Checkpoint.open(each).config) for each in (path, model)]
    for field in specs[0].__dataclass_fields__:
        assert getattr(specs[0], field) == getattr(specs[1], field), field
    found, expected = (native_logits(each, weights, PROMPT, 100) for each in (path, model))
    np.testing.assert_array_equal(found, expected)


def test_yarn_borders_are_not_rounded(tmp_path):
    """GGUF files cannot store this setting. The frequencies equal transformers'; rounded bounds
    would give others.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = save_gpt_oss(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](
        AutoConfig.for_model(config.pop("model_type"), **config), "cpu"
    )
    for path in (model, write_gguf(model, tmp_path / "m.gguf")):
        (rope,) = describe_model(Checkpoint.open(path).config).ropes
        np.testing.assert_allclose(rope.frequencies, expected.numpy(), rtol=1e-6)
        assert rope.factor == pytest.approx(factor)
    rounded = describe_model(
        {**Checkpoint.open(model).config, "rope_parameters": {**ROPE, "truncate": True}}
    )
    assert not np.allclose(rounded.ropes[0].frequencies, expected.numpy(), rtol=1e-3)


def test_the_published_20b_config_is_read():
    """The config is the makers' original one, with the older RoPE keys."""
    kinds = ["sliding_attention", "full_attention"]
    config = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": kinds * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "rope_type": "yarn",
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }
    expected = AutoConfig.for_model("gpt_oss", num_hidden_layers=24, num_local_experts=32).to_dict()
    assert describe_model(config) == describe_model(expected)
    assert describe_model(config).experts == Experts(
        32,
        4,
        2880,
        (True,) * 24,
        ExpertNames("mlp.router"),
        score="chosen",
        biased=True,
        activation="clamped_swiglu",
    )


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0"])
def test_incomplete_files_are_refused(kind, tmp_path):
    model = save_gpt_oss(tmp_path / "model")
    for name in ("attn_sinks.weight", "ffn_up_exps.bias", "ffn_gate_inp.bias"):
        path = write_gguf(model, tmp_path / "m.gguf", kind=kind, more={f"blk.1.{name}": None})
        with pytest.raises(ModelFormatError, match=r"lacks tensor 'model\.layers\.1\."):
            NativeRunner.from_dir(path, weights="auto")


def test_biases_for_another_number_of_experts_are_refused(tmp_path):
    model = save_gpt_oss(tmp_path / "model")
    for count, message in (
        (5, r"lacks tensor .*experts\.5\.up_proj\.bias"),
        (7, "belongs to expert 6, but the layers have"),
    ):
        more = {"blk.1.ffn_up_exps.bias": np.ones((count, 96), np.float32)}
        path = write_gguf(model, tmp_path / "m.gguf", more=more)
        with pytest.raises(ModelFormatError, match=message):
            NativeRunner.from_dir(path, weights="f32")
