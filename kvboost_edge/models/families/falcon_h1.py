"""Falcon-H1: Mamba2 and attention in parallel, with multipliers on inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.family import Family, ModelType
from kvboost_edge.models.families.fields import integer_of, number_of, size_of
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import (
    MATRICES,
    SSM_SIZES,
    STATE_SPACE,
    GgufArchitecture,
)
from kvboost_edge.models.families.layers import PARALLEL, LayerFactors
from kvboost_edge.models.families.moe import flag_of
from kvboost_edge.models.families.ssm import (
    MAMBA_KEYS,
    Hybrid,
    gguf_heads,
    ssd_mixer,
    ssd_names,
    time_limit_of,
)

__all__ = ["GGUF", "MODEL_TYPES"]

Config = Mapping[str, Any]

_USUAL = {
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
# Allowed range of a multiplier.
_LEAST = 1e-6
_MOST = 1e6


def _complete(config: Config) -> Config:
    """Return the config with the names that Granite uses for multipliers.

    The multiplier of the keys is folded into the scale of the attention scores.
    """
    heads = size_of(config, "num_attention_heads")
    hidden = size_of(config, "hidden_size")
    if heads is None or hidden is None:
        return config  # the error is raised when the sizes are read
    dim = size_of(config, "head_dim") or hidden // heads
    return {
        **config,
        "attention_multiplier": _factor(config, "key_multiplier") / math.sqrt(dim),
        "embedding_multiplier": _factor(config, "embedding_multiplier"),
        "logits_scaling": 1 / _factor(config, "lm_head_multiplier"),
    }


def _factor(config: Config, key: str) -> float:
    return 1.0 if config.get(key) is None else number_of(config, key, _LEAST, _MOST)


def _factors(config: Config, key: str, count: int) -> list[float]:
    given = config.get(key)
    if given is None:
        return [1.0] * count
    if not isinstance(given, (list, tuple)) or len(given) != count:
        raise ModelFormatError(f"config: {key}={given!r:.60} must be a list of {count} numbers")
    return [number_of({key: one}, key, _LEAST, _MOST) for one in given]


def _hybrid(config: Config, layers: int) -> Hybrid:
    """Return the Mamba2 mixer, which is the same in all layers.

    Its norm is before the gate, after the gate, or absent.
    """
    # Without mamba_d_ssm, the total width of the heads is mamba_expand times the hidden size.
    given = {
        **_USUAL,
        **{
            key: value for key, value in config.items() if value is not None or key == "mamba_d_ssm"
        },
    }
    if given["mamba_d_ssm"] is None:
        given["mamba_d_ssm"] = integer_of(given, "mamba_expand", 1) * integer_of(
            given, "hidden_size", 1
        )
    width = integer_of(given, "mamba_d_ssm", 1)
    heads = integer_of(given, "mamba_n_heads", 1)
    if given["mamba_d_head"] == "auto":
        given["mamba_d_head"] = max(width // heads, 1)
    dim = integer_of(given, "mamba_d_head", 1)
    if heads * dim != width:
        raise ModelFormatError(
            f"mamba_n_heads={heads} x mamba_d_head={dim} must equal mamba_d_ssm={width}"
        )
    norm = "gated_after" if flag_of(given, "mamba_norm_before_gate", True) else "gated_before"
    norm = norm if flag_of(given, "mamba_rms_norm", False) else "none"
    mixer = ssd_mixer(given, MAMBA_KEYS, norm, time_limit_of(given))
    names = ssd_names("mamba", mixer, conv_bias=flag_of(given, "mamba_conv_bias", True))
    return Hybrid((PARALLEL,) * layers, mixer, names)


def _layer_factors(config: Config) -> LayerFactors:
    """Return the multipliers of a layer's matrices."""
    # The mixer's input projection [z | x | B | C | dt] has one multiplier per part. The multipliers
    # of x, B and C are applied in the convolution, so they are stored relative to that of z.
    z, x, b, c, dt = _factors(config, "ssm_multipliers", 5)
    # The checkpoint applies the gate's multiplier before the activation. Here it scales both gate
    # and up, and the output of down is divided by it.
    gate, down = _factors(config, "mlp_multipliers", 2)
    into = _factor(config, "ssm_in_multiplier")
    return LayerFactors(
        attention=_factor(config, "attention_in_multiplier"),
        attention_out=_factor(config, "attention_out_multiplier"),
        mixer=into * z,
        mixer_conv=(x / z, b / z, c / z),
        mixer_gates=into * dt,
        mixer_out=_factor(config, "ssm_out_multiplier"),
        mlp=gate,
        mlp_out=down / gate,
    )


MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "falcon_h1": ModelType(
            "Falcon-H1, Mamba2 and attention in parallel in each layer",
            Family(
                qkv_bias=False,
                eps=1e-5,
                norm_names=("input_layernorm", "pre_ff_layernorm"),
                multipliers=True,
                last_norm="model.final_layernorm",
                kv_heads=8,
                complete=_complete,
                hybrid=_hybrid,
                factors=_layer_factors,
                mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
                unless=(
                    ("attention_bias", (None, False)),
                    ("mlp_bias", (None, False)),
                    ("mamba_proj_bias", (None, False)),
                    ("projectors_bias", (None, False)),
                    ("hidden_act", (None, "silu", "swish")),
                ),
            ),
            torch=False,
            gguf=True,
        )
    }
)


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries read from a GGUF file."""
    # The converter folds the multipliers into the weights, so none remain if the model has a
    # separate head. A tied head would need its own multiplier, which the file does not store.
    tensors = keys.header.tensors
    (heads, dim) = gguf_heads(keys)
    if "output.weight" not in tensors:
        raise ModelFormatError(
            f"{keys.header.path} lacks tensor 'output.weight': with a tied head, the file does not "
            "store the head's multiplier; use a file with a separate head"
        )
    # llama.cpp applies the optional norm after the gate.
    return {
        "mamba_d_ssm": heads * dim,
        "mamba_n_heads": heads,
        "mamba_d_head": dim,
        "mamba_n_groups": keys.size("ssm.group_count"),
        "mamba_d_state": keys.size("ssm.state_size"),
        "mamba_d_conv": keys.size("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        "mamba_rms_norm": any(name.endswith(".ssm_norm.weight") for name in tensors),
        "mamba_norm_before_gate": False,
    }


GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "falcon-h1": GgufArchitecture(
            "falcon_h1",
            {
                **{name: to.replace("mlp.", "feed_forward.") for name, to in MATRICES.items()},
                **STATE_SPACE,
                "attn_norm": "input_layernorm",
                "ffn_norm": "pre_ff_layernorm.weight",
            },
            outer={"output_norm": "model.final_layernorm"},
            keys=SSM_SIZES,
            config=_gguf_config,
        )
    }
)
