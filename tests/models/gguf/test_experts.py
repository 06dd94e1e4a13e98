"""Mixtures of experts in GGUF files: formats that are kept, and refusals by name."""

import numpy as np
import pytest

from helpers.gguf.writer import q4_k_m, save_gguf, write_gguf
from helpers.models.packed_files import file_plan
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.gguf.file import read_gguf
from kvboost_edge.models.gguf.source import GgufSource
from kvboost_edge.models.packed.pack_plan import plan_bytes, plan_label
from kvboost_edge.runners.native.runner import NativeRunner

WIDE = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_experts": 6,
    "num_hidden_layers": 2,
    "head_dim": 64,
}


def _file(directory, **options):
    (directory / "model").mkdir()
    return write_gguf(
        save_tiny_checkpoint("qwen3_moe", directory / "model", **WIDE),
        directory / "m.gguf",
        **options,
    )


def test_expert_tensors_keep_the_files_formats(tmp_path):
    """Every expert keeps the file's bits. The router is stored as floats in any format."""
    path = _file(tmp_path, kind=q4_k_m)
    plan = file_plan(path)
    with GgufSource(read_gguf(path)) as source:
        rows = source.quant_rows("model.layers.1.mlp.experts.3.up_proj.weight", 16, 32).codes
    kinds = {
        entry.name: (entry.kind, len(entry.parts))
        for entry in plan
        if entry.name.startswith("layer1.")
    }
    assert kinds["layer1.experts_gate_up"] == ("q4k", 12)
    assert kinds["layer1.experts_down"] == ("q4k", 6)
    assert kinds["layer1.router"] == ("f32", 1)
    assert plan_label(plan, "auto") == "q4k+q6k"
    assert plan_bytes(plan) <= 1.05 * Checkpoint.open(path).summary().nbytes
    # Location of those rows: the fourth of six matrices of 256 rows.
    header = read_gguf(path)
    tensor = header.tensors["blk.1.ffn_up_exps.weight"]
    assert tensor.shape == (6, 256, 256)
    row = (tensor.stop - tensor.start) // (6 * 256)
    start = tensor.start + (3 * 256 + 16) * row
    np.testing.assert_array_equal(
        rows.reshape(-1), np.fromfile(path, np.uint8)[start : start + 16 * row]
    )


KEYS = {
    "more of a token than there are": (
        {"expert_used_count": 7},
        "num_experts_per_tok=7 exceeds num_experts=6",
    ),
    "another count": (
        {"expert_count": 5},
        r"has shape \(6, 256\), expected \(5, 256\)|belongs to expert 5",
    ),
    "more than the tensors": (
        {"expert_count": 8},
        r"has shape \(6, 256\)|lacks tensor .*experts\.6",
    ),
    "another width": (
        {"expert_feed_forward_length": 128},
        r"has shape \(256, 256\), expected \(128, 256\)",
    ),
    "a sigmoid": ({"expert_gating_func": 2}, "expert_gating_func' is not supported"),
    "groups of experts": ({"expert_group_count": 2}, "expert_group_count' is not supported"),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_that_contradict_the_tensors_are_refused(name, tmp_path):
    keys, message = KEYS[name]
    path = _file(tmp_path, keys=keys)
    with pytest.raises(ModelFormatError, match=message):
        NativeRunner.from_dir(path, weights="f32")


def test_a_router_with_nan_is_refused(tmp_path):
    router = np.ones((6, 256), dtype=np.float32)
    router[2, 9] = np.nan
    path = _file(tmp_path, more={"blk.1.ffn_gate_inp.weight": router})
    with pytest.raises(ModelFormatError, match=r"mlp\.gate\.weight' .*holds NaN"):
        NativeRunner.from_dir(path, weights="int8")
    with pytest.raises(ModelFormatError, match=r"blk\.1\.ffn_gate_inp\.weight' \(F32\) holds NaN"):
        Checkpoint.open(path).summary()


def test_experts_of_other_architectures_are_refused(tmp_path):
    path = save_gguf("qwen2", tmp_path, keys={"expert_count": 8})
    with pytest.raises(ModelFormatError, match="expert_count=8 is not supported"):
        NativeRunner.from_dir(path, weights="f32")
