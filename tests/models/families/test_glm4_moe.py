"""GLM-4.5 in both file formats, with a layer for multi-token prediction after the others."""

import numpy as np
import pytest

from helpers.gguf.hybrids import draft_layer
from helpers.gguf.writer import gguf_tensors, save_model, write_gguf
from helpers.models.tensor_files import change_tensors
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.packed.pack_plan import check_tensors

LAYERS = 3
HIDDEN = 64


def _head(prefix):
    """Return tensors that only a multi-token prediction layer has, and one of any layer."""
    vectors = [f"{prefix}{name}.weight" for name in ("enorm", "hnorm", "shared_head.norm")]
    return {
        **dict.fromkeys(vectors, np.ones(HIDDEN, np.float32)),
        f"{prefix}eh_proj.weight": np.ones((HIDDEN, 2 * HIDDEN), np.float32),
        f"{prefix}self_attn.q_proj.weight": np.ones((4 * 32, HIDDEN), np.float32),
    }


def test_a_head_in_safetensors_is_counted_and_not_used(tmp_path):
    save_tiny_model("glm4_moe", tmp_path, num_nextn_predict_layers=1)
    head = _head(f"model.layers.{LAYERS}.")
    change_tensors(tmp_path, head)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.summary()
    assert checkpoint.other_parts == {"mtp": len(head)}
    with checkpoint.open_source() as source:
        check_tensors(checkpoint.plan("f32"), source)


def test_a_head_in_a_gguf_file_is_counted_and_not_used(tmp_path):
    model = save_model("glm4_moe", tmp_path / "model")
    head = draft_layer(gguf_tensors(model), LAYERS)
    keys = {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
    found = Checkpoint.open(write_gguf(model, tmp_path / "m.gguf", keys=keys, more=head))
    found.summary()
    assert found.other_parts == {"nextn": len(head)}
    plain = Checkpoint.open(write_gguf(model, tmp_path / "plain.gguf"))
    assert describe_model(found.config) == describe_model(plain.config)
    assert found.plan("f32") == plain.plan("f32")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_gating_func": 1}, r"glm4moe\.expert_gating_func=1 must be 2 \(sigmoid\)"),
        ({"expert_group_count": 5, "expert_group_used_count": 2}, "n_group=5 must divide"),
        ({"nextn_predict_layers": LAYERS}, "must be less than block_count=3"),
    ],
)
def test_contradictory_keys_are_refused(keys, message, tmp_path):
    path = write_gguf(save_model("glm4_moe", tmp_path / "model"), tmp_path / "m.gguf", keys=keys)
    with pytest.raises(ModelFormatError, match=message):
        _ = Checkpoint.open(path).spec
