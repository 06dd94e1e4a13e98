"""Writer of hybrid models in GGUF files for tests, by the rules of llama.cpp's converters
(conversion/lfm2.py, conversion/qwen.py).

For models with more value heads than key heads, all value heads are written in tile order: the
first one of each key head, then the second ones.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGUFWriter

from helpers.gguf.falcon_h1 import falcon_tensors, write_falcon_sizes
from helpers.gguf.granite import granite_tensors, has_states, write_granite_sizes
from helpers.gguf.layers import Config, Tensors, named, write_sizes
from helpers.gguf.nemotron_h import nemotron_arch, nemotron_tensors, write_nemotron_sizes

HYBRID_ARCHS = {
    "lfm2": MODEL_ARCH.LFM2,
    "lfm2_moe": MODEL_ARCH.LFM2MOE,
    "qwen3_5_text": MODEL_ARCH.QWEN35,
    "qwen3_5": MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": MODEL_ARCH.QWEN35MOE,
    "qwen3_5_moe": MODEL_ARCH.QWEN35MOE,
    "granitemoehybrid": MODEL_ARCH.GRANITE_HYBRID,
    "nemotron_h": MODEL_ARCH.NEMOTRON_H,
    "falcon_h1": MODEL_ARCH.FALCON_H1,
}
# Key and value heads have one size, the shares of LFM2's experts have no scale, and llama.cpp
# expects biases in a state space's convolution.
HYBRID_FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {},
    "lfm2-plain": {},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "qwen3_5_text": {"linear_key_head_dim": 32},
    "qwen3_5_text-even": {},
    "qwen3_5_moe_text": {"linear_key_head_dim": 32},
    "qwen3_5": {"linear_key_head_dim": 32},
    "qwen3_5_moe": {"linear_key_head_dim": 32},
    "granitemoehybrid-h": {},
    "granitemoehybrid-groups": {"mamba_conv_bias": True},
    "granitemoehybrid-experts": {},
    "falcon_h1": {},
    # The norm follows the gate or is absent. The LM head is separate from the embedding; the file
    # holds both with their multipliers applied. Convolutions have biases: llama.cpp dies of a
    # signal without them.
    "falcon_h1-after": {"mamba_conv_bias": True},
    "nemotron_h": {},
    # Models with experts have no MLPs.
    "nemotron_h-moe": {
        "layers_block_type": ["full_attention", "moe", "linear_attention", "linear_attention"],
        "use_conv_bias": True,
    },
}
_OWN_TENSORS = {
    "granitemoehybrid": granite_tensors,
    "nemotron_h": nemotron_tensors,
    "falcon_h1": falcon_tensors,
}
_OWN_SIZES = {
    "granitemoehybrid": write_granite_sizes,
    "nemotron_h": write_nemotron_sizes,
    "falcon_h1": write_falcon_sizes,
}
_PLAIN_NORM = "linear_attn.norm.weight"


def is_hybrid(config: Config) -> bool:
    """Return whether a model has one of these architectures."""
    model_type = config["model_type"]
    return model_type in HYBRID_ARCHS and (model_type != "granitemoehybrid" or has_states(config))


def arch_of(config: Config) -> MODEL_ARCH:
    """Return the architecture of a hybrid model."""
    return (
        nemotron_arch(config)
        if config["model_type"] == "nemotron_h"
        else HYBRID_ARCHS[config["model_type"]]
    )


def tiled_heads(values: np.ndarray, axis: int, config: Config, dim: int) -> np.ndarray:
    """Reorder the value heads of `dim` entries each along an axis from key-head order into tile
    order.
    """
    keys = config["linear_num_key_heads"]
    heads = config["linear_num_value_heads"]
    before = values.shape[:axis]
    behind = values.shape[axis + 1 :]
    cut = values.reshape(*before, keys, heads // keys, dim, *behind)
    return np.ascontiguousarray(cut.swapaxes(axis, axis + 1)).reshape(values.shape)


def hybrid_tensors(tensors: Tensors, config: Config) -> Tensors:
    """Return float32 tensors under GGUF's names, from those of transformers without the prefix of a
    nested language model.
    """
    if config["model_type"] in _OWN_TENSORS:
        return _OWN_TENSORS[config["model_type"]](tensors, config)

    def parts(name: str, values: np.ndarray) -> Tensors:
        found = _split_experts(name, _changed(name, values, config))
        return {_renamed(new): part for new, part in found.items()}

    return named(tensors, HYBRID_ARCHS[config["model_type"]], config, parts)


def _changed(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    if "conv.conv" in name:
        return values.squeeze(1)
    if "linear_attn." in name:
        values = _with_tiled_heads(name, values, config)
    if name.endswith("A_log"):
        return -np.exp(values.astype(np.float64)).astype(np.float32)
    if "conv1d" in name:
        return values.squeeze()
    is_offset = config["model_type"].startswith("qwen3_5") and name.endswith("norm.weight")
    return values + np.float32(1) if is_offset and not name.endswith(_PLAIN_NORM) else values


def _with_tiled_heads(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    dim = config["linear_value_head_dim"]
    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate([values[: 2 * keys], tiled_heads(values[2 * keys :], 0, config, dim)])
    if "in_proj_z" in name:
        return tiled_heads(values, 0, config, dim)
    if "out_proj" in name:
        return tiled_heads(values, 1, config, dim)
    return values if name.endswith(_PLAIN_NORM) else tiled_heads(values, 0, config, 1)


def _renamed(name: str) -> str:
    name = name.replace(".expert_bias", ".expert_bias.bias").replace(".dt_bias", ".dt_proj.bias")
    return name.removeprefix("model.") if "feed_forward.experts." in name else name


def _split_experts(name: str, values: np.ndarray) -> Tensors:
    if ".mlp.experts." not in name:
        return {name: values}
    base = name.removesuffix(".weight")
    if not base.endswith("gate_up_proj"):
        return {f"{base}.weight": values}
    gate, up = np.split(values, 2, axis=1)
    base = base.removesuffix("gate_up_proj")
    return {f"{base}gate_proj.weight": gate, f"{base}up_proj.weight": up}


def write_hybrid_sizes(writer: GGUFWriter, config: Config) -> None:
    """Write the keys of `TextModel.set_gguf_parameters` and those of individual converters."""
    if config["model_type"] in _OWN_SIZES:
        _OWN_SIZES[config["model_type"]](writer, config)
        return
    rope = config["rope_parameters"]
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    write_sizes(
        writer,
        config,
        block_count="num_hidden_layers",
        context_length="max_position_embeddings",
        embedding_length="hidden_size",
        head_count="num_attention_heads",
    )
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.get("num_experts"):
        write_sizes(
            writer,
            config,
            expert_count="num_experts",
            expert_used_count="num_experts_per_tok",
            expert_feed_forward_length="moe_intermediate_size",
        )
    if config["model_type"].startswith("lfm2"):
        write_sizes(
            writer,
            config,
            layer_norm_rms_eps="norm_eps",
            vocab_size="vocab_size",
            shortconv_l_cache="conv_L_cache",
        )
        writer.add_head_count_kv(
            [config["num_key_value_heads"] if attending else 0 for attending in attends]
        )
        writer.add_feed_forward_length(_lfm2_width(config))
        if config["model_type"] == "lfm2_moe":
            writer.add_leading_dense_block_count(config["num_dense_layers"])
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        return
    write_sizes(
        writer,
        config,
        head_count_kv="num_key_value_heads",
        layer_norm_rms_eps="rms_norm_eps",
        key_length="head_dim",
        value_length="head_dim",
        ssm_conv_kernel="linear_conv_kernel_dim",
        ssm_state_size="linear_key_head_dim",
        ssm_group_count="linear_num_key_heads",
        ssm_time_step_rank="linear_num_value_heads",
    )
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    # Not all test models attend in every n-th layer, which is all that the converters can write.
    writer.add_array(
        f"{writer.arch}.attention.recurrent_layers", [not attending for attending in attends]
    )
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    else:
        writer.add_feed_forward_length(config["intermediate_size"])


def _lfm2_width(config: Config) -> int:
    width = config["intermediate_size"]
    if config["model_type"] == "lfm2_moe" or not config["block_auto_adjust_ff_dim"]:
        return int(width)
    width = int(2 * width / 3)
    multiple = config["block_multiple_of"]
    if config["block_ffn_dim_multiplier"] is not None:
        width = int(config["block_ffn_dim_multiplier"] * width)
    return int(multiple * ((width + multiple - 1) // multiple))


def draft_layer(tensors: Tensors, layers: int) -> Tensors:
    """Return the tensors of an additional last layer that drafts one more token: those of a
    full-attention layer, which `tensors` must contain, and those that join it to the model.
    """
    full = next(name.split(".")[1] for name in tensors if ".attn_q." in name)
    found = {
        name.replace(f"blk.{full}.", f"blk.{layers}."): values
        for name, values in tensors.items()
        if name.startswith(f"blk.{full}.")
    }
    hidden = tensors["output_norm.weight"].size
    ones = {
        f"blk.{layers}.nextn.{name}.weight": np.ones(hidden, np.float32)
        for name in ("enorm", "hnorm")
    }
    return {
        **found,
        **ones,
        f"blk.{layers}.nextn.eh_proj.weight": np.ones((hidden, 2 * hidden), np.float32),
    }
