"""Phi-3 and Phi-4: fused matrices, with default RoPE or longrope."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.models.families.family import Family, ModelType
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import PRE_NORMS, GgufArchitecture
from kvboost_edge.models.families.windows import same_window

__all__ = ["GGUF", "MODEL_TYPES"]

MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "phi3": ModelType(
            "Phi-3 and Phi-4, plain RoPE and longrope",
            Family(
                qkv_bias=False,
                fused=True,
                mlp=("mlp.gate_up_proj", "mlp.down_proj"),
                eps=1e-5,
                windows=same_window(0),
            ),
            gguf=True,
            onnx=True,
        )
    }
)


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    old = config["rope_parameters"].get("original_max_position_embeddings")
    original = {} if old is None else {"original_max_position_embeddings": old}
    return {"sliding_window": keys.optional_size("attention.sliding_window", 0) or None, **original}


GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "phi3": GgufArchitecture(
            "phi3",
            {
                "attn_qkv": "self_attn.qkv_proj",
                "attn_output": "self_attn.o_proj",
                "ffn_up": "mlp.gate_up_proj",
                "ffn_down": "mlp.down_proj",
                **PRE_NORMS,
            },
            keys=frozenset({"attention.sliding_window", "rope.scaling.attn_factor"}),
            config=_gguf_config,
        )
    }
)
