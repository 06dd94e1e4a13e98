"""Hybrid models on the native runner: against transformers, between file formats, and in the
integer formats.
"""

import numpy as np
import pytest

from helpers.distance import distance
from helpers.gguf.hybrids import HYBRID_FAMILIES
from helpers.gguf.writer import save_model, write_gguf
from helpers.models.hybrid_models import HYBRID_NESTED, HYBRIDS
from helpers.models.tensor_files import change_tensors
from helpers.models.tiny_models import (
    build_nested_model,
    build_tiny_model,
    save_nested_model,
    save_tiny_model,
)
from helpers.oracles.packed_plan import hybrid_logits, packed_floats, plan_floats
from helpers.oracles.transformers_logits import assert_native_equals
from helpers.random_ids import random_ids
from helpers.runners.logits import native_logits
from kvboost_edge.models.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROMPT = random_ids(61, 7)
GRANITES = tuple(name for name in HYBRIDS if name.startswith("granitemoehybrid"))
# Models whose sums have the same order in both file formats.
EVEN = ("lfm2", "lfm2_moe", "qwen3_5_text-even", *GRANITES, "nemotron_h", "nemotron_h-moe")


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_models_equal_transformers(name, tmp_path):
    assert_native_equals(build_tiny_model(name), save_tiny_model(name, tmp_path))


@pytest.mark.parametrize("name", HYBRID_NESTED)
def test_nested_hybrid_models_equal_transformers(name, tmp_path, caplog):
    """The vision part and the layers that draft tokens are reported and not used."""
    save_nested_model(name, tmp_path)
    ahead = {
        f"mtp.{part}.weight": np.ones((4, 4), np.float32)
        for part in ("fc", "norm", "layers.0.self_attn.q_proj")
    }
    change_tensors(tmp_path, ahead)
    with caplog.at_level("INFO", "kvboost_edge"):
        assert_native_equals(build_nested_model(name), tmp_path)
    vision = {"vision_tower", "multi_modal_projector"} if name == "lfm2_vl" else {"visual"}
    parts = Checkpoint.open(tmp_path).other_parts
    assert parts.keys() == vision | {"mtp"}
    assert parts["mtp"] == 3
    (line,) = [each for each in caplog.messages if "text only; tensors of" in each]
    assert all(f"{part} ({parts[part]})" in line for part in vision)


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_gguf_hybrids_equal_the_checkpoints(name, tmp_path):
    """Logits are equal to the bit, except for files with reordered value heads, which are summed in
    another order.
    """
    model = save_model(name, tmp_path / "model")
    files = (model, write_gguf(model, tmp_path / "m.gguf"))
    expected, found = (native_logits(each, "f32", PROMPT) for each in files)
    if name in EVEN:
        np.testing.assert_array_equal(found, expected)
    assert distance(found, expected) < 1e-5


@pytest.mark.parametrize(
    "name",
    ["lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", *GRANITES, "nemotron_h", "falcon_h1"],
)
def test_integer_weights_are_close_to_the_packed_weights_model(name, tmp_path):
    """The logits differ from float32 as expected of 4 bits, and are close to a float64 model of the
    quantized weights.
    """
    model = save_tiny_model(name, tmp_path)
    found = native_logits(model, "int4", PROMPT)
    near = distance(found, hybrid_logits(*packed_floats(model, "int4"), PROMPT))
    far = distance(found, hybrid_logits(*plan_floats(model), PROMPT))
    assert near < 0.2
    assert near < far / 3


def _mixed(name):
    """Return a type as in llama.cpp's mixtures: the rows of queries, keys and values have more bits
    than their gate.
    """
    return (
        "Q5_K"
        if "attn_qkv" in name
        else "Q6_K"
        if "attn_v" in name or "token_embd" in name
        else "Q4_K"
    )


WIDE = {
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {
        "intermediate_size": 256,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "granitemoehybrid-h": {"shared_intermediate_size": 256, "mamba_n_heads": 8, "mamba_d_head": 64},
    "nemotron_h": {"intermediate_size": 256, "mamba_head_dim": 64, "head_dim": 64},
}


@pytest.mark.parametrize("name", WIDE)
def test_mixers_from_several_block_formats(name, tmp_path):
    """The mixer then reads several matrices."""
    model = save_tiny_model(name, tmp_path / "model", hidden_size=256, **WIDE[name])
    path = write_gguf(model, tmp_path / "m.gguf", kind=_mixed)
    # Squaring doubles the relative error.
    found, expected = (native_logits(path, weights, PROMPT) for weights in ("auto", "f32"))
    assert distance(found, expected) < (0.4 if name == "nemotron_h" else 0.2)
