"""Writer of Nemotron-H in GGUF files for tests, by the rules of llama.cpp's converter
(conversion/nemotron.py and its bases, conversion/granite.py and conversion/mamba.py).
"""

from __future__ import annotations

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter

from helpers.gguf.layers import Config, Tensors, mamba_values, named, permuted, write_sizes


def nemotron_arch(config: Config) -> MODEL_ARCH:
    """Return the architecture, which is a different one for models with experts."""
    return (
        MODEL_ARCH.NEMOTRON_H_MOE if "moe" in config["layers_block_type"] else MODEL_ARCH.NEMOTRON_H
    )


def nemotron_tensors(tensors: Tensors, config: Config) -> Tensors:
    """Return float32 tensors under GGUF's names, from those of transformers with merged experts."""

    def parts(name: str, values: np.ndarray) -> Tensors:
        values = mamba_values(name, permuted(name, values, config), config["n_groups"])
        if ".mixer.experts." in name:
            name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
        return {name.replace(".dt_bias", ".dt.bias"): values}

    sizes = {
        **config,
        "num_hidden_layers": len(config["layers_block_type"]),
    }  # transformers writes only the types
    return named(tensors, nemotron_arch(config), sizes, parts)


def write_nemotron_sizes(writer: GGUFWriter, config: Config) -> None:
    """Write the sizes. Makers' configs have norm_eps in addition to layer_norm_epsilon, and so do
    files; transformers writes only the latter.
    """
    types = config["layers_block_type"]
    has_experts = "moe" in types
    write_sizes(
        writer,
        config,
        embedding_length="hidden_size",
        vocab_size="vocab_size",
        head_count="num_attention_heads",
        key_length="head_dim",
        value_length="head_dim",
        layer_norm_eps="layer_norm_epsilon",
        ssm_conv_kernel="conv_kernel",
        ssm_state_size="ssm_state_size",
        ssm_group_count="n_groups",
        ssm_time_step_rank="mamba_num_heads",
    )
    writer.add_block_count(len(types))
    writer.add_context_length(2**20)
    writer.add_head_count_kv(
        [config["num_key_value_heads"] * (kind == "full_attention") for kind in types]
    )
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    width = config["moe_intermediate_size" if has_experts else "intermediate_size"]
    writer.add_feed_forward_length(
        [width * (kind == ("moe" if has_experts else "mlp")) for kind in types]
    )
    if has_experts:
        write_sizes(
            writer,
            config,
            layer_norm_rms_eps="layer_norm_epsilon",
            expert_count="n_routed_experts",
            expert_used_count="num_experts_per_tok",
            expert_feed_forward_length="moe_intermediate_size",
            expert_shared_feed_forward_length="moe_shared_expert_intermediate_size",
            expert_shared_count="n_shared_experts",
            expert_weights_norm="norm_topk_prob",
            expert_weights_scale="routed_scaling_factor",
            expert_group_count="n_group",
        )
