"""Multi-token prediction heads of both file formats: they give the same head and transformers'
logits.
"""

import numpy as np
import pytest
import torch
from transformers.cache_utils import MtpCache

from helpers.distance import distance
from helpers.models.awq_gptq_files import quantize_dir
from helpers.models.mtp_heads import (
    HEADS,
    build_head,
    gguf_head,
    save_with_head,
    write_gguf_with_head,
    write_head_file,
)
from helpers.models.nvfp4_files import SETTINGS, make_nvfp4
from helpers.models.tensor_files import change_tensors, tensors_of
from helpers.models.tiny_models import save_tiny_model
from helpers.oracles.packed_plan import (
    last_states,
    mtp_floats,
    mtp_model,
    mtp_states,
    plan_floats,
)
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.packed.pack_plan import plan_bytes

TOKENS = np.random.default_rng(2).integers(0, 256, 24).tolist()

LAYERS = 3  # layers of glm4_moe
UP = "model.layers.0.mlp.up_proj"

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def _logits(path):
    """Return the logits of the token after the next at every position but the last, and of one more
    token.

    For the additional token, the head's own state replaces the model's.
    """
    head, weights, matrix = mtp_model(path)
    trunk = last_states(*plan_floats(path), TOKENS[:-1])
    states = mtp_states(head, weights, trunk, TOKENS[1:])
    drafted = int((states[-1] @ matrix.T).argmax())
    rows = np.concatenate([trunk, states[-1:]])
    return mtp_states(head, weights, rows, [*TOKENS[1:], drafted]) @ matrix.T


def _of_transformers(name):
    model, head = build_head(name)
    ids = torch.tensor([TOKENS])
    cache = MtpCache(config=model.config.get_mtp_config())
    with torch.no_grad():
        trunk = model.model(ids[:, :-1]).last_hidden_state
        places = torch.arange(1, len(TOKENS))[None]
        states = head.forward_layer(0, trunk, places, cache, input_ids=ids[:, 1:])
        logits = head._project_to_logits(states)
        drafted = logits[:, -1:].argmax(-1)
        last = head.forward_layer(0, states[:, -1:], places[:, -1:] + 1, cache, input_ids=drafted)
        return torch.cat([logits, head._project_to_logits(last)], dim=1)[0].numpy()


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_both_formats_equal_transformers(name, tmp_path):
    model = save_with_head(name, tmp_path / "model")
    file = write_gguf_with_head(model, tmp_path / "m.gguf")
    expected = _of_transformers(name)
    found = _logits(model)
    assert distance(found, expected) < 1e-5
    assert distance(_logits(file), found) < 1e-6


@pytest.mark.parametrize("name", HEADS)
def test_a_file_with_the_head_alone_is_read(name, tmp_path):
    """The file has no LM head, and the head is not tied to the embedding instead."""
    model = save_with_head(name, tmp_path / "model")
    whole = write_gguf_with_head(model, tmp_path / "m.gguf")
    alone = write_head_file(model, tmp_path / "mtp-m.gguf", ("output.weight",))
    expected, weights = mtp_floats(whole)
    found, own = mtp_floats(alone)
    assert found == expected
    assert own.keys() == weights.keys()
    assert all(np.array_equal(own[entry], weights[entry]) for entry in own)
    with pytest.raises(ModelFormatError, match="contains only a multi-token prediction head"):
        Checkpoint.open(alone).summary()


@pytest.mark.parametrize("place", ["safetensors", "GGUF"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "glm4_moe"])
def test_an_own_embedding_is_used(name, place, tmp_path):
    own = np.random.default_rng(5).standard_normal((300, 64)).astype(np.float32)
    prefix = "mtp." if name == "qwen3_5_text" else "model.layers.3."
    tensors = {f"{prefix}embed_tokens.weight": own}
    if name == "glm4_moe":
        tensors[f"{prefix}shared_head.head.weight"] = 2 * own
    path = save_with_head(name, tmp_path / "model", own=tensors)
    if place == "GGUF":
        path = write_gguf_with_head(path, tmp_path / "m.gguf")
    head, weights = mtp_floats(path)
    assert head.shared == (("head",) if name == "qwen3_5_text" else ())
    np.testing.assert_array_equal(weights["embed"], own)
    if name == "glm4_moe":
        np.testing.assert_array_equal(weights["head"], 2 * own)


def test_a_quantized_head_keeps_its_formats(tmp_path):
    fields = {"hidden_size": 256, "intermediate_size": 512}
    model = save_with_head("qwen3_5_text", tmp_path / "model", **fields)
    path = write_gguf_with_head(model, tmp_path / "m.gguf", kind="Q8_0")
    plan = {entry.name: entry.kind for entry in Checkpoint.open(path).mtp_plan("auto")}
    assert plan["projection"] == plan["layer0.qkv"] == plan["layer0.down"] == "int8"
    assert plan["embedding_norm"] == plan["norm"] == "vector"
    assert "embed" not in plan
    assert "head" not in plan
    narrow = Checkpoint.open(model)
    assert plan_bytes(narrow.mtp_plan("int4")) < plan_bytes(narrow.mtp_plan("int8"))


def test_a_head_in_awq_keeps_its_codes(tmp_path):
    path = save_with_head("glm4_moe", tmp_path)
    codes, scales, _ = quantize_dir(path, "awq", group=32, symmetric=True)[
        f"model.layers.{LAYERS}.eh_proj"
    ]
    checkpoint = Checkpoint.open(path)
    plan = {entry.name: entry.kind for entry in checkpoint.mtp_plan("auto")}
    assert plan["projection"] == plan["layer0.qkv"] == plan["layer0.experts_down"] == "int4"
    with checkpoint.open_mtp_source() as source:
        found = source.rows("mtp.projection.weight")
    expected = np.repeat(scales.astype(np.float32), 32, axis=1) * (codes - 8)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("method", SETTINGS)
def test_a_float_head_of_an_nvfp4_model_is_read(method, tmp_path):
    path = save_with_head("qwen3_5_text", tmp_path)
    stored = tensors_of(path)
    make_nvfp4(path, method, floats="mtp.")
    checkpoint = Checkpoint.open(path)
    with checkpoint.open_source() as source:
        assert source.kind("model.layers.0.mlp.down_proj.weight") == "nvfp4"
    with checkpoint.open_mtp_source() as source:
        for name, own in (("fc", "mtp.projection"), ("layers.0.mlp.up_proj", UP)):
            assert source.kind(f"{own}.weight") is None
            np.testing.assert_array_equal(
                source.rows(f"{own}.weight"), stored[f"mtp.{name}.weight"]
            )
    assert {entry.name for entry in checkpoint.mtp_plan("auto")} >= {"projection", "layer0.qkv"}


def test_a_head_in_nvfp4_keeps_its_codes(tmp_path):
    path = save_with_head("qwen3_5_text", tmp_path)
    known = make_nvfp4(path, "modelopt")
    with Checkpoint.open(path).open_mtp_source() as source:
        assert source.kind(f"{UP}.weight") == "nvfp4"
        np.testing.assert_allclose(
            source.rows(f"{UP}.weight"), known["mtp.layers.0.mlp.up_proj.weight"], rtol=2**-22
        )


def test_a_model_without_a_head_has_no_plan(tmp_path):
    checkpoint = Checkpoint.open(save_tiny_model("qwen3_5_text", tmp_path))
    assert checkpoint.mtp is None
    with pytest.raises(ModelFormatError, match="contains no multi-token prediction head"):
        checkpoint.open_mtp_source()


@pytest.mark.parametrize("name", ["qwen3_5_text", "glm4_moe"])
def test_the_refusal_of_a_gguf_head_with_two_layers_gives_their_number(name, tmp_path):
    model = save_with_head(name, tmp_path / "model")
    of_head = gguf_head(model)
    layers = len(Checkpoint.open(model).spec.layers)
    second = {
        key.replace(f"blk.{layers}.", f"blk.{layers + 1}."): values
        for key, values in of_head.items()
    }
    path = write_gguf_with_head(model, tmp_path / "two.gguf", num_heads=2, more=second)
    message = rf"has 2 layers \(from block {layers} on\); supported are heads with one layer"
    with pytest.raises(ModelFormatError, match=message):
        Checkpoint.open(path).mtp_plan("int8")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_5_text", {"mtp.fc.weight": None}, r"lack tensor 'mtp\.projection\.weight'"),
        (
            "qwen3_5_text",
            {"mtp.fc.weight": np.ones((64, 64), np.float32)},
            r"'mtp\.projection\.weight' has shape \(64, 64\), expected \(64, 128\)",
        ),
        (
            "qwen3_5_text",
            {"mtp.layers.1.input_layernorm.weight": np.ones(64, np.float32)},
            r"'mtp\.layers\.1\.input_layernorm\.weight' is not supported .*heads with one layer",
        ),
        (
            "glm4_moe",
            {"model.layers.4.enorm.weight": np.ones(64, np.float32)},
            r"'model\.layers\.4\.enorm\.weight' is not supported .*heads with one layer",
        ),
    ],
)
def test_unsupported_heads_are_refused(name, change, message, tmp_path):
    path = save_with_head(name, tmp_path)
    change_tensors(path, change)
    with pytest.raises(ModelFormatError, match=message):
        Checkpoint.open(path).mtp_plan("int8")
