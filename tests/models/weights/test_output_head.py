"""LM head of a model directory whose config.json and files disagree."""

import logging

import numpy as np
import pytest

from helpers.json_files import LEFT_OUT, change_json, read_json
from helpers.models.specs import spec_of
from helpers.models.tensor_files import change_tensors, tensors_of
from helpers.models.tiny_models import build_tiny_model, save_nested_model, save_tiny_model
from helpers.oracles.transformers_logits import assert_native_equals
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def _say(model, tied):
    """Set tie_word_embeddings in config.json, or remove it if None."""
    change_json(model / "config.json", tie_word_embeddings=LEFT_OUT if tied is None else tied)


def _tied(model):
    return spec_of(model).tied


@pytest.mark.parametrize(
    ("family", "said"),
    [("qwen3_moe", True), ("qwen3_5_text", True), ("lfm2-plain", None), ("llama", True)],
)
def test_a_separate_head_is_used_regardless_of_the_config(family, said, tmp_path, caplog):
    """The file's head is used if it differs from the embedding, as in transformers."""
    save_tiny_model(family, tmp_path, tie_word_embeddings=False)
    _say(tmp_path, said)
    with caplog.at_level(logging.WARNING, "kvboost_edge"):
        assert not _tied(tmp_path)
    assert f"the head {tmp_path / 'model.safetensors'} differs from the embedding" in caplog.text
    assert_native_equals(build_tiny_model(family, tie_word_embeddings=False), tmp_path)


@pytest.mark.parametrize("said", [True, None])
def test_a_saved_tied_head_is_recognized(said, tmp_path):
    save_tiny_model("gemma2", tmp_path, tie_word_embeddings=True)
    embedding = tensors_of(tmp_path)[_EMBEDDING]
    change_tensors(tmp_path, {_HEAD: embedding})
    _say(tmp_path, said)
    assert _tied(tmp_path)
    assert_native_equals(build_tiny_model("gemma2", tie_word_embeddings=True), tmp_path)
    last = embedding.copy()
    last[-1, -1] += np.float32(1e-3)
    change_tensors(tmp_path, {_HEAD: last})
    assert not _tied(tmp_path), "a head that differs in its last number must not be tied"
    change_tensors(tmp_path, {_HEAD: embedding[:-1]})
    with pytest.raises(ModelFormatError, match=r"model\.safetensors: tensor 'lm_head\.weight' has"):
        Checkpoint.open(tmp_path).summary()


def test_a_nested_config_with_two_wrong_tie_settings(tmp_path):
    save_nested_model("qwen3_vl", tmp_path, tie_word_embeddings=False)
    path = tmp_path / "config.json"
    text = {**read_json(path)["text_config"], "tie_word_embeddings": True}
    change_json(path, text_config=text, tie_word_embeddings=True)
    assert not _tied(tmp_path)


@pytest.mark.parametrize("said", ["false", 1, [[]], 1e308])
def test_a_tie_setting_that_is_not_a_boolean_is_refused(said, tmp_path):
    save_tiny_model("llama", tmp_path, tie_word_embeddings=True)
    _say(tmp_path, said)
    with pytest.raises(ModelFormatError, match=r"tie_word_embeddings=.* must be true or false"):
        _tied(tmp_path)
