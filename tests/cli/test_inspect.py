"""Tests of multi-token prediction heads in the reports of `inspect` and `doctor`."""

import pytest

from helpers.gguf.hybrids import draft_layer
from helpers.gguf.writer import gguf_tensors, save_model, write_gguf
from helpers.models.mtp_heads import save_with_head, write_gguf_with_head
from helpers.models.tensor_files import change_tensors
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.packed.pack_plan import plan_bytes

ROWS = ("mtp_head", "mtp_head_tensors", "mtp_head_bytes", "draft_vocabulary")


def _said(answered, path, *argv):
    """Return the rows about the head, which are equal in both reports."""
    report = answered("inspect", path, *argv)
    found = {name: report[name] for name in ROWS if name in report}
    report = answered("doctor", path, *argv)[f"Model {path}"]
    assert {name: report[name] for name in ROWS if name in report} == found
    return found


@pytest.mark.parametrize(
    ("name", "inside"), [("qwen3_5_text", "an MLP"), ("glm4_moe", "12 experts")]
)
@pytest.mark.parametrize("place", ["safetensors", "GGUF"])
def test_an_mtp_head_is_shown_with_its_size(name, inside, place, tmp_path, answered):
    path = save_with_head(name, tmp_path / "model")
    if place == "GGUF":
        path = write_gguf_with_head(path, tmp_path / "m.gguf")
    checkpoint = Checkpoint.open(path)
    shared = "embedding, LM head"
    assert _said(answered, path, "-o", "weights=int8") == {
        "mtp_head": f"one layer with {inside}; shares with the model: {shared}",
        "mtp_head_tensors": checkpoint.num_mtp_tensors,
        "mtp_head_bytes": plan_bytes(checkpoint.mtp_plan("int8")),
        "draft_vocabulary": checkpoint.spec.vocab_size,
    }
    options = ("-o", "draft_vocabulary=64")
    assert _said(answered, path, *options)["draft_vocabulary"] == 64


def test_a_model_without_a_head_shows_none(tmp_path, answered):
    assert _said(answered, save_tiny_model("glm4_moe", tmp_path)) == {}


def test_other_runners_do_not_use_the_head(tmp_path, answered):
    path = save_with_head("glm4_moe", tmp_path)
    found = _said(answered, path, "-o", "runner=torch")
    assert list(found) == ["mtp_head"]
    assert "tensors, used by no runner" in found["mtp_head"]


def test_an_unsupported_head_is_named(tmp_path, answered):
    model = save_model("nemotron_h-moe", tmp_path / "model")
    ahead = draft_layer(gguf_tensors(model), 4)
    keys = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "attention.head_count_kv": [2, 0, 0, 0, 2],
        "feed_forward_length": [0, 64, 0, 0, 64],
    }
    path = write_gguf(model, tmp_path / "m.gguf", keys=keys, more=ahead)
    said = f"{len(ahead)} tensors, not supported for model_type='nemotron_h'"
    assert _said(answered, path) == {"mtp_head": said}


def test_a_damaged_head_does_not_affect_the_model(tmp_path, answered):
    path = save_with_head("qwen3_5_text", tmp_path)
    change_tensors(path, {"mtp.fc.weight": None})
    said = _said(answered, path)["mtp_head"]
    assert said == "refused: the weight files lack tensor 'mtp.projection.weight'"
