"""BitNet b1.58, which has norms before the output and down projections."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.models.families.family import Family, ModelType
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import MATRICES, PRE_NORMS, GgufArchitecture

__all__ = ["GGUF", "MODEL_TYPES"]

_SUB_NORMS = {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}

MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "bitnet": ModelType(
            "BitNet b1.58, ternary weights, norms before the output and down projections",
            Family(
                sub_norms=tuple(_SUB_NORMS.values()),
                kv_heads=5,
                eps=1e-5,
                theta=5e5,
                activation="relu2",
            ),
            gguf=True,
        ),
    }
)


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries read from a GGUF file.

    Files do not name the activation. llama.cpp uses SiLU for this architecture.
    """
    return {"hidden_act": "silu"}


GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "bitnet": GgufArchitecture(
            "bitnet", {**MATRICES, **PRE_NORMS, **_SUB_NORMS}, config=_gguf_config
        ),
    }
)
