"""Hybrid models from their files to packed tensors: a float64 model of the packed tensors equals
transformers.
"""

import numpy as np
import pytest
import torch

from helpers.distance import distance
from helpers.gguf.writer import write_gguf
from helpers.models.hybrid_models import HYBRID_NESTED, HYBRIDS
from helpers.models.tensor_files import change_tensors, tensors_of
from helpers.models.tiny_models import (
    build_nested_model,
    build_tiny_model,
    save_nested_model,
    save_tiny_model,
)
from helpers.oracles.packed_plan import hybrid_logits, plan_floats
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.families.mixers import Mixer
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


@pytest.mark.parametrize("name", HYBRID_NESTED)
def test_nested_hybrid_models_are_read(name, tmp_path):
    """The vision part and the layers that draft tokens are reported and not used."""
    save_nested_model(name, tmp_path)
    ahead = {
        f"mtp.{part}.weight": np.ones((4, 4), np.float32)
        for part in ("fc", "norm", "layers.0.self_attn.q_proj")
    }
    change_tensors(tmp_path, ahead)
    spec, weights = plan_floats(tmp_path)
    assert (
        distance(hybrid_logits(spec, weights, TOKENS), _of_transformers(build_nested_model(name)))
        < 1e-5
    )
    parts = Checkpoint.open(tmp_path).other_parts
    assert parts.pop("mtp") == 3
    assert set(parts) == (
        {"vision_tower", "multi_modal_projector"} if name == "lfm2_vl" else {"visual"}
    )


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("wrong", ["conv", "state", "gate", "rope"])
@pytest.mark.some(3)
def test_the_reference_detects_wrong_tensor_orders(name, wrong, tmp_path):
    """With tensors in a wrong order, the distance from transformers is far above the tolerance."""
    spec, weights = plan_floats(save_tiny_model(name, tmp_path))
    expected = hybrid_logits(spec, weights, TOKENS)
    mixer = spec.mixer
    assert mixer is not None
    for key, value in weights.items():
        if wrong == "conv" and key.endswith(".conv"):
            weights[key] = value.reshape(mixer.taps + 1, -1)[::-1].reshape(-1)
        elif wrong == "state" and key.endswith(".mixer_in"):
            rows = mixer.channels // 2 if mixer.kind == "conv" else mixer.key_dim
            weights[key] = np.concatenate([value[rows : 2 * rows], value[:rows], value[2 * rows :]])
        elif wrong == "gate" and key.endswith(".qkv"):
            half = len(value) // 2
            weights[key] = np.concatenate([value[half:], value[:half]])
        elif wrong == "rope" and key.endswith(".qkv"):
            weights[key] = np.roll(value, 1, axis=0)
    assert distance(hybrid_logits(spec, weights, TOKENS), expected) > 1e-2


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


# -- tensors --


def test_a_state_space_layers_packed_tensors(tmp_path):
    """The file's [z | x | B | C | dt] becomes [x | B | C | z] with dt as separate floats; gate and
    up come from one matrix.
    """
    save_tiny_model("granitemoehybrid-h", tmp_path)
    spec, weights = plan_floats(tmp_path)
    files = {name: tensor.astype(np.float64) for name, tensor in tensors_of(tmp_path).items()}
    layer = "model.layers.2.mamba."
    stored = files["model.layers.2.mamba.in_proj.weight"]
    assert stored.shape == (128 + 128 + 2 * 16 + 4, 64)
    np.testing.assert_array_equal(
        weights["layer2.mixer_in"], np.concatenate([stored[128:288], stored[:128]])
    )
    np.testing.assert_array_equal(weights["layer2.mixer_gates"], stored[288:])
    np.testing.assert_array_equal(
        weights["layer2.conv"], files[f"{layer}conv1d.weight"][:, 0].T.reshape(-1)
    )
    np.testing.assert_allclose(weights["layer2.decay"], -np.exp(files[f"{layer}A_log"]), rtol=1e-7)
    for name, own in (
        ("conv_bias", "conv1d.bias"),
        ("dt_bias", "dt_bias"),
        ("skip", "D"),
        ("mixer_norm", "norm.weight"),
        ("mixer_out", "out_proj.weight"),
    ):
        np.testing.assert_array_equal(weights[f"layer2.{name}"], files[layer + own])
    shared = files["model.layers.2.shared_mlp.input_linear.weight"]
    np.testing.assert_array_equal(weights["layer2.gate_up"], shared)
    kinds = {
        entry.name: entry.kind
        for entry in pack_plan(spec, "int4")
        if entry.name.startswith("layer2.")
    }
    assert (kinds["layer2.mixer_gates"], kinds["layer2.mixer_in"]) == ("f32", "int4")


def test_a_convolution_layers_packed_tensors(tmp_path):
    save_tiny_model("lfm2", tmp_path)
    spec, weights = plan_floats(tmp_path)
    files = tensors_of(tmp_path)
    assert [layer.kv for layer in spec.layers] == [-1, 0, -1, 1, -1]
    assert [layer.state for layer in spec.layers] == [0, -1, 1, -1, 2]
    assert spec.mixer is not None
    assert (spec.mixer.kind, spec.mixer.taps, spec.mixer.channels) == ("conv", 2, 64)
    kernel = files["model.layers.2.conv.conv.weight"]
    assert kernel.shape == (64, 1, 3)
    np.testing.assert_array_equal(weights["layer2.conv"], kernel[:, 0].T.reshape(-1))
    for name, stored in (
        ("mixer_in", "conv.in_proj"),
        ("mixer_out", "conv.out_proj"),
        ("attn_in", "operator_norm"),
    ):
        np.testing.assert_array_equal(
            weights[f"layer2.{name}"], files[f"model.layers.2.{stored}.weight"]
        )
    assert "layer2.qkv" not in weights
    assert "layer1.conv" not in weights


def test_a_gated_delta_rule_layers_packed_tensors(tmp_path):
    save_tiny_model("qwen3_5_text", tmp_path)
    spec, weights = plan_floats(tmp_path)
    files = {name: tensor.astype(np.float64) for name, tensor in tensors_of(tmp_path).items()}
    layer = "model.layers.1.linear_attn."
    mixer = spec.mixer
    assert mixer is not None
    assert mixer == Mixer("delta", 3, 2 * 2 * 16 + 4 * 32, 2, 4, 16, 32)
    for name, parts in (("mixer_in", ("qkv", "z")), ("mixer_gates", ("b", "a"))):
        stored = np.concatenate([files[f"{layer}in_proj_{part}.weight"] for part in parts])
        np.testing.assert_array_equal(weights[f"layer1.{name}"], stored)
    np.testing.assert_array_equal(
        weights["layer1.conv"], files[f"{layer}conv1d.weight"][:, 0].T.reshape(-1)
    )
    np.testing.assert_allclose(weights["layer1.decay"], -np.exp(files[f"{layer}A_log"]), rtol=1e-7)
    np.testing.assert_array_equal(weights["layer1.dt_bias"], files[f"{layer}dt_bias"])
    np.testing.assert_array_equal(weights["layer1.mixer_norm"], files[f"{layer}norm.weight"])
    np.testing.assert_array_equal(
        weights["layer1.attn_in"], 1 + files["model.layers.1.input_layernorm.weight"]
    )
    gates = next(entry for entry in pack_plan(spec, "int4") if entry.name == "layer1.mixer_gates")
    assert gates.kind == "f32"


def test_queries_and_gates_are_separated(tmp_path):
    """The file alternates between the query and the gate of each head. Packed are all queries, keys
    and values, then all gates.
    """
    save_tiny_model("qwen3_5_text", tmp_path)
    _, weights = plan_floats(tmp_path)
    files = tensors_of(tmp_path)
    query, key, value = (files[f"model.layers.2.self_attn.{name}_proj.weight"] for name in "qkv")
    heads = query.reshape(4, 2, 32, 64)
    expected = np.concatenate(
        [heads[:, 0].reshape(128, 64), key, value, heads[:, 1].reshape(128, 64)]
    )
    np.testing.assert_array_equal(weights["layer2.qkv"], expected)


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
