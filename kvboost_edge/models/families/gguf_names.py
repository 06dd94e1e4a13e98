"""GGUF architectures: their descriptions, and tensor names that several of them use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvboost_edge.models.families.gguf_keys import Keys

__all__ = [
    "BOTH_NORMS",
    "EXPERTS",
    "EXPERT_KEYS",
    "HEAD_NORMS",
    "MATRICES",
    "POST_NORMS",
    "PRE_NORMS",
    "SHARED_EXPERT",
    "SSM_SIZES",
    "STATE_SPACE",
    "WINDOW",
    "GgufArchitecture",
]

PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
BOTH_NORMS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    **POST_NORMS,
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
STATE_SPACE = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt_bias",
    "ssm_a": "mamba.decay",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
SHARED_EXPERT = {
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
"""Tensor names inside a layer, as a mapping from GGUF's names to transformers'.

There is one mapping each for norms (by position), matrices, Mamba2, experts and the shared expert.
"""

SSM_SIZES = frozenset(
    {
        "ssm.conv_kernel",
        "ssm.state_size",
        "ssm.group_count",
        "ssm.inner_size",
        "ssm.time_step_rank",
    }
)
EXPERT_KEYS = frozenset({"expert_feed_forward_length"})
WINDOW = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})
"""Sets of metadata keys "ARCHITECTURE.KEY" that several architectures use."""


@dataclasses.dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """Description of the GGUF files of an architecture.

    Attributes:
        model_type: model_type in transformers.
        layer: mapping from GGUF's tensor names inside a layer to transformers'. Names are without
            ".weight", unless they end in ".scale".
        permuted: True if files interleave the rows of queries and keys in each head: (0, half, 1,
            half + 1, ...).
        norm_offset: difference between the file's norm weights and transformers' (Gemma's norms
            multiply by 1 + weight).
        outer: tensor names outside the layers, in addition to the common names.
        keys: metadata keys "ARCHITECTURE.KEY", in addition to the common keys.
        dense: tensors of the dense projections after pooling, which are not part of the decoder.
        unused: tensors that are not used.
        bidirectional: True if attention is bidirectional.
        experts: True if files may have a mixture of experts.
        no_keys: True if 0 KV heads mean a layer without attention.
        alone: True if an MLP width of 0 means a layer without an MLP. RoPE keys are then ignored,
            because these models do not use RoPE.
        by_layer: True if sizes differ between layers.
        config: function (keys, common config) -> additional config entries. It may change
            `rope_parameters` in the common config.
    """

    model_type: str
    layer: Mapping[str, str]
    permuted: bool = False
    norm_offset: float = 0.0
    outer: Mapping[str, str] = dataclasses.field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    dense: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    bidirectional: bool = False
    experts: bool = False
    no_keys: bool = False
    alone: bool = False
    by_layer: bool = False
    config: Callable[[Keys, dict[str, Any]], dict[str, Any]] | None = None
