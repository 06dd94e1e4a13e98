"""Writer of Granite 4 hybrid models in GGUF files for tests, by the rules of llama.cpp's converters
(conversion/granite.py and conversion/mamba.py).
"""

from __future__ import annotations

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter

from helpers.gguf.layers import Config, Tensors, mamba_values, named, permuted, write_sizes


def has_states(config: Config) -> bool:
    """Return whether a Granite 4 has layers with recurrent state. Without them its architecture is
    granite.
    """
    return "linear_attention" in config["layer_types"]


def granite_tensors(tensors: Tensors, config: Config) -> Tensors:
    """Return float32 tensors under GGUF's names, from those of transformers with merged experts."""

    def parts(name: str, values: np.ndarray) -> Tensors:
        if "shared_mlp." in name:
            return _of_shared(
                name, values, "mlp.shared_expert" if config["num_local_experts"] else "mlp"
            )
        values = mamba_values(name, permuted(name, values, config), config["mamba_n_groups"])
        return {name.replace(".dt_bias", ".dt_proj.bias"): values}

    return named(tensors, MODEL_ARCH.GRANITE_HYBRID, config, parts)


def _of_shared(name: str, values: np.ndarray, room: str) -> Tensors:
    base = f"{name.partition('shared_mlp.')[0]}{room}"
    if "output_linear" in name:
        return {f"{base}.down_proj.weight": values}
    gate, up = np.split(values, 2)
    return {f"{base}.gate_proj.weight": gate, f"{base}.up_proj.weight": up}


def write_granite_sizes(writer: GGUFWriter, config: Config) -> None:
    """Write the sizes. Files of the makers' models declare that there is no RoPE. Files of models
    with RoPE declare it, as Bamba's do.
    """
    turned = config["position_embedding_type"] == "rope"
    write_sizes(
        writer,
        config,
        block_count="num_hidden_layers",
        embedding_length="hidden_size",
        feed_forward_length="intermediate_size",
        head_count="num_attention_heads",
    )
    writer.add_context_length(config["max_position_embeddings"] if turned else 2**20)
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    write_sizes(
        writer,
        config,
        layer_norm_rms_eps="rms_norm_eps",
        vocab_size="vocab_size",
        expert_count="num_local_experts",
        expert_used_count="num_experts_per_tok",
        expert_shared_feed_forward_length="shared_intermediate_size",
    )
    writer.add_head_count_kv([config["num_key_value_heads"] * attending for attending in attends])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_scaling_finetuned(turned)
    _write_state_sizes(writer, config)
    _write_multipliers(writer, config)


def write_granite_factors(writer: GGUFWriter, config: Config) -> None:
    """Write Granite's multipliers, and for a model without recurrent state the sizes of the layers
    that it lacks.
    """
    if config["model_type"] == "granitemoehybrid":
        writer.add_expert_count(0)
        writer.add_expert_used_count(0)
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
        _write_state_sizes(writer, config)
    _write_multipliers(writer, config)


def _write_state_sizes(writer: GGUFWriter, config: Config) -> None:
    write_sizes(
        writer,
        config,
        ssm_conv_kernel="mamba_d_conv",
        ssm_state_size="mamba_d_state",
        ssm_group_count="mamba_n_groups",
        ssm_time_step_rank="mamba_n_heads",
    )
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])


def _write_multipliers(writer: GGUFWriter, config: Config) -> None:
    write_sizes(
        writer,
        config,
        attention_scale="attention_multiplier",
        embedding_scale="embedding_multiplier",
        residual_scale="residual_multiplier",
        logit_scale="logits_scaling",
    )
