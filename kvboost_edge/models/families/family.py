"""What the models of a family have in common, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvboost_edge.models.families.layers import LayerFactors, LayerShape
from kvboost_edge.models.families.moe import Experts
from kvboost_edge.models.families.ssm import Hybrid

__all__ = ["Family"]

Config = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """What all models of a family have in common.

    norms        "pre": before attention and MLP; "post": behind them; "both"
    norm_offset  added to the weights of norms (Gemma stores weight - 1)
    head_norm    norm of queries and keys: "" none, "head" each head, "all" all heads as one row
    head_norms   what the checkpoint calls these two
    qkv_bias     None: as the config's attention_bias says (then the output projection has one too)
    biased       attention_bias where the config does not say
    output_bias  False: the output projection never has a bias
    fused        queries, keys, values are one tensor, and so are gate and up
    gated        False: MLPs and experts have no gate: act(up)
    mlp          names of gate and up, which are one tensor, and of down; or of all three, which are
                 (): the usual ones
    mlp_whole    a stored matrix of which gate and up are pieces; files may have them apart all the
                 same
    inner        the config's key of the MLP's width
    norm_names   norms before attention, behind it, before the MLP, behind it, those it has, where
                 they are not called
                 as usual;  last_norm: the one behind all layers;  out: the projection behind
                            attention
    paired_rope  channels (2i, 2i + 1) turn together in the checkpoint, instead of (i, i + half)
    partial      the part of each head that turns, where the config does not say
    no_rope      layers without rope: "" none, "listed" by no_rope_layers, "full" those without a
                 window in a model that has windows, "typed" all or none by position_embedding_type
    local_rope   layers with a window have a rope of their own, local_theta where the config does
                 not say its base
    windows      windows by layer, from the config and the number of layers; None: no layer has one
    shapes       layers' shapes, from the config and the windows; None: they are all alike
    scale        of scores; None: 1 / sqrt(head_dim), or as the family's other flags say
    capped       logits have a cap where the config gives one
    value_norm   each head of the values is normed, without weights
    layer_scalar each layer's result is multiplied by a number of its own
    complete     fills in what the config leaves out, and says in Llama's words what it says in
                 others
    late_norm    norms of queries and keys stand behind rope
    query_scaled queries are multiplied with a factor of their position
    sinks        each head of queries has a logit that joins the denominator of its softmax and has
                 no value layer_thetas layers have bases of rope of their own, 0 for none, by
                 layer_rope_theta
    experts      the mixture of experts, from the config and the number of layers; None, or where it
                 returns None: MLPs alone
    in_columns   safetensors have the matrices of all experts as columns, see
                 weights/stacked_experts.py
    hybrid       which layers keep a state instead of keys and values, from the same; None, or where
                 it returns None: none does
    output_gate  rows of queries are twice as many, in each head its query and behind it a gate,
                 whose sigmoid multiplies what attention returns
    factors      what results of layers' matrices are multiplied with, from the config; None:
                 nothing
    unless       config keys that must have one of the given values, else the family is another
                 model
    """

    norms: str = "pre"
    norm_offset: float = 0.0
    head_norm: str = ""
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    qkv_bias: bool | None = None
    biased: bool = False
    output_bias: bool = True
    fused: bool = False
    gated: bool = True
    mlp: tuple[str, ...] = ()
    mlp_whole: str = ""
    inner: str = "intermediate_size"
    norm_names: tuple[str, ...] = ()
    last_norm: str = "model.norm"
    out: str = "self_attn.o_proj"
    paired_rope: bool = False
    partial: float = 1.0
    tied: bool = False
    head_dim: int | None = None
    eps: float = 1e-6
    theta: float = 10000.0
    activation: str = "silu"
    scaled_embedding: bool = False
    query_scalar: bool = False
    softcaps: bool = False
    multipliers: bool = False
    no_rope: str = ""
    local_rope: bool = False
    local_theta: float = 10000.0
    windows: Callable[[Config, int], list[int]] | None = None
    shapes: Callable[[Config, Sequence[int]], Sequence[LayerShape]] | None = None
    scale: float | None = None
    capped: bool = False
    value_norm: bool = False
    layer_scalar: bool = False
    complete: Callable[[Config], Config] | None = None
    late_norm: bool = False
    query_scaled: bool = False
    sinks: bool = False
    layer_thetas: bool = False
    experts: Callable[[Config, int], Experts | None] | None = None
    hybrid: Callable[[Config, int], Hybrid | None] | None = None
    output_gate: bool = False
    in_columns: bool = False
    factors: Callable[[Config], LayerFactors] | None = None
    unless: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    @property
    def way_in(self) -> str:
        """What is packed of the ways into an MLP: "gate_up", or "up"."""
        return "gate_up" if self.gated else "up"
