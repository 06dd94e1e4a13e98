"""Hybrid models from their files to packed tensors: a float64 model of the packed tensors equals
transformers.
"""

import numpy as np
import pytest
import torch

from helpers.distance import distance
from helpers.gguf.writer import write_gguf
from helpers.models.hybrid_models import HYBRIDS
from helpers.models.specs import spec_of
from helpers.models.tensor_files import change_tensors, tensors_of
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.oracles.packed_plan import hybrid_logits, plan_floats
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.packed.pack_plan import pack_plan

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TOKENS = np.random.default_rng(5).integers(0, 256, 70).tolist()


def _of_transformers(model):
    with torch.inference_mode():
        return np.asarray(
            model(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy(), dtype=np.float64
        )


def assert_packed_equals(name, directory, **fields):
    """Assert that the packed tensors give the logits of transformers, and return those."""
    spec, weights = plan_floats(save_tiny_model(name, directory, **fields))
    expected = _of_transformers(build_tiny_model(name, **fields))
    assert distance(hybrid_logits(spec, weights, TOKENS), expected) < 1e-5
    return expected


@pytest.mark.parametrize("name", HYBRIDS)
def test_packed_tensors_equal_transformers(name, tmp_path):
    assert_packed_equals(name, tmp_path)


# Time steps are clipped in one pass, as in transformers, which does not clip them token by token.
SAID = {
    "limits of time": ("granitemoehybrid-groups", {"time_step_limit": (0.3, 0.6)}, 1e-2),
    "shares as they are": ("nemotron_h-moe", {"norm_topk_prob": False}, 1e-3),
}


@pytest.mark.parametrize("said", SAID)
def test_config_options_are_computed(said, tmp_path):
    name, fields, least = SAID[said]
    expected = assert_packed_equals(name, tmp_path, **fields)
    assert distance(expected, _of_transformers(build_tiny_model(name))) > least


def test_experts_without_a_bias_are_read(tmp_path):
    """The file then has no tensor for it."""
    assert_packed_equals("lfm2_moe", tmp_path, use_expert_bias=False)
    assert not [name for name in tensors_of(tmp_path) if "expert_bias" in name]


@pytest.mark.parametrize("name", ["granitemoehybrid-h", "qwen3_5_text"])
def test_the_gates_of_mixers_stay_floats(name, tmp_path):
    plan = pack_plan(spec_of(save_tiny_model(name, tmp_path)), "int4")
    kinds = {entry.name: entry.kind for entry in plan}
    assert (kinds["layer0.mixer_gates"], kinds["layer0.mixer_in"]) == ("f32", "int4")


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1", "Q4_K", "IQ4_NL"])
def test_any_range_of_query_and_gate_rows_is_read(kind, tmp_path):
    wide = {"hidden_size": 256, "intermediate_size": 512, "linear_key_head_dim": 32}
    path = write_gguf(
        save_tiny_model("qwen3_5_text", tmp_path / "model", **wide), tmp_path / "m.gguf", kind=kind
    )
    name = "model.layers.2.self_attn.{}.weight"
    with Checkpoint.open(path).open_source() as ours, Checkpoint.open(path)._open_files() as files:
        assert ours.names() - files.names() == {
            name.format("output_gate"),
            name.format("output_gate").replace("2", "4"),
        }
        stored = files.rows(name.format("q_proj")).reshape(4, 2, 32, 256)
        for at, part in enumerate(("q_proj", "output_gate")):
            expected = stored[:, at].reshape(128, 256)
            assert ours.shape(name.format(part)) == (128, 256)
            for start, stop in ((0, 128), (5, 70), (127, 128)):
                np.testing.assert_array_equal(
                    ours.rows(name.format(part), start, stop), expected[start:stop]
                )
                if kind != "F32":
                    found = ours.quant_rows(name.format(part), start, stop)
                    whole = files.quant_rows(name.format("q_proj"), 0, 256)
                    codes = whole.codes.reshape(4, 2, 32, -1)[:, at].reshape(128, -1)
                    scales = whole.scales.reshape(4, 2, 32, -1)[:, at].reshape(128, -1)
                    np.testing.assert_array_equal(found.codes, codes[start:stop])
                    np.testing.assert_array_equal(found.scales, scales[start:stop])
            with pytest.raises(ModelFormatError, match="rows 100 to 129 are out of range"):
                ours.rows(name.format(part), 100, 129)


TENSORS = {
    "a tap too many": (
        "lfm2",
        {"model.layers.2.conv.conv.weight": np.ones((64, 1, 4), np.float32)},
        r"conv.weight' has shape \(64, 1, 4\), but the config gives 3 taps per channel",
    ),
    "another shape": (
        "qwen3_5_text",
        {"model.layers.1.linear_attn.conv1d.weight": np.ones((192, 2, 4), np.float32)},
        r"has shape \(192, 2, 4\), but the config gives 4 taps per channel",
    ),
    "too few channels": (
        "qwen3_5_text",
        {"model.layers.1.linear_attn.conv1d.weight": np.ones((191, 1, 4), np.float32)},
        r"conv1d.weight' has shape \(764,\), expected \(768,\)",
    ),
    "a decay that overflows": (
        "qwen3_5_text",
        {"model.layers.1.linear_attn.A_log": np.full(4, 200, np.float32)},
        "linear_attn.decay' in .* holds NaN or infinity",
    ),
    "no decay": (
        "qwen3_5_text",
        {"model.layers.1.linear_attn.A_log": None},
        "lack tensor 'model.layers.1.linear_attn.decay'",
    ),
    "a convolution where the config says attention": (
        "lfm2",
        {"model.layers.1.conv.in_proj.weight": np.ones((192, 64), np.float32)},
        "model.layers.1.conv.in_proj.weight' is not supported by the native runner",
    ),
    "steps of time that are missing": (
        "granitemoehybrid-h",
        {"model.layers.0.mamba.in_proj.weight": np.ones((288, 64), np.float32)},
        r"mamba.in_proj.weight' has 288 rows, but the config gives 292",
    ),
    "no skip": (
        "granitemoehybrid-h",
        {"model.layers.0.mamba.D": None},
        "lack tensor 'model.layers.0.mamba.D'",
    ),
    "a bias that the config has not": (
        "granitemoehybrid-groups",
        {"model.layers.1.mamba.conv1d.bias": np.ones(256, np.float32)},
        "mamba.conv1d.bias' is not supported by the native runner",
    ),
    "a norm of one head": (
        "granitemoehybrid-h",
        {"model.layers.0.mamba.norm.weight": np.ones(32, np.float32)},
        r"mamba.norm.weight' has shape \(32,\), expected \(128,\)",
    ),
    "a shared MLP of another width": (
        "granitemoehybrid-experts",
        {"model.layers.0.shared_mlp.input_linear.weight": np.ones((190, 64), np.float32)},
        r"shared_mlp.input_linear.weight' has 190 rows, but the config gives 192",
    ),
    "an expert too many": (
        "lfm2_moe",
        {
            f"model.layers.3.feed_forward.experts.12.{part}.weight": np.ones(shape, np.float32)
            for part, shape in (("w1", (64, 64)), ("w2", (64, 64)), ("w3", (64, 64)))
        },
        "belongs to expert 12, but the layers have experts 0 to 11",
    ),
    "an expert missing": (
        "lfm2_moe",
        {"model.layers.3.feed_forward.experts.11.w2.weight": None},
        r"experts\.11\.w2",
    ),
    "queries without gates": (
        "qwen3_5_text",
        {"model.layers.2.self_attn.q_proj.weight": np.ones((160, 64), np.float32)},
        "has 160 rows, which do not fit queries and gates of heads of size 32",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_mismatched_tensors_are_refused(name, tmp_path):
    family, change, message = TENSORS[name]
    change_tensors(save_tiny_model(family, tmp_path), change)
    with pytest.raises(ModelFormatError, match=message):
        plan_floats(tmp_path)
