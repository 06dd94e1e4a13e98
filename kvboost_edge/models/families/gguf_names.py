"""What the tensors of a GGUF file are called in transformers: the names that architectures share,
and what an architecture says of its files.
"""

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
"""Names inside a layer: norms by where they stand, matrices, Mamba2, experts, the one that all
tokens share.
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
"""Metadata keys "architecture.KEY" of several architectures."""


@dataclasses.dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """What the GGUF files of an architecture hold.

    Attributes:
        model_type: the family in transformers.
        layer: names inside a layer: GGUF's -> transformers'; those that end with ".scale" are all
            of the name.
        permuted: rows of queries and keys stand in pairs (i, i + half) there, one after the other,
            in halves here.
        norm_offset: what the file's norms have on top of transformers' (Gemma's norms multiply by 1
            + weight).
        outer: names outside the layers, beside those of all.
        keys: metadata keys "architecture.KEY" that only some architectures have.
        dense: tensors behind the pooling, which are no part of the decoder.
        both_ways: its attention is bidirectional.
        experts: it is a mixture of experts.
        no_keys: 0 key heads of a layer mean that it does not attend.
        alone: an MLP of no width means that a layer has none; and there is no rope, whatever keys
            say of it.
        by_layer: layers have sizes of their own.
        config: what only it has in its config, from the keys of a file and the config that all
            have; it may change the latter's rope_parameters.
    """

    model_type: str
    layer: Mapping[str, str]
    permuted: bool = False
    norm_offset: float = 0.0
    outer: Mapping[str, str] = dataclasses.field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    dense: tuple[str, ...] = ()
    both_ways: bool = False
    experts: bool = False
    no_keys: bool = False
    alone: bool = False
    by_layer: bool = False
    config: Callable[[Keys, dict[str, Any]], dict[str, Any]] | None = None
