"""LFM2: short convolutions and attention, with MLPs or a mixture of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.family import Family, ModelType, Wrapper
from kvboost_edge.models.families.fields import integer_of, number_of, size_of
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import EXPERT_KEYS, GgufArchitecture
from kvboost_edge.models.families.mixers import Mixer
from kvboost_edge.models.families.moe import (
    SIGMOID,
    STEP_KEYS,
    ExpertNames,
    Experts,
    experts_of,
    flag_of,
    gguf_experts,
)
from kvboost_edge.models.families.ssm import (
    CONV_NAMES,
    FULL,
    GROUP,
    MOST_TAPS,
    Hybrid,
    check_most,
    hybrid_of,
    kinds_of_layers,
)

__all__ = ["GGUF", "MODEL_TYPES"]

Config = Mapping[str, Any]


def _hybrid(config: Config, layers: int) -> Hybrid:
    """Return the layers with short convolutions.

    They follow from layer_types, or are the layers that full_attn_idxs does not list.
    """
    kinds = kinds_of_layers(config, layers, "conv", "conv", _by_indices(config, layers))
    given = {"conv_L_cache": 3, **config}
    length = integer_of(given, "conv_L_cache", 2)
    hidden = integer_of(config, "hidden_size", 1)
    check_most("conv_L_cache", length, MOST_TAPS)
    if "conv" in kinds and hidden % GROUP:
        raise ModelFormatError(
            f"hidden_size={hidden} must be a multiple of {GROUP} for the recurrent kernels"
        )
    return hybrid_of(kinds, Mixer("conv", length - 1, hidden), CONV_NAMES)


def _by_indices(config: Config, layers: int) -> list[str] | None:
    indices = config.get("full_attn_idxs")
    if indices is None:
        return None
    if not isinstance(indices, (list, tuple)) or any(
        isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < layers for i in indices
    ):
        raise ModelFormatError(
            f"full_attn_idxs={indices!r:.200} must be a list of layer indices below {layers}"
        )
    return [FULL if index in indices else "conv" for index in range(layers)]


def _complete(config: Config) -> Config:
    """Return the config with Llama's key names and the actual width of the MLP.

    LFM2 has its own names for rms_norm_eps, tie_word_embeddings and intermediate_size. The MLP's
    width is computed from intermediate_size unless block_auto_adjust_ff_dim is false.
    """
    found = dict(config)
    for old, name in (
        ("norm_eps", "rms_norm_eps"),
        ("tie_embedding", "tie_word_embeddings"),
        ("block_ff_dim", "intermediate_size"),
    ):
        if config.get(old) is not None:
            found[name] = config[old]
    if config.get("model_type") == "lfm2":
        found["intermediate_size"] = _adjusted_width(found)
    return found


def _adjusted_width(config: Config) -> int:
    """Return the actual width of the MLP.

    It is two thirds of intermediate_size, times block_ffn_dim_multiplier, rounded up to a multiple
    of block_multiple_of. If block_auto_adjust_ff_dim is false, it is intermediate_size.
    """
    usual = {
        "intermediate_size": 12288,
        "block_multiple_of": 256,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
    }
    given = {**usual, **config}
    width = size_of(given, "intermediate_size") or 0
    adjusts = given["block_auto_adjust_ff_dim"]
    if not isinstance(adjusts, bool):
        raise ModelFormatError(
            f"config: block_auto_adjust_ff_dim={adjusts!r} must be true or false"
        )
    if not adjusts:
        return width
    width = int(2 * width / 3)
    if given["block_ffn_dim_multiplier"] is not None:
        width = int(number_of(given, "block_ffn_dim_multiplier", 1e-3, 1e3) * width)
        multiple = integer_of(given, "block_multiple_of", 1)
        width = multiple * ((width + multiple - 1) // multiple)
    if width < 1:
        raise ModelFormatError(
            f"intermediate_size={given['intermediate_size']} gives an MLP of width 0"
        )
    return width


def _experts(config: Config, layers: int) -> Experts:
    """Return the mixture of experts.

    Routing weights are the sigmoids of the selected logits, divided by their sum and scaled. The
    router may add a bias when it selects experts. The first num_dense_layers layers are dense.
    """
    full = {"num_dense_layers": 2, "routed_scaling_factor": 1.0, **config}
    dense = integer_of(full, "num_dense_layers", 0)
    bias = "feed_forward.expert_bias" if flag_of(config, "use_expert_bias", True) else ""
    names = ExpertNames("feed_forward.gate", "feed_forward.experts.", ("w1", "w3", "w2"), bias)
    return experts_of(
        full,
        STEP_KEYS,
        (32, 4, 1792),
        [index >= dense for index in range(layers)],
        names=names,
        score="sigmoid",
        renorm="add" if flag_of(config, "norm_topk_prob", True) else "",
        eps=1e-6,
        scale=number_of(full, "routed_scaling_factor", 1e-6, 1e6),
    )


_FAMILY = Family(
    qkv_bias=False,
    tied=True,
    eps=1e-5,
    theta=1e6,
    head_norm="head",
    head_norms=("q_layernorm", "k_layernorm"),
    norm_names=("operator_norm", "ffn_norm"),
    last_norm="model.embedding_norm",
    out="self_attn.out_proj",
    mlp=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    complete=_complete,
    hybrid=_hybrid,
    unless=(("conv_bias", (None, False)),),
)
MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "lfm2": ModelType(
            "LFM2 and LFM2.5, short convolutions and attention", _FAMILY, torch=False, gguf=True
        ),
        "lfm2_moe": ModelType(
            "LFM2, mixture of experts with a sigmoid router",
            dataclasses.replace(_FAMILY, experts=_experts),
            torch=False,
            gguf=True,
        ),
        "lfm2_vl": ModelType(
            "LFM2 (vision model), text only",
            wrapper=Wrapper(("lfm2",), tied=True),
            torch=False,
        ),
    }
)


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries read from a GGUF file.

    Layers without KV heads are convolutions. The file stores the actual width of the MLP.
    """
    heads = keys.sizes("attention.head_count_kv", 0)
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": keys.size("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _gguf_moe_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries for a mixture of experts, read from a GGUF file.

    Routing weights are normalized sigmoids, as in llama.cpp.
    """
    gating = keys.size("expert_gating_func")
    if gating != SIGMOID:
        raise keys.error("expert_gating_func", gating, f"must be {SIGMOID} (sigmoid)")
    return {
        **_gguf_config(keys, config),
        **gguf_experts(keys),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "num_dense_layers": keys.optional_size("leading_dense_block_count", 0) or 0,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


_LAYER = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_MOE_LAYER = {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.w1",
    "ffn_up_exps": "feed_forward.experts.w3",
    "ffn_down_exps": "feed_forward.experts.w2",
    "exp_probs_b": "feed_forward.expert_bias",
}
# Despite its name, this norm is applied after the last layer.
_OUTER = {"token_embd_norm": "model.embedding_norm"}
GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "lfm2": GgufArchitecture(
            "lfm2",
            _LAYER,
            outer=_OUTER,
            keys=frozenset({"shortconv.l_cache"}),
            no_keys=True,
            config=_gguf_config,
        ),
        "lfm2moe": GgufArchitecture(
            "lfm2_moe",
            {**_LAYER, **_MOE_LAYER},
            outer=_OUTER,
            experts=True,
            no_keys=True,
            keys=EXPERT_KEYS
            | {"shortconv.l_cache", "leading_dense_block_count", "expert_gating_func"},
            config=_gguf_moe_config,
        ),
    }
)
