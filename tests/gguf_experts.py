"""Experts in GGUF files for tests, by the rules of llama.cpp's converters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import GGUFWriter

__all__ = ["merged_experts", "write_expert_sizes"]

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def merged_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All experts of a matrix as one tensor, stacked by their numbers; Granite's gate and up apart. Other tensors lose
    axes of one."""
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is not None:
            stacks.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = values
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            base = name.removesuffix("input_linear.weight")
            gate, up = np.split(values, 2, axis=-2)
            found[f"{base}experts.w1.weight"], found[f"{base}experts.w3.weight"] = gate, up
        elif name.endswith("e_score_correction_bias"):
            found[name.replace("_bias", ".bias")] = values.squeeze()
        else:
            found[name] = values.squeeze() if name.endswith("shared_expert_gate.weight") else values
    for name, parts in stacks.items():
        found[name] = np.stack([parts[index] for index in range(len(parts))])
    return found


def write_expert_sizes(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """What `TextModel.set_gguf_parameters` writes of any mixture, and what single converters add."""
    model_type = config["model_type"]
    if model_type == "ernie4_5_moe":
        writer.add_expert_count(config["moe_num_experts"])
        writer.add_expert_used_count(config["moe_k"])
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
        # Its converter's own rule, which is not the width of every model.
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])
        return
    count = config.get("num_local_experts") or config.get("num_experts")
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
    if model_type in ("qwen2_moe", "qwen3_moe", "gemma4_text"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
