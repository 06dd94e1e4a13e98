"""What the metadata of a hybrid says of its layers that keep a state, as fields of a config."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.ssm import TILED_HEADS
from kvboost_edge.models.gguf.experts import experts

__all__ = ["falcon_h1", "granite_hybrid", "lfm2", "lfm2_moe", "nemotron_h", "qwen35", "qwen35_moe"]

_SIGMOID = 2  # of expert_gating_func


def lfm2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Layers without key heads are convolutions. The width of the MLP is what follows from
    transformers' already.
    """
    heads = keys.sizes("attention.head_count_kv", 0)
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": keys.size("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Shares are sigmoids divided by their sum, as llama.cpp has them."""
    gating = keys.size("expert_gating_func")
    if gating != _SIGMOID:
        raise keys.error("expert_gating_func", gating, f"must be {_SIGMOID}, the sigmoid")
    return {
        **lfm2(keys, config),
        **experts(keys),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "num_dense_layers": keys.optional_size("leading_dense_block_count", 0) or 0,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def qwen35(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Heads of keys and of values have one size. Value heads stand in the order of tiles: that of
    key head 0, then of 1, and so on, again and again.
    """
    dim = keys.size("ssm.state_size")
    value_heads = keys.size("ssm.time_step_rank")
    inner = keys.size("ssm.inner_size")
    if inner != dim * value_heads:
        raise keys.error("ssm.inner_size", inner, f"must be {value_heads} value heads of {dim}")
    return {
        "layer_types": [
            "linear_attention" if own else "full_attention" for own in _recurrent(keys)
        ],
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "linear_num_key_heads": keys.size("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        TILED_HEADS: True,
    }


def qwen35_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """The same with experts, beside one that all tokens share."""
    return {
        **qwen35(keys, config),
        **experts(keys),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
    }


def granite_hybrid(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Layers without key heads keep a state. The width of the MLPs is that of the shared expert,
    where a file says it; a file of a model without experts may say that there are none.
    """
    heads = keys.size("ssm.time_step_rank")
    inner = keys.size("ssm.inner_size")
    hidden = config["hidden_size"]
    if inner % heads or inner % hidden:
        wanted = f"must be a multiple of {heads} heads and of {hidden}, the hidden size"
        raise keys.error("ssm.inner_size", inner, wanted)
    attends = keys.sizes("attention.head_count_kv", 0)
    shared = keys.optional_size("expert_shared_feed_forward_length", 0)
    mixed = keys.optional_size("expert_count", 0)
    return {
        **(experts(keys, "num_local_experts") if mixed else {"num_local_experts": 0}),
        "shared_intermediate_size": shared or config["intermediate_size"],
        "layer_types": ["full_attention" if count else "linear_attention" for count in attends],
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // hidden,
        "mamba_n_groups": keys.size("ssm.group_count"),
        "mamba_d_state": keys.size("ssm.state_size"),
        "mamba_d_conv": keys.size("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in keys.header.tensors),
    }


def _recurrent(keys: Keys) -> list[bool]:
    """Whether each of the model's own layers keeps a state: a list says so, or every n-th layer
    attends.
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


def nemotron_h(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """A layer with key heads attends, one with an MLP's width has an MLP or experts, one with
    neither keeps a state.
    """
    tensors = keys.header.tensors
    (heads, dim) = _ssm_heads(keys)
    found = {
        "layers_block_type": _kinds_of_nemotron(keys),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": heads,
        "mamba_head_dim": dim,
        "n_groups": keys.size("ssm.group_count"),
        "ssm_state_size": keys.size("ssm.state_size"),
        "conv_kernel": keys.size("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in tensors),
    }
    return {**found, **_nemotron_experts(keys)} if "moe" in found["layers_block_type"] else found


def _ssm_heads(keys: Keys) -> tuple[int, int]:
    """Heads of a mixer, and their dim."""
    heads = keys.size("ssm.time_step_rank")
    inner = keys.size("ssm.inner_size")
    if inner % heads:
        raise keys.error("ssm.inner_size", inner, f"must be a multiple of {heads} heads")
    return heads, inner // heads


def _kinds_of_nemotron(keys: Keys) -> list[str]:
    found = []
    places = ("attention.head_count_kv", "feed_forward_length")
    for index, (count, width) in enumerate(
        zip(*(keys.sizes(place, 0) for place in places), strict=True)
    ):
        if count and width:
            raise keys.error(
                "feed_forward_length",
                width,
                f"of layer {index}, which has {count} key heads as well",
            )
        has_router = f"blk.{index}.ffn_gate_inp.weight" in keys.header.tensors
        found.append(
            "full_attention"
            if count
            else "moe"
            if has_router
            else "mlp"
            if width
            else "linear_attention"
        )
    return found


def _nemotron_experts(keys: Keys) -> dict[str, Any]:
    """Shares are sigmoids."""
    gating = keys.optional_size("expert_gating_func", 0)
    if gating not in (None, _SIGMOID):
        raise keys.error("expert_gating_func", gating, f"must be {_SIGMOID}, the sigmoid")
    return {
        **experts(keys, "n_routed_experts"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
        "n_shared_experts": keys.optional_size("expert_shared_count"),
        "norm_topk_prob": bool(keys.header.value(keys.name("expert_weights_norm"), bool)),
        "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
        "n_group": keys.optional_size("expert_group_count", 0) or None,
        "moe_latent_size": keys.optional_size("moe_latent_size"),
    }


def falcon_h1(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """The converter multiplies weights with what the config says, so nothing is left to be
    multiplied where the head is a tensor of its own; an embedding has its own number in it, and a
    file does not say that of the head. Where there is a norm, llama.cpp has it behind the gate.
    """
    tensors = keys.header.tensors
    (heads, dim) = _ssm_heads(keys)
    if "output.weight" not in tensors:
        raise ModelFormatError(
            f"{keys.header.path} lacks tensor 'output.weight': the head is the embedding, of which "
            "the file holds a multiple, and does not say which"
        )
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
