"""Configs of hybrids: older names, widths that follow from others, and what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.families import describe_model
from tiny_models import save_tiny_model


def test_the_width_of_an_mlp_is_what_follows_from_the_config(tmp_path: Path) -> None:
    spec = describe_model(Checkpoint.open(save_tiny_model("lfm2", tmp_path)).config)
    assert {layer.intermediate_size for layer in spec.layers} == {96}
    config = json.loads((tmp_path / "config.json").read_text())
    for change, width in (
        ({"intermediate_size": 12288}, 11488),  # 8192 x 1.4 = 11468, up to a multiple of 32
        (
            {
                "intermediate_size": None,
                "block_ff_dim": 6656,
                "block_ffn_dim_multiplier": 1.0,
                "block_multiple_of": 256,
            },
            4608,
        ),
        ({"block_auto_adjust_ff_dim": False}, 96),
        ({"block_ffn_dim_multiplier": None, "block_multiple_of": 256}, 64),
    ):
        assert describe_model({**config, **change}).intermediate_size == width


def test_older_names_in_a_config(tmp_path: Path) -> None:
    config = json.loads((save_tiny_model("lfm2", tmp_path) / "config.json").read_text())
    spec = describe_model(config)
    types = config.pop("layer_types")
    full = [index for index, kind in enumerate(types) if kind == "full_attention"]
    tied = config.pop("tie_word_embeddings")
    assert describe_model({**config, "full_attn_idxs": full, "tie_embedding": tied}) == spec
    assert describe_model({**config, "full_attn_idxs": full, "tie_embedding": False}).tied is False


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "kinds that are not known": ("lfm2", {"layer_types": ["conv"] * 4 + ["mamba"]}, r"must be 5 of \['conv', 'full_"),
    "too few kinds": ("lfm2", {"layer_types": ["conv", "full_attention"]}, "must be 5 of"),
    "no list": ("lfm2", {"layer_types": "conv"}, "must be 5 of"),
    "no attention": ("lfm2", {"layer_types": ["conv"] * 5}, "no layer of the model attends"),
    "two rules": ("lfm2", {"full_attn_idxs": [1]}, r"_attention' of layer 3, and full_attn_idxs=\[1\] says 'conv'"),
    "layers beyond": ("lfm2", {"layer_types": None, "full_attn_idxs": [5]}, "must be numbers of layers below 5"),
    "a bias": ("lfm2", {"conv_bias": True}, "conv_bias=True is not known"),
    "no taps": ("lfm2", {"conv_L_cache": 1}, "conv_L_cache=1 must be an integer from 2"),
    "many taps": ("lfm2", {"conv_L_cache": 65}, "conv_L_cache=65 is above 64"),
    "a width that is no number": ("lfm2", {"block_auto_adjust_ff_dim": 1}, "must be true or false"),
    "too many experts": ("lfm2_moe", {"num_experts_per_tok": 13}, "num_experts_per_tok=13 is above num_experts=12"),
    "an endless scale": ("lfm2_moe", {"routed_scaling_factor": float("inf")}, "routed_scaling_factor=inf must be"),
    "two steps": ("qwen3_5_text", {"full_attention_interval": 4}, "of layer 2, and full_attention_interval=4 says"),
    "heads that do not fit": ("qwen3_5_text", {"linear_num_value_heads": 3}, "not a multiple of linear_num_key_h"),
    "a narrow head": ("qwen3_5_text", {"linear_value_head_dim": 24}, "linear_value_head_dim=24 is no multiple of 16"),
    "a head beyond any": ("qwen3_5_text", {"linear_key_head_dim": 8192}, "linear_key_head_dim=8192 is above 4096"),
    "no gate": ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate=False is not known"),
    "another activation": ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act='gelu' is not known"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_makes_no_sense_is_refused(name: str, tmp_path: Path) -> None:
    family, change, message = REFUSED[name]
    config = json.loads((save_tiny_model(family, tmp_path) / "config.json").read_text())
    with pytest.raises(ModelFormatError, match=message):
        describe_model({**config, **change})
