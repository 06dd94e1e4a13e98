"""Hybrid models from GGUF files that follow the converters' rules: the tensors are equal in spite
of every peculiarity of the converters.
"""

import dataclasses

import numpy as np
import pytest

from helpers.distance import distance
from helpers.gguf.hybrids import HYBRID_FAMILIES, draft_layer, tiled_heads
from helpers.gguf.writer import gguf_tensors, save_gguf, save_model, write_gguf
from helpers.json_files import read_json
from helpers.models.specs import spec_of
from helpers.models.tiny_models import save_tiny_model
from helpers.oracles.packed_plan import hybrid_logits, plan_floats
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model

TOKENS = np.random.default_rng(5).integers(0, 256, 70).tolist()


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_a_gguf_file_equals_the_checkpoint(name, tmp_path):
    """Entries are equal to the bit, except for norms stored with 1 added, reordered heads, and
    tensors that the file stores multiplied.
    """
    model = save_model(name, tmp_path / "model")
    spec, weights = plan_floats(model)
    found, stored = plan_floats(write_gguf(model, tmp_path / "m.gguf"))
    assert (
        distance(hybrid_logits(found, stored, TOKENS), hybrid_logits(spec, weights, TOKENS)) < 1e-6
    )
    assert stored.keys() == weights.keys()
    even = spec.mixer is None or spec.mixer.key_heads == spec.mixer.value_heads
    for key, value in weights.items():
        in_order = even or not key.endswith(
            (".mixer_in", ".mixer_gates", ".conv", ".decay", ".dt_bias", "r_out")
        )
        if in_order and spec.factors == found.factors:
            np.testing.assert_allclose(stored[key], value, rtol=1e-6, atol=1e-7, err_msg=key)


def test_value_heads_are_reordered(tmp_path):
    """With two key heads and four value heads, the file stores transformers' value heads 0, 2, 1, 3
    in every tensor, so value head h reads key head h mod 2. Read in transformers' order they would
    give another model.
    """
    model = save_model("qwen3_5_text", tmp_path / "model")
    config = read_json(model / "config.json")
    spec, weights = plan_floats(model)
    found, stored = plan_floats(write_gguf(model, tmp_path / "m.gguf"))
    assert spec.mixer is not None
    assert found.mixer is not None
    assert (spec.mixer.tiled_heads, found.mixer.tiled_heads) == (False, True)
    assert found.mixer._replace(tiled_heads=False) == spec.mixer
    np.testing.assert_allclose(
        stored["layer0.decay"], weights["layer0.decay"][[0, 2, 1, 3]], rtol=1e-7
    )
    np.testing.assert_array_equal(stored["layer0.dt_bias"], weights["layer0.dt_bias"][[0, 2, 1, 3]])
    np.testing.assert_array_equal(
        stored["layer0.mixer_out"], tiled_heads(weights["layer0.mixer_out"], 1, config, 32)
    )
    values = slice(2 * 2 * 32, 2 * 2 * 32 + 4 * 32)
    in_tiles = tiled_heads(weights["layer0.mixer_in"][values], 0, config, 32)
    np.testing.assert_array_equal(stored["layer0.mixer_in"][values], in_tiles)
    assert found.hybrid is not None
    hybrid = found.hybrid._replace(mixer=spec.mixer)
    wrong = hybrid_logits(dataclasses.replace(found, hybrid=hybrid), stored, TOKENS)
    assert distance(wrong, hybrid_logits(spec, weights, TOKENS)) > 1e-2


def test_mtp_layers_in_the_block_count_are_not_used(tmp_path):
    model = save_model("qwen3_5_text", tmp_path / "model")
    expected = Checkpoint.open(write_gguf(model, tmp_path / "plain.gguf"))
    tensors = gguf_tensors(model)
    ahead = draft_layer(tensors, 5)
    recurrent = [True, True, False, True, False, False]
    keys = {"block_count": 6, "nextn_predict_layers": 1, "attention.recurrent_layers": recurrent}
    path = write_gguf(model, tmp_path / "m.gguf", keys=keys, more=ahead)
    found = Checkpoint.open(path)
    assert describe_model(found.config) == describe_model(expected.config)
    assert found.other_parts == {"nextn": len(ahead)}
    assert expected.other_parts == {}
    spec, weights = plan_floats(path)
    assert (
        distance(hybrid_logits(spec, weights, TOKENS), hybrid_logits(*plan_floats(model), TOKENS))
        < 1e-6
    )


def test_mtp_layers_in_per_layer_lists_are_not_used(tmp_path):
    """Nemotron's converter adds them to the lists as one block with attention and experts."""
    model = save_model("nemotron_h-moe", tmp_path / "model")
    expected = Checkpoint.open(write_gguf(model, tmp_path / "plain.gguf"))
    ahead = draft_layer(gguf_tensors(model), 4)
    keys = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "attention.head_count_kv": [2, 0, 0, 0, 2],
        "feed_forward_length": [0, 64, 0, 0, 64],
    }
    path = write_gguf(model, tmp_path / "m.gguf", keys=keys, more=ahead)
    assert spec_of(path) == describe_model(expected.config)
    assert Checkpoint.open(path).other_parts == {"nextn": len(ahead)}
    plan_floats(path)


@pytest.mark.parametrize(
    ("interval", "attends"),
    [(2, [False, True] * 2), (None, [False, False, False, True] * 2 + [False])],
)
def test_full_attention_interval_applies_without_a_list(interval, attends, tmp_path):
    """Every fourth layer attends if neither the file nor the config sets the interval."""
    fields = {"linear_key_head_dim": 32, "num_hidden_layers": len(attends), "layer_types": None}
    fields |= {"full_attention_interval": interval} if interval else {}
    keys = {"attention.recurrent_layers": None, "full_attention_interval": interval}
    path = save_gguf("qwen3_5_text", tmp_path, fields, keys=keys)
    config = read_json(tmp_path / "model/config.json")
    assert [kind == "full_attention" for kind in config["layer_types"]] == attends
    assert [layer.attends for layer in spec_of(path).layers] == attends


def test_nemotron_files_set_norm_topk_prob(tmp_path):
    fields = {**HYBRID_FAMILIES["nemotron_h-moe"], "norm_topk_prob": False}
    model = save_tiny_model("nemotron_h-moe", tmp_path / "model", **fields)
    expected = hybrid_logits(*plan_floats(model), TOKENS)
    path = write_gguf(model, tmp_path / "m.gguf")
    assert distance(hybrid_logits(*plan_floats(path), TOKENS), expected) < 1e-6
    path = write_gguf(model, tmp_path / "divided.gguf", keys={"expert_weights_norm": True})
    assert distance(hybrid_logits(*plan_floats(path), TOKENS), expected) > 1e-3


def test_granite_files_set_whether_there_is_rope(tmp_path):
    """Files of the makers' models declare that there is no RoPE. A file without the key has RoPE,
    as llama.cpp assumes.
    """
    model = save_model("granitemoehybrid-h", tmp_path / "model")
    for said, rope in ((False, -1), (True, 0), (None, 0)):
        path = write_gguf(model, tmp_path / f"{said}.gguf", keys={"rope.scaling.finetuned": said})
        found = {layer.rope for layer in spec_of(path).layers if layer.kv >= 0}
        assert found == {rope}


def test_granite_files_without_an_attention_scale_use_the_default(tmp_path):
    """Bamba's files lack it."""
    model = save_model("granitemoehybrid-h", tmp_path / "model")
    spec = spec_of(write_gguf(model, tmp_path / "said.gguf"))
    path = write_gguf(model, tmp_path / "m.gguf", keys={"attention.scale": None})
    found = spec_of(path)
    assert found.softmax_scale == pytest.approx(found.head_dim**-0.5)
    assert dataclasses.replace(found, softmax_scale=spec.softmax_scale) == spec
    assert spec.softmax_scale != found.softmax_scale


def test_falcon_files_with_a_tied_head_are_refused(tmp_path):
    model = save_tiny_model("falcon_h1", tmp_path / "model", tie_word_embeddings=True)
    with pytest.raises(ModelFormatError, match=r"lacks tensor 'output\.weight': with a tied head"):
        Checkpoint.open(write_gguf(model, tmp_path / "m.gguf")).config  # noqa: B018


def test_nemotron_files_have_no_rope(tmp_path):
    """The converter writes hidden_size // heads as RoPE dimension, which may be odd and larger than
    a head.
    """
    model = save_model("nemotron_h", tmp_path / "model")
    expected = spec_of(write_gguf(model, tmp_path / "plain.gguf"))
    path = write_gguf(model, tmp_path / "m.gguf", keys={"rope.dimension_count": 99})
    assert spec_of(path) == expected
    assert {layer.rope for layer in expected.layers} == {-1}


def test_state_space_vectors_are_stored_as_matrices(tmp_path):
    model = save_model("granitemoehybrid-experts", tmp_path / "model")
    tensors = gguf_tensors(model)
    shapes = {
        name: tensors[f"blk.0.{name}"].shape for name in ("ssm_a", "ssm_d", "ssm_norm.weight")
    }
    assert shapes == {"ssm_a": (4, 1), "ssm_d": (4, 1), "ssm_norm.weight": (2, 64)}
    _, weights = plan_floats(write_gguf(model, tmp_path / "m.gguf"))
    np.testing.assert_array_equal(
        weights["layer0.mixer_norm"], tensors["blk.0.ssm_norm.weight"].reshape(-1)
    )
    np.testing.assert_array_equal(weights["layer0.skip"], tensors["blk.0.ssm_d"][:, 0])
    wrong = {"blk.0.ssm_d": np.ones((4, 2), np.float32)}
    with pytest.raises(ModelFormatError, match=r"mamba\.D' has shape \(4, 2\), expected \(4,\)"):
        plan_floats(write_gguf(model, tmp_path / "wrong.gguf", more=wrong))


def test_convolutions_without_biases_are_read(tmp_path):
    model = save_tiny_model("granitemoehybrid-groups", tmp_path / "model")
    spec, weights = plan_floats(write_gguf(model, tmp_path / "m.gguf"))
    assert "layer1.conv_bias" not in weights
    assert (
        distance(hybrid_logits(spec, weights, TOKENS), hybrid_logits(*plan_floats(model), TOKENS))
        < 1e-6
    )


def test_a_duplicate_matrix_is_refused(tmp_path):
    model = save_model("granitemoehybrid-h", tmp_path / "model")
    twice = {"blk.0.ffn_up_shexp.weight": gguf_tensors(model)["blk.0.ffn_up.weight"]}
    path = write_gguf(model, tmp_path / "m.gguf", more=twice)
    with pytest.raises(
        ModelFormatError, match=r"duplicates 'model\.layers\.0\.shared_mlp\.up_proj"
    ):
        plan_floats(path)


KEYS = {
    "heads of two sizes": (
        "lfm2",
        {"attention.head_count_kv": [0, 2, 0, 1, 0]},
        "must be the same number for all layers",
    ),
    "no layer attends": (
        "lfm2",
        {"attention.head_count_kv": [0] * 5},
        "must be the same number for all layers with attention",
    ),
    "one head too many": (
        "lfm2",
        {"attention.head_count_kv": [0, 2, 0, 2]},
        "has 4 entries, but the model has 5 layers",
    ),
    "no taps": ("lfm2", {"shortconv.l_cache": None}, r"lacks the key 'lfm2\.shortconv\.l_cache'"),
    "softmax for sigmoid": (
        "lfm2_moe",
        {"expert_gating_func": 1},
        r"expert_gating_func=1 must be 2 \(sigmoid\)",
    ),
    "a scale of shares": (
        "lfm2_moe",
        {"expert_weights_scale": 2.0},
        "expert_weights_scale' is not supported",
    ),
    "heads of values of another size": (
        "qwen3_5_text",
        {"ssm.inner_size": 64},
        "must equal ssm.time_step_rank=4 x ssm.state_size=32",
    ),
    "keys and an MLP in a layer": (
        "nemotron_h",
        {"feed_forward_length": [0, 96, 96, 0, 96]},
        "=96 is not supported in layer 2, which has 2 KV heads",
    ),
    "values that are no heads": (
        "nemotron_h",
        {"ssm.time_step_rank": 3},
        "=128 must be a multiple of the number of heads, 3",
    ),
    "no norm's eps": (
        "nemotron_h",
        {"attention.layer_norm_epsilon": None},
        "lacks the key 'nemotron_h.attention.lay",
    ),
    "softmax of Nemotron": (
        "nemotron_h-moe",
        {"expert_gating_func": 1},
        r"expert_gating_func=1 must be 2 \(sigmoid\)",
    ),
    "groups of experts": (
        "nemotron_h-moe",
        {"expert_group_count": 4},
        "n_group=4 is not supported",
    ),
    "a narrower projection": (
        "nemotron_h-moe",
        {"moe_latent_size": 32},
        "moe_latent_size=32 is not supported",
    ),
    "no layers of its own": (
        "qwen3_5_text",
        {"nextn_predict_layers": 5},
        "must be less than block_count=5",
    ),
    "states without heads": (
        "granitemoehybrid-h",
        {"ssm.time_step_rank": None},
        r"lacks the key 'granitehybrid\.ssm\.time_step_rank'",
    ),
    "heads that do not fit": (
        "granitemoehybrid-h",
        {"ssm.time_step_rank": 3},
        "must be a multiple of the number of heads, 3",
    ),
    "a width that is no multiple": (
        "granitemoehybrid-h",
        {"ssm.inner_size": 96},
        "heads, .*, and of the hidden size, 64",
    ),
    "an uneven state": (
        "granitemoehybrid-h",
        {"ssm.state_size": 24},
        "mamba_d_state=24 must be a multiple of 16",
    ),
    "all layers keep a state": (
        "granitemoehybrid-h",
        {"attention.head_count_kv": [0, 0, 0]},
        "must be the same number for all layers with attention",
    ),
    "experts without a choice": (
        "granitemoehybrid-experts",
        {"expert_used_count": None},
        r"lacks the key 'granitehybrid\.expert_used_count'",
    ),
    "a width of experts": (
        "granitemoehybrid-experts",
        {"expert_feed_forward_length": 64},
        "expert_feed_forward_length' is not supported",
    ),
    "a short list of kinds": (
        "qwen3_5_text",
        {"attention.recurrent_layers": [True, False]},
        "must be true or false for each of 5 blocks",
    ),
    "numbers for kinds": (
        "qwen3_5_text",
        {"attention.recurrent_layers": [1, 1, 0, 1, 0]},
        "must be true or false for each of 5 blocks",
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_contradictory_keys_are_refused(name, tmp_path):
    family, keys, message = KEYS[name]
    path = write_gguf(save_model(family, tmp_path / "model"), tmp_path / "m.gguf", keys=keys)
    with pytest.raises(ModelFormatError, match=message):
        spec_of(path)
