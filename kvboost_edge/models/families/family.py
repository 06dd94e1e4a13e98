"""What is said of a model_type: the flags of its family, its parts, runners and files, a note."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvboost_edge.models.families.layers import LayerFactors, LayerShape, PerLayerInput
from kvboost_edge.models.families.moe import Experts
from kvboost_edge.models.families.ssm import Hybrid

__all__ = ["Architecture", "Family", "ModelType", "Wrapper"]

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
    per_layer    the second embedding, from the completed config and the vocabulary; None, or where
                 it returns None: there is none
    scale        of scores; None: 1 / sqrt(head_dim), or as the family's other flags say
    capped       logits have a cap where the config gives one
    value_norm   each head of the values is normed, without weights
    layer_scalar each layer's result is multiplied by a number of its own
    kv_heads     key heads, where the config does not say; None: as many as there are heads
    num_layers   the number of layers that follows from other keys of the config; None, or where it
                 returns None: as the config says
    odd_heads    the hidden size need not be a multiple of the number of heads
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
    mxfp4        quantized safetensors are MXFP4, and of no other family
    stored_name  what Llama calls a tensor of the family's safetensors; None: files have such names
    hybrid       which layers keep a state instead of keys and values, from the same; None, or where
                 it returns None: none does
    may_all_attend  where the config names no kinds of layers, but files have keys and values of
                 all, none keeps a state
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
    per_layer: Callable[[Config, int], PerLayerInput | None] | None = None
    scale: float | None = None
    capped: bool = False
    value_norm: bool = False
    layer_scalar: bool = False
    kv_heads: int | None = None
    num_layers: Callable[[Config], int | None] | None = None
    odd_heads: bool = False
    complete: Callable[[Config], Config] | None = None
    late_norm: bool = False
    query_scaled: bool = False
    sinks: bool = False
    layer_thetas: bool = False
    experts: Callable[[Config, int], Experts | None] | None = None
    hybrid: Callable[[Config, int], Hybrid | None] | None = None
    may_all_attend: bool = False
    output_gate: bool = False
    in_columns: bool = False
    mxfp4: bool = False
    stored_name: Callable[[str], str] | None = None
    factors: Callable[[Config], LayerFactors] | None = None
    unless: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    @property
    def way_in(self) -> str:
        """What is packed of the ways into an MLP: "gate_up", or "up"."""
        return "gate_up" if self.gated else "up"


@dataclasses.dataclass(frozen=True, slots=True)
class Wrapper:
    """What a model of several parts has inside.

    Attributes:
        texts: model types its language model can have, first the one where the config does not say.
        tied: tie_word_embeddings where neither config says it.
        defaults: what its files leave out of the language model's config.
    """

    texts: tuple[str, ...]
    tied: bool
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """A model family: `tested` when its results are compared with transformers' own in the test
    suite.

    Attributes:
        runners: "native", "torch": those that compute it, of a tested family those it is tested
            with.
        files: what the native runner reads it from, else what transformers does.
        oracle: what its results are compared with.
    """

    tested: bool
    note: str
    runners: tuple[str, ...]
    files: tuple[str, ...]
    oracle: str

    @property
    def proof(self) -> str:
        """All that its results are compared with, on tiny random models."""
        return self.oracle + "; llama.cpp (GGUF)" * (self.tested and "GGUF" in self.files)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelType:
    """What is known of a model_type.

    Attributes:
        note: what docs/models.md says of it.
        family: its flags, where it is a language model that the native runner computes.
        wrapper: what it has inside, where it is a model of several parts.
        torch: the torch runner computes it.
        gguf: the native runner reads it from GGUF files; onnx: from ONNX files.
        oracle: what its results are compared with.
        tested: they are.
    """

    note: str
    family: Family | None = None
    wrapper: Wrapper | None = None
    torch: bool = True
    gguf: bool = False
    onnx: bool = False
    oracle: str = "transformers"
    tested: bool = True

    @property
    def architecture(self) -> Architecture:
        """The same as users see it."""
        is_native = self.family is not None or self.wrapper is not None
        runners = (("native", is_native), ("torch", self.torch))
        files = (("safetensors", True), ("GGUF", self.gguf), ("ONNX", self.onnx))
        return Architecture(
            self.tested,
            self.note,
            tuple(name for name, has in runners if has),
            tuple(name for name, has in files if has),
            self.oracle if self.tested else "nothing",
        )
