"""Writer of Falcon-H1 in GGUF files for tests, by the rules of llama.cpp's converter
(conversion/falcon_h1.py and its base, conversion/mamba.py).
"""

from __future__ import annotations

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter

from helpers.gguf.layers import Config, Tensors, mamba_values, named, write_sizes


def falcon_tensors(tensors: Tensors, config: Config) -> Tensors:
    """Return float32 tensors under GGUF's names, with the multipliers of the config applied."""

    def parts(name: str, values: np.ndarray) -> Tensors:
        return {name.replace(".dt_bias", ".dt_proj.bias"): _changed(name, values, config)}

    return named(tensors, MODEL_ARCH.FALCON_H1, config, parts)


def _changed(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    into = config["attention_in_multiplier"]
    factors = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * into,
        "q_proj": into,
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    if name.endswith("mamba.in_proj.weight"):
        groups = config["mamba_n_groups"] * config["mamba_d_state"]
        rows = (
            config["mamba_d_ssm"],
            config["mamba_d_ssm"],
            groups,
            groups,
            config["mamba_n_heads"],
        )
        by_row = np.repeat(config["ssm_multipliers"], rows).astype(np.float32)
        return values * np.float32(config["ssm_in_multiplier"]) * by_row[:, None]
    values = mamba_values(name, values, config["mamba_n_groups"])
    return values * np.float32(
        next((factor for part, factor in factors.items() if part in name), 1.0)
    )


def write_falcon_sizes(writer: GGUFWriter, config: Config) -> None:
    """Write the sizes. The converter requires head_dim, which transformers does not write."""
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    write_sizes(
        writer,
        config,
        block_count="num_hidden_layers",
        context_length="max_position_embeddings",
        embedding_length="hidden_size",
        feed_forward_length="intermediate_size",
        vocab_size="vocab_size",
        head_count_kv="num_key_value_heads",
        layer_norm_rms_eps="rms_norm_eps",
        ssm_conv_kernel="mamba_d_conv",
        ssm_inner_size="mamba_d_ssm",
        ssm_state_size="mamba_d_state",
        ssm_group_count="mamba_n_groups",
    )
    writer.add_head_count(heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_ssm_time_step_rank(config["mamba_d_ssm"] // config["mamba_d_head"])
