"""Descriptions of a model_type: flags of its family, parts, runners, file formats and a note."""

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
    """Traits that all models of a family share.

    Attributes:
        norms: position of the norms: "pre" before attention and MLP, "post" after them, "both".
        norm_offset: number added to norm weights (Gemma stores weight - 1).
        head_norm: norm of queries and keys: "" none, "head" each head, "all" all heads as one row.
        head_norms: names of the norms of queries and of keys.
        qkv_bias: query, key and value projections have a bias; None to follow `attention_bias`,
            which then covers the output projection, too.
        biased: default of `attention_bias`.
        output_bias: False if the output projection never has a bias.
        fused: QKV is one tensor.
        gated: False if MLPs and experts compute down(act(up(x))), without a gate.
        mlp: names of the MLP's matrices: gate and up as one tensor and down, or all three; () for
            Llama's.
        mlp_whole: name of the stored matrix that contains gate and up; files may store them
            separately.
        inner: config key of the MLP's width.
        norm_names: names of the norms that a layer has, in order: before attention, after it,
            before the MLP, after it; () for the usual ones.
        last_norm: name of the norm after the last layer.
        out: name of the attention output projection.
        paired_rope: the checkpoint rotates channel pairs (2i, 2i + 1) instead of (i, i + half).
        partial: default share of a head that is rotated.
        tied: default of `tie_word_embeddings`.
        head_dim: default head size; None for hidden size / heads.
        eps: default of `rms_norm_eps`.
        theta: default base of RoPE.
        activation: default activation.
        scaled_embedding: embeddings are multiplied by the square root of the hidden size.
        query_scalar: attention scores are scaled by query_pre_attn_scalar ** -0.5.
        softcaps: attention scores and logits have softcaps.
        multipliers: the config has Granite's multipliers.
        no_rope: layers without RoPE: "" none, "listed" by `no_rope_layers`, "full" those without a
            window in a model with windows, "typed" all or none by `position_embedding_type`.
        local_rope: layers with a window have their own RoPE.
        local_theta: default base of their RoPE.
        windows: function (config, layers) -> window of each layer; None without windows.
        shapes: function (config, windows) -> shape of each layer; None if all are equal.
        per_layer: function (completed config, vocabulary size) -> second embedding. None, or a
            result of None, without one.
        scale: scale of attention scores; None for 1 / sqrt(head_dim) or the value that other flags
            give.
        capped: logits have a softcap if the config gives one.
        value_norm: each head of the values is normalized, without weights.
        layer_scalar: the output of each layer is multiplied by a scalar of its own.
        kv_heads: default number of KV heads; None for the number of heads.
        num_layers: function of the config -> number of layers, from other keys. None, or a result
            of None, for the config's own.
        odd_heads: the hidden size need not be a multiple of the number of heads.
        complete: function of the config -> config with defaults and Llama's names.
        late_norm: queries and keys are normalized after RoPE.
        query_scaled: queries are multiplied by a factor of their position.
        sinks: each query head has an attention sink, a logit in the softmax denominator without a
            value.
        layer_thetas: layers have RoPE bases of their own by `layer_rope_theta`; 0 for no RoPE.
        experts: function (config, layers) -> mixture of experts. None, or a result of None, for
            MLPs only.
        hybrid: function (config, layers) -> layers with recurrent state. None, or a result of None,
            without any.
        may_all_attend: without `layer_types` in the config, all layers attend if files have
            attention tensors for all of them.
        output_gate: the query projection has twice the rows: each head's query is followed by a
            gate, whose sigmoid multiplies the attention output.
        in_columns: safetensors store the matrices of all experts as columns, see
            weights/stacked_experts.py.
        mxfp4: quantized safetensors are MXFP4, a format of no other family.
        stored_name: function that maps tensor names in safetensors to Llama's; None if they are
            equal.
        factors: function of the config -> multipliers of a layer's matrices; None without them.
        unless: config keys and the values that the family supports for each.
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
        """Name of the packed input projection of an MLP: "gate_up", or "up" without a gate."""
        return "gate_up" if self.gated else "up"


@dataclasses.dataclass(frozen=True, slots=True)
class Wrapper:
    """Composite model, which contains a language model.

    Attributes:
        texts: model types of its language model, the default first.
        tied: default of `tie_word_embeddings`.
        defaults: values that its files omit from the config of the language model.
    """

    texts: tuple[str, ...]
    tied: bool
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """Support for a model family, as users see it.

    Attributes:
        tested: results are compared with `oracle` in the test suite.
        note: description in docs/models.md.
        runners: "native" and "torch", those that run it; for a tested family, those it is tested
            with.
        files: formats that the native runner reads, or that transformers reads for the torch
            runner.
        oracle: implementation that results are compared with.
    """

    tested: bool
    note: str
    runners: tuple[str, ...]
    files: tuple[str, ...]
    oracle: str

    @property
    def proof(self) -> str:
        """Implementations that results are compared with, on tiny random models."""
        return self.oracle + "; llama.cpp (GGUF)" * (self.tested and "GGUF" in self.files)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelType:
    """Entry for a model_type.

    Attributes:
        note: description in docs/models.md.
        family: traits of a language model that the native runner supports.
        wrapper: contents of a composite model.
        torch: the torch runner supports it.
        gguf: the native runner reads it from GGUF files.
        onnx: the native runner reads it from ONNX files.
        oracle: implementation that results are compared with.
        tested: results are compared with it in the test suite.
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
        """Support for this model_type, as users see it."""
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
