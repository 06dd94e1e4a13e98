"""Granite 4 with layers that keep a state in GGUF files for tests, by the rules of llama.cpp's converters
(conversion/granite.py and conversion/mamba.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGUFWriter

__all__ = ["granite_tensors", "has_states", "permuted_rows", "write_granite_factors", "write_granite_sizes"]


def has_states(config: Mapping[str, Any]) -> bool:
    """Whether a Granite 4 has layers with a state; without it is of architecture granite."""
    return "linear_attention" in config["layer_types"]


def permuted_rows(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in the order of llama.cpp's rope: pairs (i, i + half) one after the other."""
    shape = (heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def granite_tensors(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """float32 tensors under GGUF's names, of transformers' with experts merged."""
    names = gguf.get_tensor_name_map(MODEL_ARCH.GRANITE_HYBRID, config["num_hidden_layers"])
    found = {}
    for name, values in sorted(tensors.items()):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if "shared_mlp." in name:
            found.update(_of_shared(name, values, "_shexp" if config["num_local_experts"] else ""))
            continue
        target = names.get_name(name.replace(".dt_bias", ".dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        found[target] = np.ascontiguousarray(_changed(name, values.astype(np.float32), config))
    return found


def _of_shared(name: str, values: np.ndarray, ending: str) -> dict[str, np.ndarray]:
    layer = name.split(".")[2]
    if "output_linear" in name:
        return {f"blk.{layer}.ffn_down{ending}.weight": values}
    parts = zip(("gate", "up"), np.split(values, 2), strict=True)
    return {f"blk.{layer}.ffn_{part}{ending}.weight": np.ascontiguousarray(half) for part, half in parts}


def _changed(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    if ".q_proj." in name or ".k_proj." in name:
        return permuted_rows(values, config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"])
    if name.endswith("conv1d.weight"):
        return values.squeeze()
    if name.endswith("A_log"):
        return -np.exp(values.astype(np.float64)).astype(np.float32)[:, None]
    if name.endswith("mamba.D"):
        return values[:, None]
    return values.reshape(config["mamba_n_groups"], -1) if name.endswith("mamba.norm.weight") else values


def write_granite_sizes(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """Files of the makers' models say that there is no rope; those with some that there is, as Bamba's are."""
    turned = config["position_embedding_type"] == "rope"
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"] if turned else 2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    writer.add_head_count_kv([config["num_key_value_heads"] * attending for attending in attends])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_scaling_finetuned(turned)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    _write_state_sizes(writer, config)
    _write_multipliers(writer, config)


def write_granite_factors(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """What Granites multiply by, and of one without states the sizes of layers that it has none of."""
    if config["model_type"] == "granitemoehybrid":
        writer.add_expert_count(0)
        writer.add_expert_used_count(0)
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
        _write_state_sizes(writer, config)
    _write_multipliers(writer, config)


def _write_state_sizes(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])


def _write_multipliers(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
