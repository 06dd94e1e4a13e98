"""Dense Hunyuan models, which normalize queries and keys after RoPE.

The RoPE base may be scaled by a fixed alpha.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.family import Family, ModelType
from kvboost_edge.models.families.fields import number_of, rope_of, size_of
from kvboost_edge.models.families.gguf_names import MATRICES, PRE_NORMS, GgufArchitecture

__all__ = ["GGUF", "MODEL_TYPES", "is_static_dynamic"]

Config = Mapping[str, Any]


def is_static_dynamic(model_type: object, rope: Mapping[str, Any]) -> bool:
    """Return whether RoPE of type "dynamic" has constant frequencies, as in Hunyuan with a fixed
    alpha.
    """
    return model_type == "hunyuan_v1_dense" and bool(rope.get("alpha"))


def _complete(config: Config) -> Config:
    """Return the config with a fixed alpha folded into the RoPE base.

    The base becomes theta * alpha ** (d / (d - 2)), where d is the head size.
    """
    rope = dict(rope_of(config))
    if rope.get("rope_type", rope.get("type")) != "dynamic" or not is_static_dynamic(
        config.get("model_type"), rope
    ):
        return config
    theta = config.get("rope_theta") if rope.get("rope_theta") is None else rope["rope_theta"]
    heads = size_of(config, "num_attention_heads")
    hidden = size_of(config, "hidden_size")
    dim = size_of(config, "head_dim") or (hidden // heads if hidden and heads else 0)
    if dim <= 2:
        raise ModelFormatError(f"RoPE of type 'dynamic' with alpha: head_dim={dim} must be above 2")
    numbers = {"rope_theta": 10000.0 if theta is None else theta, "alpha": rope["alpha"]}
    base, alpha = (number_of(numbers, key, 1e-9, 1e12, "RoPE of type 'dynamic'") for key in numbers)
    return {
        **config,
        "rope_scaling": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": base * alpha ** (dim / (dim - 2)),
        },
    }


MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "hunyuan_v1_dense": ModelType(
            "Hunyuan, dense; queries and keys normalized after RoPE",
            Family(
                head_norm="head",
                head_norms=("query_layernorm", "key_layernorm"),
                late_norm=True,
                eps=1e-5,
                complete=_complete,
            ),
            gguf=True,
        )
    }
)
GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "hunyuan-dense": GgufArchitecture(
            "hunyuan_v1_dense",
            {
                **MATRICES,
                **PRE_NORMS,
                "attn_q_norm": "self_attn.query_layernorm",
                "attn_k_norm": "self_attn.key_layernorm",
            },
        )
    }
)
