"""Experts that do not match the config raise a specific error before anything is computed."""

import numpy as np
import pytest

from helpers.json_files import change_json
from helpers.models.specs import spec_of
from helpers.models.tensor_files import change_tensors
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource
from kvboost_edge.models.weights.split_experts import expert_number, expert_rows
from kvboost_edge.runners.native.runner import NativeRunner

LAYER = "model.layers.1.mlp."


def _save(directory, change=None, **config):
    save_tiny_checkpoint("qwen3_moe", directory, num_hidden_layers=2)
    if change is not None:
        change_tensors(directory, change)
    change_json(directory / "config.json", **config)
    return directory


def _fuse(tensors):
    """Merge the experts' matrices as later versions of transformers store them."""
    for layer in range(2):
        base = f"model.layers.{layer}.mlp.experts."
        parts = {
            part: [tensors.pop(f"{base}{e}.{part}_proj.weight") for e in range(12)]
            for part in ("gate", "up", "down")
        }
        both = [np.concatenate(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors[f"{base}gate_up_proj"] = np.stack(both)
        tensors[f"{base}down_proj"] = np.stack(parts["down"])


def _widen(tensors):
    name = f"{LAYER}experts.5.down_proj.weight"
    tensors[name] = np.concatenate([tensors[name], tensors[name]], axis=1)


def _more(tensors):
    for part in ("gate", "up", "down"):
        tensors[f"{LAYER}experts.12.{part}_proj.weight"] = tensors[
            f"{LAYER}experts.11.{part}_proj.weight"
        ].copy()


def _fused_more(tensors):
    _fuse(tensors)
    for name in (f"{LAYER}experts.gate_up_proj", f"{LAYER}experts.down_proj"):
        tensors[name] = np.concatenate([tensors[name], tensors[name][:1]])


def _fused_odd(tensors):
    _fuse(tensors)
    tensors[f"{LAYER}experts.gate_up_proj"] = tensors[f"{LAYER}experts.gate_up_proj"][:, :-1]


def _both(tensors):
    copies = {name: tensor.copy() for name, tensor in tensors.items() if ".experts." in name}
    _fuse(tensors)
    tensors |= copies


def _broken_router(tensors):
    tensors[f"{LAYER}gate.weight"][3, 5] = np.nan


TENSORS = {
    "an expert too few": (
        {f"{LAYER}experts.7.up_proj.weight": None},
        r"lack tensor 'model\.layers\.1\.mlp\.experts\.7\.up_proj\.weight'",
    ),
    "an expert too many": (
        _more,
        r"experts\.12\.down_proj\.weight' belongs to expert 12, but the layers have experts 0 to 11",
    ),
    "one too many in one tensor": (
        _fused_more,
        r"experts\.12\.down_proj\.weight' belongs to expert 12, but the layers",
    ),
    "a width": (
        _widen,
        r"experts\.5\.down_proj\.weight' has shape \(64, 192\), expected \(64, 96\)",
    ),
    "odd rows": (
        _fused_odd,
        r"experts\.gate_up_proj' has 191 rows per expert, which cannot be divided into 2 matrices",
    ),
    "twice": (
        _both,
        r"tensor '.*' duplicates 'model\.layers\.\d\.mlp\.experts\.0\.\w+\.weight'",
    ),
    "a router with NaN": (_broken_router, r"mlp\.gate\.weight' .*holds NaN or infinity"),
    "a router of other rows": (
        {f"{LAYER}gate.weight": np.ones((11, 64), np.float32)},
        r"mlp\.gate\.weight' has shape \(11, 64\), expected \(12, 64\)",
    ),
}


@pytest.mark.parametrize("weights", ["f32", "int4"])
@pytest.mark.parametrize("name", TENSORS)
def test_mismatched_expert_tensors_are_refused(name, weights, tmp_path):
    change, message = TENSORS[name]
    with pytest.raises(ModelFormatError, match=message):
        NativeRunner.from_dir(_save(tmp_path, change), weights=weights)


CONFIGS = {
    "k": ({"num_experts_per_tok": 13}, "num_experts_per_tok=13 exceeds num_experts=12"),
    "no k": ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 must be an integer from 1"),
    "no experts": ({"num_experts": None}, "num_experts=None must be an integer from 1"),
    "many": ({"num_experts": 5000}, "num_experts=5000 exceeds the limit of 4096"),
    "width": (
        {"moe_intermediate_size": 80},
        "moe_intermediate_size=80 of the experts must be a multiple of 32",
    ),
    "hidden": ({"hidden_size": 72}, "hidden_size=72 must be a multiple of 16"),
    "renorm": ({"norm_topk_prob": "yes"}, "norm_topk_prob='yes' must be true or false"),
    "step": ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be an integer from 1"),
    "layers": (
        {"mlp_only_layers": [2]},
        r"mlp_only_layers=\[2\] must be a list of layer indices below 2",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_unsupported_expert_configs_are_refused(name, tmp_path):
    config, message = CONFIGS[name]
    with pytest.raises(ModelFormatError, match=message):
        spec_of(_save(tmp_path, **config))


def test_stacked_and_separate_experts_are_equal(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    directories = _save(tmp_path / "one", _fuse), _save(tmp_path / "many")
    with SafetensorsSource(directories[0]) as fused, SafetensorsSource(directories[1]) as apart:
        assert fused.names() == apart.names()
        for name in fused.names():
            assert fused.shape(name) == apart.shape(name)
            np.testing.assert_array_equal(fused.rows(name), apart.rows(name))
            np.testing.assert_array_equal(fused.rows(name, 3, 9), apart.rows(name, 3, 9))


def test_other_tensors_are_unchanged():
    assert expert_rows("model.layers.0.mlp.gate_up_proj.weight", (4, 6, 8)) == []
    assert expert_rows("model.layers.0.mlp.experts.3.gate_proj.weight", (6, 8)) == []
    assert expert_number("model.layers.0.mlp.experts.31.up_proj.weight") == 31
    assert expert_number("model.layers.0.mlp.gate.weight") is None
