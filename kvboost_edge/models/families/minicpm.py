"""MiniCPM 1, 2 and 4, which scale embeddings, residual and logits. transformers does not support
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.models.families.family import Family, ModelType
from kvboost_edge.models.families.fields import number_of, size_of
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import MATRICES, PRE_NORMS, GgufArchitecture

__all__ = ["GGUF", "MODEL_TYPES"]

Config = Mapping[str, Any]

# Defaults from the model's own code.
_USUAL = {"scale_emb": 1.0, "scale_depth": 1.0, "dim_model_base": 1.0}


def _complete(config: Config) -> Config:
    """Return the config with the model's scales under Granite's names.

    The config of a GGUF file may already contain them.
    """
    layers = size_of(config, "num_hidden_layers")
    heads = size_of(config, "num_attention_heads")
    hidden = size_of(config, "hidden_size")
    if layers is None or heads is None or hidden is None:
        return config  # the error is raised when the sizes are read
    scale = {
        key: number_of({key: config.get(key, usual)}, key, 1e-6, 1e6)
        for key, usual in _USUAL.items()
    }
    multipliers = {
        "attention_multiplier": 1 / math.sqrt(size_of(config, "head_dim") or hidden // heads),
        "embedding_multiplier": scale["scale_emb"],
        "residual_multiplier": scale["scale_depth"] / math.sqrt(layers),
        "logits_scaling": hidden / scale["dim_model_base"],
    }
    return {**multipliers, **config}


MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "minicpm": ModelType(
            "MiniCPM 1, 2 and 4; scaled embeddings, residual and logits",
            Family(
                multipliers=True,
                tied=True,
                complete=_complete,
                unless=(("num_experts", (None, 0)), ("sparse_config", (None,))),
            ),
            torch=False,
            gguf=True,
            oracle="a NumPy model",
        )
    }
)


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries read from a GGUF file, with llama.cpp's defaults for keys that older
    files omit.
    """
    hidden = config["hidden_size"]
    layers = config["num_hidden_layers"]
    return {
        "embedding_multiplier": keys.number("embedding_scale") or 12.0,
        "residual_multiplier": keys.number("residual_scale") or 1.4 / math.sqrt(layers),
        "logits_scaling": keys.number("logit_scale") or hidden / 256,
    }


GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "minicpm": GgufArchitecture(
            "minicpm",
            {**MATRICES, **PRE_NORMS},
            permuted=True,
            keys=frozenset(
                {"embedding_scale", "residual_scale", "logit_scale", "rope.scaling.attn_factor"}
            ),
            config=_gguf_config,
        )
    }
)
