"""Keys and tensors that llama.cpp's converter writes for Gemma 4 only.

Full-attention layers may differ in size from sliding-window layers. transformers saves the
difference as `per_layer_config`. The makers' files, which the converter reads, have global_head_dim
and num_global_key_value_heads instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGUFWriter

from helpers.gguf.layers import Config


def gemma4_scale(name: str) -> str | None:
    """Return GGUF's name for a scale of the router's inputs or of its experts, as
    `Gemma4Model.modify_tensors` gives it, or None for another tensor.
    """
    layer = name.split(".")[2] if name.startswith("model.layers.") else ""
    found = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
    target = found.get(name.partition(f".{layer}.")[2]) if layer else None
    return None if target is None else f"blk.{layer}.{target}.scale"


def makers_config(config: Config) -> dict[str, Any]:
    """Return the config as the makers' files have it."""
    found = {key: value for key, value in config.items() if key != "per_layer_config"}
    full = next(iter(config["per_layer_config"].values()))
    found["global_head_dim"] = full["head_dim"]
    found["num_global_key_value_heads"] = full.get("num_key_value_heads")
    return found


def write_gemma4_sizes(writer: GGUFWriter, config: Config) -> None:
    """Write the keys of `Gemma4Model.set_gguf_parameters`. Those of `Gemma3Model` were written
    before.
    """
    config = makers_config(config)
    layers = config["num_hidden_layers"]
    shared = config["num_kv_shared_layers"]
    full = config["global_head_dim"]
    local = config["head_dim"]
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    if config.get("use_double_wide_mlp"):
        wide = config["intermediate_size"]
        writer.add_feed_forward_length(
            [wide if index < layers - shared else 2 * wide for index in range(layers)]
        )
    heads = config["num_key_value_heads"]
    if config["num_global_key_value_heads"] is not None:
        writer.add_head_count_kv(
            [heads if slide else config["num_global_key_value_heads"] for slide in slides]
        )
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(local)


def rope_freqs(config: Config) -> np.ndarray:
    """Return the divisors of a full-attention layer's frequencies. Frequencies that do not rotate
    are divided by 1e30.
    """
    dim = makers_config(config)["global_head_dim"]
    turning = int(dim * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    return np.array([1.0] * turning + [1e30] * (dim // 2 - turning), dtype=np.float32)
