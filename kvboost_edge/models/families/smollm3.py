"""SmolLM3, in which some layers omit RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.models.families.family import Family, ModelType
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import MATRICES, PRE_NORMS, GgufArchitecture
from kvboost_edge.models.families.windows import layer_windows

__all__ = ["GGUF", "MODEL_TYPES"]


def _windows(config: Mapping[str, Any], layers: int) -> list[int]:
    # Without use_sliding_window, only layer_types can give a layer a window.
    return layer_windows(config, layers, lambda i: False)


MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "smollm3": ModelType(
            "SmolLM3, some layers without RoPE",
            Family(
                tied=True,
                theta=2e6,
                no_rope="listed",
                windows=_windows,
                unless=(("use_sliding_window", (None, False)),),
            ),
            gguf=True,
        )
    }
)


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries read from a GGUF file."""
    # Every fourth layer omits RoPE. The file does not say so, and llama.cpp also assumes it.
    return {"no_rope_layer_interval": 4}


GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "smollm3": GgufArchitecture(
            "smollm3", {**MATRICES, **PRE_NORMS}, permuted=True, config=_gguf_config
        )
    }
)
