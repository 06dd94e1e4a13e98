"""EXAONE 4: local layers with RoPE, global layers without it, and norms after the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.models.families.family import Family, ModelType
from kvboost_edge.models.families.gguf_keys import Keys, layer_types
from kvboost_edge.models.families.gguf_names import (
    HEAD_NORMS,
    MATRICES,
    POST_NORMS,
    WINDOW,
    GgufArchitecture,
)
from kvboost_edge.models.families.windows import all_but_every

__all__ = ["GGUF", "MODEL_TYPES"]

MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "exaone4": ModelType(
            "EXAONE 4, local layers with RoPE and global layers without it",
            Family(
                norms="post",
                head_norm="head",
                qkv_bias=False,
                eps=1e-5,
                no_rope="full",
                windows=all_but_every(4, "sliding_window_pattern"),
            ),
            gguf=True,
        )
    }
)

# Models of this depth use windows even if the file does not say so. llama.cpp assumes the same.
_WINDOWED = 64


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    window = keys.optional_size("attention.sliding_window", 0)
    if window is None and layers == _WINDOWED:
        window = 4096
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    return {"sliding_window": window, **layer_types(keys, config, default_period=4)}


GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "exaone4": GgufArchitecture(
            "exaone4", {**MATRICES, **POST_NORMS, **HEAD_NORMS}, keys=WINDOW, config=_gguf_config
        )
    }
)
