"""Gemma 4 from GGUF: config and tensors make the model that the file was written of; what contradicts is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from gguf_gemma4 import makers_config
from gguf_models import write_gguf
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_memo import NO_CACHE
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.gguf.file import read_gguf
from kvboost_edge.models.gguf.source import GgufSource
from kvboost_edge.models.weights.row_table import RowTable
from tiny_models import VOCAB_SIZE, save_tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

LAYERS = 8
# Layers 5 and 6 attend to what layer 3 computes, and layer 7 to that of layer 4.
SMALL: dict[str, Any] = {
    "head_dim": 32,
    "global_head_dim": 64,
    "num_hidden_layers": LAYERS,
    "sliding_window": 24,
    "layer_types": ["full_attention" if i in (2, 4, 7) else "sliding_attention" for i in range(LAYERS)],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
    "tie_word_embeddings": True,
}
LARGE: dict[str, Any] = {
    **SMALL,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 8.0,
}
MODELS = {"small": SMALL, "large": LARGE, "shared alone": {**SMALL, "use_double_wide_mlp": False}}


def _write(directory: Path, settings: dict[str, Any], **options: Any) -> tuple[Path, Path]:
    model = save_tiny_model("gemma4_text", directory / "hf", **settings)
    return model, write_gguf(model, directory / "m.gguf", **options)


@pytest.mark.parametrize("name", MODELS)
def test_config_and_tensors_make_the_same_model(name: str, tmp_path: Path) -> None:
    """transformers' model of our config, with our tensors, computes what the original one does, to the bit."""
    directory, path = _write(tmp_path, MODELS[name])
    config = dict(Checkpoint.open(path, cache_dir=NO_CACHE).config)
    expected = makers_config(json.loads((directory / "config.json").read_text()))
    changed = {"eos_token_id": [expected["eos_token_id"]]}
    assert {key: config[key] for key in config if key in expected} == {
        key: value for key, value in {**expected, **changed}.items() if key in config
    }
    assert config["global_head_dim"] == 64
    with GgufSource(read_gguf(path)) as source:
        stored = {key: torch.from_numpy(source.rows(key)) for key in source.names()}
    theirs = load_file(directory / "model.safetensors")
    assert stored.keys() == theirs.keys()
    assert "model.layers.3.layer_scalar" in stored
    fields = {key: value for key, value in config.items() if key not in ("attention_output_bias", "mlp_bias")}
    ours = Gemma4ForCausalLM(Gemma4TextConfig(**fields)).eval()
    missing, unexpected = ours.load_state_dict(stored, strict=False)
    assert missing in ([], ["lm_head.weight"])
    assert unexpected == []
    model = Gemma4ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (1, 60)))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, model(tokens).logits, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_table_is_read_row_by_row(kind: str, tmp_path: Path) -> None:
    directory, path = _write(tmp_path, SMALL, kind=kind)
    model = Checkpoint.open(path, cache_dir=NO_CACHE)
    tokens = np.array([3, 299, 3])
    with RowTable.open(model, "model.embed_tokens_per_layer.weight", VOCAB_SIZE, 16 * LAYERS) as table:
        found = table.rows(tokens)
    expected = load_file(directory / "model.safetensors")["model.embed_tokens_per_layer.weight"][tokens]
    np.testing.assert_allclose(found, expected, rtol=0, atol=0 if kind == "F32" else 0.02)


def test_summary_takes_layers_of_two_sizes(tmp_path: Path) -> None:
    _, path = _write(tmp_path, SMALL)
    assert Checkpoint.open(path, cache_dir=NO_CACHE).summary().num_params > 0


def test_keys_that_sharing_layers_do_not_use_may_be_there(tmp_path: Path) -> None:
    """The makers' checkpoints have them, and the converter writes what is there."""
    unused = np.ones((64, 64), np.float32)
    _, path = _write(tmp_path, SMALL, more={"blk.5.attn_k.weight": unused, "blk.5.attn_v.weight": unused})
    without = write_gguf(tmp_path / "hf", tmp_path / "without.gguf")
    assert Checkpoint.open(path, cache_dir=NO_CACHE).config == Checkpoint.open(without, cache_dir=NO_CACHE).config


TABLE = "per_layer_token_embd.weight"
ONES = np.ones(32, np.float32)
SLIDES = [True, True, False, True, False, True, True, False]
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no table": (SMALL, {"more": {TABLE: None}}, f"lacks the tensor '{TABLE}', which .*per_layer_input=16 needs"),
    "another table": (SMALL, {"more": {TABLE: np.ones((300, 127), np.float32)}}, r"contradicts .*\(300, 127\)"),
    "fewer rows": (SMALL, {"more": {TABLE: np.ones((299, 128), np.float32)}}, r"contradicts .*\(299, 128\)"),
    "a table of no width": (
        SMALL, {"keys": {"embedding_length_per_layer_input": 0}}, "per_layer_input=0 contradicts the tensor",
    ),
    "no pattern": (SMALL, {"keys": {"attention.sliding_window_pattern": 6}}, "pattern=6 must say of each layer"),
    "a short pattern": (
        SMALL, {"keys": {"attention.sliding_window_pattern": SLIDES[1:]}}, "an entry for each of the 8 layers",
    ),
    "a long list of widths": (SMALL, {"keys": {"feed_forward_length": [96] * 9}}, "has 9 entries for 8 layers"),
    "three widths": (
        SMALL, {"keys": {"feed_forward_length": [96, 97, *[96] * 6]}}, "must be one width for the first 5 layers",
    ),
    "another width of sharing layers": (
        SMALL, {"keys": {"feed_forward_length": [96] * 5 + [288] * 3}}, "or its double behind",
    ),
    "a list of no width": (SMALL, {"keys": {"feed_forward_length": [0] * 8}}, "feed_forward_length=0 must be"),
    "heads of no kind": (
        LARGE, {"keys": {"attention.head_count_kv": [2, 1, 1, 2, 1, 2, 2, 1]}}, "one number for layers that slide",
    ),
    "few heads": (LARGE, {"keys": {"attention.head_count_kv": [2] * 7}}, "has 7 entries for 8 layers"),
    "other heads with values": (
        SMALL, {"keys": {"attention.head_count_kv": [2 if slide else 1 for slide in SLIDES]}}, "keys are values",
    ),
    "all shared": (SMALL, {"keys": {"attention.shared_kv_layers": 8}}, "shared_kv_layers=8 leaves none of 8 layers"),
    "more shared": (SMALL, {"keys": {"attention.shared_kv_layers": 2**31}}, "shared_kv_layers=2147483648 leaves none"),
    "values of some layers": (LARGE, {"more": {"blk.2.attn_v.weight": np.ones((64, 64), np.float32)}},
                              "lacks the tensor 'blk.4.attn_v.weight'"),
    "no values where it slides": (SMALL, {"more": {"blk.0.attn_v.weight": None}}, "'blk.0.attn_v.weight': keys are"),
    "values of another length": (SMALL, {"keys": {"attention.value_length_swa": 16}}, "length_swa=16 must equal .*32"),
    "a rope of a part": (SMALL, {"keys": {"rope.dimension_count_swa": 16}}, "dimension_count_swa=16 must be .*32"),
    "no rope": (SMALL, {"more": {"rope_freqs.weight": None}}, "lacks the tensor 'rope_freqs.weight'"),
    "another rope": (SMALL, {"more": {"rope_freqs.weight": 2 * ONES}}, "must be ones, then 1e\\+30"),
    "a rope that turns late": (
        SMALL, {"more": {"rope_freqs.weight": np.where(np.arange(32) < 8, 1e30, 1).astype(np.float32)}}, "must be ones",
    ),
    "experts": (SMALL, {"keys": {"expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 32}},
                "gemma4.expert_count=128 is a mixture of experts"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_is_refused(name: str, tmp_path: Path) -> None:
    settings, change, message = REFUSED[name]
    _, path = _write(tmp_path, settings, **change)
    with pytest.raises(ModelFormatError, match=message) as caught:
        _ = Checkpoint.open(path, cache_dir=NO_CACHE).config
    assert "m.gguf" in str(caught.value)
