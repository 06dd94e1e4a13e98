"""Gemma 1 to 3, and EmbeddingGemma, a Gemma 3 with bidirectional attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.models.families.family import Family, ModelType, Wrapper
from kvboost_edge.models.families.gguf_keys import Keys, layer_types
from kvboost_edge.models.families.gguf_names import (
    BOTH_NORMS,
    HEAD_NORMS,
    MATRICES,
    PRE_NORMS,
    WINDOW,
    GgufArchitecture,
)
from kvboost_edge.models.families.windows import all_but_every, every_second

__all__ = ["GGUF", "MODEL_TYPES"]

_FAMILY = Family(
    norm_offset=1.0,
    tied=True,
    head_dim=256,
    scaled_embedding=True,
    activation="gelu_pytorch_tanh",
    unless=(("use_bidirectional_attention", (None, False)),),
)
# Gemma 3 configs give only values that differ from these defaults.
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "gemma": ModelType("Gemma 1, scaled embeddings", _FAMILY, gguf=True, onnx=True),
        "gemma2": ModelType(
            "Gemma 2, softcaps, local and global layers",
            dataclasses.replace(
                _FAMILY, norms="both", query_scalar=True, softcaps=True, windows=every_second
            ),
            gguf=True,
            onnx=True,
        ),
        "gemma3_text": ModelType(
            "Gemma 3, local and global layers with separate RoPE settings",
            dataclasses.replace(
                _FAMILY,
                norms="both",
                head_norm="head",
                query_scalar=True,
                local_rope=True,
                capped=True,
                theta=1e6,
                windows=all_but_every(6, "sliding_window_pattern", "_sliding_window_pattern"),
                unless=(
                    ("use_bidirectional_attention", (None, False, True)),
                    ("attn_logit_softcapping", (None,)),
                ),
            ),
            gguf=True,
            onnx=True,
        ),
        "gemma3": ModelType(
            "Gemma 3 (vision model), text only",
            wrapper=Wrapper(("gemma3_text",), tied=True, defaults=_GEMMA3),
            torch=False,
        ),
    }
)

# Models of these depths scale attention scores by hidden_size / heads instead of head_dim.
# llama.cpp also recognizes them by their depth.
_WIDE_SCALE_LAYERS = {"gemma2": 46, "gemma3_text": 62}


def _gguf_gemma2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_attention_scale(config),
        **layer_types(keys, config, default_period=2),
        "sliding_window": keys.optional_size("attention.sliding_window") or 4096,
        "attn_logit_softcapping": keys.number("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": keys.number("final_logit_softcapping") or 30.0,
    }


def _gguf_gemma3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    full = config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa") or 10000.0}
    window = keys.optional_size("attention.sliding_window", 0)
    types = ["full_attention"] * config["num_hidden_layers"]
    return {
        **_attention_scale(config),
        **(layer_types(keys, config, default_period=6) if window else {"layer_types": types}),
        "sliding_window": window or None,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
    }


def _attention_scale(config: dict[str, Any]) -> dict[str, Any]:
    wide = config["num_hidden_layers"] == _WIDE_SCALE_LAYERS[config["model_type"]]
    scalar = config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    return {"query_pre_attn_scalar": scalar}


_DENSE_KEYS = {f"dense_{number}_feat_{side}" for number in (2, 3) for side in ("in", "out")}
_GEMMA3_LAYER = {**MATRICES, **BOTH_NORMS, **HEAD_NORMS}
GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "gemma": GgufArchitecture("gemma", {**MATRICES, **PRE_NORMS}, norm_offset=1.0),
        "gemma2": GgufArchitecture(
            "gemma2",
            {**MATRICES, **BOTH_NORMS},
            norm_offset=1.0,
            keys=WINDOW | {"attn_logit_softcapping", "final_logit_softcapping"},
            config=_gguf_gemma2,
        ),
        "gemma3": GgufArchitecture(
            "gemma3_text",
            _GEMMA3_LAYER,
            norm_offset=1.0,
            keys=WINDOW | {"final_logit_softcapping", "rope.freq_base_swa"},
            config=_gguf_gemma3,
        ),
        "gemma-embedding": GgufArchitecture(
            "gemma3_text",
            _GEMMA3_LAYER,
            norm_offset=1.0,
            bidirectional=True,
            keys=WINDOW | {"rope.freq_base_swa", *_DENSE_KEYS},
            dense=("dense_2.weight", "dense_3.weight"),
            config=_gguf_gemma3,
        ),
    }
)
