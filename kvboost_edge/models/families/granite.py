"""Granite models, which scale embeddings, residual, attention scores and logits by multipliers.

Some have experts, attention sinks (granite_swa), or Mamba2 layers besides attention (Granite 4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.family import Family, ModelType
from kvboost_edge.models.families.fields import integer_of
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import (
    EXPERTS,
    MATRICES,
    PRE_NORMS,
    SSM_SIZES,
    STATE_SPACE,
    GgufArchitecture,
)
from kvboost_edge.models.families.moe import (
    LOCAL_KEYS,
    ExpertNames,
    Experts,
    experts_of,
    gguf_experts,
)
from kvboost_edge.models.families.ssm import (
    FULL,
    LINEAR,
    MAMBA_KEYS,
    Hybrid,
    hybrid_of,
    kinds_of_layers,
    ssd_mixer,
    ssd_names,
    time_limit_of,
)
from kvboost_edge.models.families.windows import all_but_first_of

__all__ = ["GGUF", "MODEL_TYPES"]

Config = Mapping[str, Any]

# Layer types in published configs -> current names in transformers.
_OLDER = {"mamba": LINEAR, "attention": FULL}
_USUAL = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "hidden_act": "silu",
}
# Gate, up and down of Granite 4's dense MLP or shared expert.
_SHARED = ("shared_mlp.gate_proj", "shared_mlp.up_proj", "shared_mlp.output_linear")


def _complete(config: Config) -> Config:
    """Return the config with current names and defaults.

    RoPE is off by default. Without a list of layer types, every layer has recurrent state.
    """
    types = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(types, (list, tuple)):
        types = [_OLDER.get(one, one) if isinstance(one, str) else one for one in types]
    experts = config.get("num_local_experts", 8)
    usual = {"shared_intermediate_size": 1024, "position_embedding_type": None}
    return {
        **usual,
        **config,
        "layer_types": types,
        "num_local_experts": 0 if experts is None else experts,
    }


def _hybrid(config: Config, layers: int) -> Hybrid | None:
    """Return the Mamba2 layers according to layer_types, or None if all layers have attention."""
    types = config["layer_types"] or [LINEAR] * layers
    kinds = kinds_of_layers({**config, "layer_types": types}, layers, LINEAR, "ssd", None)
    if "ssd" not in kinds:
        return None
    given = {**_USUAL, **{key: value for key, value in config.items() if value is not None}}
    for key, allowed in (
        ("mamba_conv_bias", (True, False)),
        ("mamba_proj_bias", (False,)),
        ("hidden_act", ("silu", "swish")),
    ):
        if not any(
            given[key] is one or (isinstance(one, str) and given[key] == one) for one in allowed
        ):
            raise ModelFormatError(
                f"{key}={given[key]!r} is not supported for Mamba2 layers (supported: {allowed})"
            )
    expand, hidden, heads = (
        integer_of(given, key, 1) for key in ("mamba_expand", "hidden_size", "mamba_n_heads")
    )
    if given["mamba_d_head"] == "auto":
        given["mamba_d_head"] = max(expand * hidden // heads, 1)
    dim = integer_of(given, "mamba_d_head", 1)
    if heads * dim != expand * hidden:
        raise ModelFormatError(
            f"mamba_n_heads={heads} x mamba_d_head={dim} must equal mamba_expand={expand} x "
            f"hidden_size={hidden}"
        )
    mixer = ssd_mixer(given, MAMBA_KEYS, "gated_before", time_limit_of(given))
    return hybrid_of(kinds, mixer, ssd_names("mamba", mixer, conv_bias=given["mamba_conv_bias"]))


def _experts(config: Config, layers: int) -> Experts:
    """Return the mixture of experts. Routing weights are the softmax of the selected logits."""
    names = ExpertNames("block_sparse_moe.router.layer", "block_sparse_moe.experts.")
    return experts_of(
        config, LOCAL_KEYS, (8, 2, None), [True] * layers, score="chosen", names=names
    )


def _hybrid_experts(config: Config, layers: int) -> Experts | None:
    """Return a mixture of experts with a shared expert, or None for a dense model."""
    if integer_of(config, "num_local_experts", 0) == 0:
        return None
    found = _experts(config, layers)
    width = integer_of(config, "shared_intermediate_size", 1)
    return dataclasses.replace(found, shared=width, names=found.names._replace(shared=_SHARED))


MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "granite": ModelType(
            "Granite, scaled attention, residual and logits",
            Family(multipliers=True, no_rope="typed"),
            gguf=True,
            onnx=True,
        ),
        "granitemoe": ModelType(
            "Granite 3, mixture of experts",
            Family(multipliers=True, no_rope="typed", experts=_experts),
            gguf=True,
        ),
        "granite_swa": ModelType(
            "Granite, local and global layers, attention sinks",
            Family(
                multipliers=True,
                tied=True,
                eps=1e-5,
                sinks=True,
                layer_thetas=True,
                windows=all_but_first_of(4, 128),
            ),
        ),
        "granitemoehybrid": ModelType(
            "Granite 4, Mamba2 and attention, mixture of experts with a shared expert; "
            "without Mamba2 also on torch",
            Family(
                multipliers=True,
                no_rope="typed",
                inner="shared_intermediate_size",
                complete=_complete,
                mlp=_SHARED,
                mlp_whole="shared_mlp.input_linear",
                hybrid=_hybrid,
                may_all_attend=True,
                experts=_hybrid_experts,
            ),
            gguf=True,
        ),
    }
)


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    # In this architecture, the key says whether the model uses RoPE at all.
    turned = keys.header.value(keys.name("rope.scaling.finetuned"), bool)
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    found: dict[str, Any] = {
        name: value for name, key in names.items() if (value := keys.number(key)) is not None
    }
    return found if turned is not False else {**found, "position_embedding_type": "nope"}


def _gguf_moe_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {**_gguf_config(keys, config), **gguf_experts(keys, "num_local_experts")}


def _gguf_hybrid_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries of a Granite 4 model, read from a GGUF file."""
    # Without the key for RoPE, the model is assumed to use it, like older Granite models. Published
    # models have the key. Without a scale of attention scores (as in Bamba's files), the scale is 1
    # / sqrt(head_dim), as in llama.cpp.
    usual = {"position_embedding_type": "rope", "attention_multiplier": config["head_dim"] ** -0.5}
    return {**usual, **_gguf_config(keys, config), **_gguf_mixer(keys, config)}


def _gguf_mixer(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries with the sizes of Mamba2, experts and MLPs.

    Layers without KV heads have recurrent state.
    """
    heads = keys.size("ssm.time_step_rank")
    inner = keys.size("ssm.inner_size")
    hidden = config["hidden_size"]
    if inner % heads or inner % hidden:
        wanted = (
            f"must be a multiple of the number of heads, {heads}, and of the hidden size, {hidden}"
        )
        raise keys.error("ssm.inner_size", inner, wanted)
    attends = keys.sizes("attention.head_count_kv", 0)
    shared = keys.optional_size("expert_shared_feed_forward_length", 0)
    mixed = keys.optional_size("expert_count", 0)
    # If the file gives the width of the shared expert, MLPs have that width. The value may be 0 in
    # files of models without experts.
    return {
        **(gguf_experts(keys, "num_local_experts") if mixed else {"num_local_experts": 0}),
        "shared_intermediate_size": shared or config["intermediate_size"],
        "layer_types": [FULL if count else LINEAR for count in attends],
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // hidden,
        "mamba_n_groups": keys.size("ssm.group_count"),
        "mamba_d_state": keys.size("ssm.state_size"),
        "mamba_d_conv": keys.size("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in keys.header.tensors),
    }


_MULTIPLIERS = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})
_IN_BLOCK = {
    **{name: to.replace("mlp.", "block_sparse_moe.") for name, to in EXPERTS.items()},
    "ffn_gate_inp": "block_sparse_moe.router.layer",
}
_SHARED_MLP = {
    f"ffn_{part}{ending}": to
    for ending in ("", "_shexp")
    for part, to in zip(("gate", "up", "down"), _SHARED, strict=True)
}
GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "granite": GgufArchitecture(
            "granite",
            {**MATRICES, **PRE_NORMS},
            permuted=True,
            # Granite 4 models without Mamba2 layers have the sizes of Mamba2 and of the shared
            # expert, but none of these tensors. Their MLP has the width of feed_forward_length.
            keys=_MULTIPLIERS | SSM_SIZES | {"expert_shared_feed_forward_length"},
            config=_gguf_config,
        ),
        "granitemoe": GgufArchitecture(
            "granitemoe",
            {**MATRICES, **PRE_NORMS, **_IN_BLOCK},
            permuted=True,
            experts=True,
            keys=_MULTIPLIERS,
            config=_gguf_moe_config,
        ),
        "granitehybrid": GgufArchitecture(
            "granitemoehybrid",
            {**MATRICES, **PRE_NORMS, **STATE_SPACE, **_IN_BLOCK, **_SHARED_MLP},
            permuted=True,
            experts=True,
            no_keys=True,
            keys=_MULTIPLIERS | SSM_SIZES | {"expert_shared_feed_forward_length"},
            config=_gguf_hybrid_config,
        ),
    }
)
