"""Descriptions of model types: family flags, parts, runners, file formats and notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvboost_edge.models.families.layers import LayerFactors, LayerShape, PerLayerInput
from kvboost_edge.models.families.moe import Experts
from kvboost_edge.models.families.mtp import MtpNames
from kvboost_edge.models.families.ssm import Hybrid

__all__ = ["Architecture", "Family", "ModelType", "Wrapper"]

Config = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """Properties that all models of a family share.

    Attributes:
        norms: position of the norms: "pre" for before attention and MLP, "post" for after them, or
            "both".
        norm_offset: number to add to stored norm weights (Gemma stores weight - 1).
        head_norm: norm of queries and keys: "" for none, "head" for each head separately, "all" for
            all heads together.
        head_norm_key: config key that says whether queries and keys are normalized; "" if they
            always are as `head_norm` says.
        head_norms: tensor names of the query norm and the key norm.
        qkv_bias: True if the query, key and value projections have a bias. None if `attention_bias`
            decides, which then also covers the output projection.
        biased: default of `attention_bias`.
        output_bias: False if the output projection never has a bias.
        fused: True if queries, keys and values are one tensor.
        gated: False if MLPs and experts compute down(act(up(x))), without a gate.
        mlp: tensor names of the MLP, either (gate and up in one matrix, down) or (gate, up, down);
            () for Llama's names.
        mlp_whole: name of the matrix that may contain both gate and up. Some files store them
            separately.
        inner: config key for the width of the MLP.
        norm_names: tensor names of a layer's norms, in the order before attention, after attention,
            before the MLP, after the MLP; () for the usual names.
        sub_norms: tensor names of the norms of the attention output and of the MLP's inner
            channels, before the output and down projections; () for none.
        last_norm: tensor name of the norm after the last layer.
        out: tensor name of the attention output projection.
        paired_rope: True if the checkpoint rotates channel pairs (2i, 2i + 1) instead of (i, i +
            half).
        partial: default fraction of a head that is rotated.
        tied: default of `tie_word_embeddings`.
        head_dim: default head size; None for hidden size / heads.
        eps: default of `rms_norm_eps`.
        theta: default RoPE base.
        activation: default activation function.
        scaled_embedding: True if embeddings are multiplied by the square root of the hidden size.
        query_scalar: True if attention scores are scaled by query_pre_attn_scalar ** -0.5.
        softcaps: True if attention scores and logits have softcaps.
        multipliers: True if the config has Granite's multipliers.
        no_rope: layers without RoPE: "" for none, "listed" for those that `no_rope_layers` selects,
            "full" for layers without a window in models with windows, "typed" if
            `position_embedding_type` decides for the whole model.
        local_rope: True if layers with a window have different RoPE settings.
        local_theta: default RoPE base of layers with a window.
        windows: function (config, layers) -> window of each layer; None if no layer has a window.
        shapes: function (config, windows) -> shape of each layer; None if all layers are equal.
        per_layer: function (completed config, vocabulary size) -> per-layer embedding or None; None
            if no model of the family has one.
        scale: scale of attention scores; None for the scale that other flags give, by default 1 /
            sqrt(head_dim).
        capped: True if the config may give a softcap for logits.
        value_norm: True if each head of the values is normalized, without weights.
        layer_scalar: True if the output of each layer is multiplied by a stored scalar.
        kv_heads: default number of KV heads; None for the number of query heads.
        num_layers: function of the config -> number of layers, or None to use the config's. None if
            the config always gives it directly.
        odd_heads: True if the hidden size need not be a multiple of the number of heads.
        complete: function of the config -> config with defaults and Llama's key names.
        late_norm: True if queries and keys are normalized after RoPE.
        query_scaled: True if queries are multiplied by a factor that depends on the position.
        sinks: True if each query head has an attention sink, an extra logit in the softmax
            denominator.
        layer_thetas: True if `layer_rope_theta` gives a RoPE base per layer, 0 for no RoPE.
        experts: function (config, layers) -> mixture of experts or None; None if no model of the
            family has experts.
        hybrid: function (config, layers) -> layers with recurrent state or None; None if no model
            of the family has such layers.
        may_all_attend: True if, without `layer_types` in the config, all layers have attention when
            the files have attention tensors for all of them.
        output_gate: True if the query projection also contains gates. Each head has its query rows,
            then its gate rows, and the sigmoid of the gate multiplies the attention output.
        in_columns: True if safetensors store expert matrices transposed, see
            weights/stacked_experts.py.
        mxfp4: True if quantized safetensors are MXFP4.
        stored_name: function that maps tensor names in safetensors to Llama's; None if they are the
            same.
        mtp: tensor names in safetensors of a multi-token prediction head; None if such a head is
            not supported.
        factors: function of the config -> multipliers of a layer's matrices; None if there are
            none.
        unless: restricted config keys, each with the values that the family supports.
    """

    norms: str = "pre"
    norm_offset: float = 0.0
    head_norm: str = ""
    head_norm_key: str = ""
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
    sub_norms: tuple[str, ...] = ()
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
    mtp: MtpNames | None = None
    factors: Callable[[Config], LayerFactors] | None = None
    unless: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    @property
    def way_in(self) -> str:
        """Name of the packed input projection of an MLP: "gate_up", or "up" for an MLP without a
        gate.
        """
        return "gate_up" if self.gated else "up"


@dataclasses.dataclass(frozen=True, slots=True)
class Wrapper:
    """Composite model that contains a language model.

    Attributes:
        texts: possible model types of the language model, the default first.
        tied: default of `tie_word_embeddings`.
        defaults: values that the config of the language model may omit.
    """

    texts: tuple[str, ...]
    tied: bool
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """Support for a model family, as documented for users.

    Attributes:
        tested: True if the test suite compares results with those of `oracle`.
        note: description in docs/models.md.
        runners: runners that support the family, of "native" and "torch". A tested family is tested
            with each of them.
        files: supported formats. The native runner reads them, or transformers does for the torch
            runner.
        oracle: reference implementation for the tests.
    """

    tested: bool
    note: str
    runners: tuple[str, ...]
    files: tuple[str, ...]
    oracle: str

    @property
    def proof(self) -> str:
        """Reference implementations that tiny random models are compared with."""
        return self.oracle + "; llama.cpp (GGUF)" * (self.tested and "GGUF" in self.files)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelType:
    """Entry for a model_type.

    Attributes:
        note: description in docs/models.md.
        family: properties of a language model that the native runner supports.
        wrapper: contents of a composite model.
        torch: True if the torch runner supports it.
        gguf: True if the native runner reads it from GGUF files.
        onnx: True if the native runner reads it from ONNX files.
        oracle: reference implementation for the tests.
        tested: True if the test suite compares results with those of `oracle`.
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
        """Support for this model_type, as documented for users."""
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
