"""Qwen3.5: gated delta rule and gated attention, with MLPs or a mixture of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.family import Family, ModelType, Wrapper
from kvboost_edge.models.families.fields import integer_of
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import (
    EXPERT_KEYS,
    EXPERTS,
    HEAD_NORMS,
    MATRICES,
    SHARED_EXPERT,
    SSM_SIZES,
    GgufArchitecture,
)
from kvboost_edge.models.families.mixers import Mixer
from kvboost_edge.models.families.moe import Experts, gguf_experts
from kvboost_edge.models.families.mtp import MODULE_MTP
from kvboost_edge.models.families.qwen import qwen2_experts
from kvboost_edge.models.families.ssm import (
    DELTA_NAMES,
    FULL,
    GROUP,
    LANES,
    LINEAR,
    MOST_DIM,
    MOST_TAPS,
    TILED_HEADS,
    Hybrid,
    check_most,
    hybrid_of,
    kinds_of_layers,
)

__all__ = ["GGUF", "MODEL_TYPES"]

Config = Mapping[str, Any]


def _hybrid(config: Config, layers: int) -> Hybrid:
    """Return the layers with a gated delta rule.

    They follow from layer_types. Without it, every full_attention_interval-th layer has attention
    and the others a gated delta rule.
    """
    kinds = kinds_of_layers(config, layers, LINEAR, "delta", _by_interval(config, layers))
    usual = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    given = {**usual, **{key: value for key, value in config.items() if value is not None}}
    key_heads, value_heads, key_dim, value_dim = (
        integer_of(given, key, 1) for key in list(usual)[:4]
    )
    length = integer_of(given, "linear_conv_kernel_dim", 2)
    if value_heads % key_heads:
        raise ModelFormatError(
            f"linear_num_value_heads={value_heads} is not a multiple of "
            f"linear_num_key_heads={key_heads}"
        )
    check_most("linear_conv_kernel_dim", length, MOST_TAPS)
    for name, dim in (("linear_key_head_dim", key_dim), ("linear_value_head_dim", value_dim)):
        check_most(name, dim, MOST_DIM)
        if dim % LANES:
            raise ModelFormatError(
                f"{name}={dim} must be a multiple of {LANES} for the recurrent kernels"
            )
    if value_heads * value_dim % GROUP:
        raise ModelFormatError(
            f"linear_num_value_heads={value_heads} x linear_value_head_dim={value_dim} = "
            f"{value_heads * value_dim} must be a multiple of {GROUP} for the recurrent kernels"
        )
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    tiled = bool(config.get(TILED_HEADS))
    mixer = Mixer("delta", length - 1, channels, key_heads, value_heads, key_dim, value_dim, tiled)
    return hybrid_of(kinds, mixer, DELTA_NAMES)


def _by_interval(config: Config, layers: int) -> list[str] | None:
    if config.get("full_attention_interval") is None and config.get("layer_types") is not None:
        return None
    given = {
        "full_attention_interval": 4,
        **{key: value for key, value in config.items() if value is not None},
    }
    step = integer_of(given, "full_attention_interval", 1)
    return [LINEAR if (index + 1) % step else FULL for index in range(layers)]


def _complete(config: Config) -> Config:
    """Return the config with a default width for the shared expert, which is the only dense MLP."""
    return {"shared_expert_intermediate_size": 512, **config}


def _experts(config: Config, layers: int) -> Experts:
    """Return the mixture of experts.

    It is Qwen2's in all layers, but routing weights are always normalized.
    """
    usual = {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
    full = {
        **usual,
        **config,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return qwen2_experts(full, layers)


_FAMILY = Family(
    norm_offset=1.0,
    head_norm="head",
    head_dim=256,
    partial=0.25,
    output_gate=True,
    hybrid=_hybrid,
    mtp=MODULE_MTP,
    unless=(("attn_output_gate", (None, True)), ("hidden_act", (None, "silu", "swish"))),
)
_MOE = dataclasses.replace(
    _FAMILY, inner="shared_expert_intermediate_size", experts=_experts, complete=_complete
)
MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "qwen3_5_text": ModelType(
            "Qwen3.5 and Qwen3.6, gated delta rule and gated attention",
            _FAMILY,
            torch=False,
            gguf=True,
        ),
        "qwen3_5_moe_text": ModelType(
            "Qwen3.5 and Qwen3.6, mixture of experts with a gated shared expert",
            _MOE,
            torch=False,
            gguf=True,
        ),
        "qwen3_5": ModelType(
            "Qwen3.5 and Qwen3.6 (vision model), text only",
            wrapper=Wrapper(("qwen3_5_text",), tied=False),
            torch=False,
            gguf=True,
        ),
        "qwen3_5_moe": ModelType(
            "Qwen3.5 and Qwen3.6, mixture of experts (vision model), text only",
            wrapper=Wrapper(("qwen3_5_moe_text",), tied=False),
            torch=False,
            gguf=True,
        ),
    }
)


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries read from a GGUF file. Key and value heads have the same size."""
    dim = keys.size("ssm.state_size")
    value_heads = keys.size("ssm.time_step_rank")
    inner = keys.size("ssm.inner_size")
    if inner != dim * value_heads:
        raise keys.error(
            "ssm.inner_size",
            inner,
            f"must equal ssm.time_step_rank={value_heads} x ssm.state_size={dim}",
        )
    # GGUF files store value heads in tiles. A tile has one value head for each key head.
    return {
        "layer_types": [LINEAR if own else FULL for own in _recurrent(keys)],
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "linear_num_key_heads": keys.size("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        TILED_HEADS: True,
    }


def _gguf_moe_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries for a mixture with a shared expert, read from a GGUF file."""
    return {
        **_gguf_config(keys, config),
        **gguf_experts(keys),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
    }


def _recurrent(keys: Keys) -> list[bool]:
    """Return a list that is True for layers with recurrent state.

    The file gives a list, or the interval of layers with attention. Layers for multi-token
    prediction are left out.
    """
    key = "attention.recurrent_layers"
    layers = keys.layers()
    given = keys.header.values.get(keys.name(key))
    if given is None:
        step = keys.optional_size("full_attention_interval") or 4
        return [(index + 1) % step != 0 for index in range(layers)]
    if not isinstance(given, np.ndarray) or given.dtype != np.bool_ or len(given) != keys.blocks():
        said = given.tolist()[:8] if isinstance(given, np.ndarray) else given
        raise keys.error(key, said, f"must be true or false for each of {keys.blocks()} blocks")
    return [bool(one) for one in given[:layers]]


_LAYER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.decay",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_KEYS = SSM_SIZES | {
    "rope.dimension_sections",
    "full_attention_interval",
    "attention.recurrent_layers",
    "nextn_predict_layers",
}
GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "qwen35": GgufArchitecture(
            "qwen3_5_text",
            {**MATRICES, **_LAYER, **HEAD_NORMS},
            norm_offset=1.0,
            keys=_KEYS,
            config=_gguf_config,
        ),
        "qwen35moe": GgufArchitecture(
            "qwen3_5_moe_text",
            {
                **MATRICES,
                **_LAYER,
                **HEAD_NORMS,
                **EXPERTS,
                **SHARED_EXPERT,
                "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
            },
            norm_offset=1.0,
            experts=True,
            keys=_KEYS | EXPERT_KEYS | {"expert_shared_feed_forward_length"},
            config=_gguf_moe_config,
        ),
    }
)
