"""Experts in GGUF files for tests, by the rules of llama.cpp's converters."""

from __future__ import annotations

import re

import numpy as np
from gguf import ExpertGatingFuncType, GGUFWriter

from helpers.gguf.layers import Config, Tensors, write_sizes

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def merged_experts(tensors: Tensors) -> Tensors:
    """Stack all experts of a matrix into one tensor in the order of their numbers, and split
    Granite's gate and up projections. Axes of size 1 are removed from other tensors.
    """
    if any(name.endswith("gate_up_proj_bias") for name in tensors):
        return _of_gpt_oss(tensors)
    found = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is not None:
            stacks.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = values
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            base = name.removesuffix("input_linear.weight")
            gate, up = np.split(values, 2, axis=-2)
            found[f"{base}experts.w1.weight"] = gate
            found[f"{base}experts.w3.weight"] = up
        elif name.endswith("e_score_correction_bias"):
            found[name.replace("_bias", ".bias")] = values.squeeze()
        else:
            found[name] = values.squeeze() if name.endswith("shared_expert_gate.weight") else values
    for name, parts in stacks.items():
        found[name] = np.stack([parts[index] for index in range(len(parts))])
    return found


def _of_gpt_oss(tensors: Tensors) -> Tensors:
    """Convert gpt-oss as its own converter does. Columns become rows; even rows are the gate and
    odd rows the up projection. MXFP4 becomes floats.
    """
    found = {}
    for name, values in tensors.items():
        if name.endswith("_blocks"):
            name, values = (
                name.removesuffix("_blocks"),
                dequantized(values, tensors[name.replace("_blocks", "_scales")]),
            )
        elif name.endswith(("gate_up_proj", "down_proj")):
            values = values.swapaxes(1, 2)
        elif name.endswith("_scales"):
            continue
        ending = ".bias" if name.endswith("_bias") else ".weight"
        base = name.removesuffix("_bias")
        if base.endswith(".gate_up_proj"):
            found[base.replace("gate_up_proj", "gate_proj") + ending] = values[:, ::2]
            found[base.replace("gate_up_proj", "up_proj") + ending] = values[:, 1::2]
        elif base.endswith(".experts.down_proj") or name.endswith("sinks"):
            found[base + ending] = values
        else:
            found[name] = values
    return found


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Convert MXFP4 of safetensors, uint8 [..., groups, 16] and [..., groups], to float32 [..., 32
    * groups].
    """
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    values = (
        np.where(codes > 7, -1, 1)
        * table[codes & 7]
        * np.exp2(scales.astype(np.float32) - 127)[..., None]
    )
    return values.reshape(*scales.shape[:-1], -1).astype(np.float32)


def write_expert_sizes(writer: GGUFWriter, config: Config) -> None:
    """Write the keys that `TextModel.set_gguf_parameters` writes for any mixture of experts, and
    those of individual converters.
    """
    model_type = config["model_type"]
    if model_type == "ernie4_5_moe":
        write_sizes(
            writer,
            config,
            expert_count="moe_num_experts",
            expert_used_count="moe_k",
            interleave_moe_layer_step="moe_layer_interval",
            leading_dense_block_count="moe_layer_start_index",
            expert_feed_forward_length="moe_intermediate_size",
            expert_shared_count="moe_num_shared_experts",
        )
        # Rule of its own converter, which does not give the width of every model.
        writer.add_expert_shared_feed_forward_length(
            config["intermediate_size"] // config["num_key_value_heads"]
        )
        return
    if model_type == "glm4_moe":
        write_sizes(
            writer,
            config,
            expert_count="n_routed_experts",
            expert_used_count="num_experts_per_tok",
            leading_dense_block_count="first_k_dense_replace",
            expert_feed_forward_length="moe_intermediate_size",
            expert_shared_count="n_shared_experts",
            expert_weights_scale="routed_scaling_factor",
            expert_weights_norm="norm_topk_prob",
            expert_group_count="n_group",
            expert_group_used_count="topk_group",
        )
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        return
    count = config.get("num_local_experts") or config.get("num_experts")
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
    if model_type in ("gpt_oss", "qwen2_moe", "qwen3_moe", "gemma4_text"):
        width = "intermediate_size" if model_type == "gpt_oss" else "moe_intermediate_size"
        writer.add_expert_feed_forward_length(config[width])
    if model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
