"""Model families as data: what differs between the Llama-like decoders that the native runner computes.

`describe_model` reads a config into a `ModelSpec`; what it does not know raises ModelFormatError with the reason, so
that the torch runner can take over. Nothing is guessed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.architectures import attends_both_ways, pinned_context
from kvboost_edge.models.config.completed import gpt_oss, granite_hybrid, hunyuan, minicpm, ministral3
from kvboost_edge.models.config.experts import (
    Experts,
    ernie_experts,
    gemma4_experts,
    gpt_oss_experts,
    granite_experts,
    mixtral_experts,
    olmoe_experts,
    qwen2_experts,
    qwen3_experts,
)
from kvboost_edge.models.config.file import context_length, number_of, size_of
from kvboost_edge.models.config.gemma4 import PerLayerInput, gemma4_shapes, per_layer_input, with_gemma4_defaults
from kvboost_edge.models.config.layer_ropes import layer_ropes, rope_settings
from kvboost_edge.models.config.layers import LayerShape, LayerSpec, same_shapes
from kvboost_edge.models.config.nested import text_config
from kvboost_edge.models.config.quant_config import packed_layout
from kvboost_edge.models.config.rope_kinds import QueryScale, RopeKind, query_scale
from kvboost_edge.models.config.windows import (
    all_but_every,
    all_but_first_of,
    every_second,
    qwen_windows,
    same_window,
)  # fmt: skip

__all__ = ["FAMILIES", "Family", "LayerSpec", "ModelSpec", "describe_model", "heads_by_layer"]

Config = Mapping[str, Any]

_MAX_HEAD_DIM = 1 << 16  # beyond any real model: rope makes tables of as many numbers


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
    mlp          names of gate and up, which are one tensor, and of down; (): three tensors with the usual names
    inner        the config's key of the MLP's width
    norm_names   norms before attention, behind it, before the MLP, behind it, where they are not called as usual
    paired_rope  channels (2i, 2i + 1) turn together in the checkpoint, instead of (i, i + half)
    partial      the part of each head that turns, where the config does not say
    no_rope      layers without rope: "" none, "listed" by no_rope_layers, "full" those without a window in a model
                 that has windows, "typed" all or none by position_embedding_type
    local_rope   layers with a window have a rope of their own, local_theta where the config does not say its base
    windows      windows by layer, from the config and the number of layers; None: no layer has one
    shapes       layers' shapes, from the config and the windows; None: they are all alike
    scale        of scores; None: 1 / sqrt(head_dim), or as the family's other flags say
    capped       logits have a cap where the config gives one
    value_norm   each head of the values is normed, without weights
    layer_scalar each layer's result is multiplied by a number of its own
    complete     fills in what the config leaves out, and says in Llama's words what it says in others
    late_norm    norms of queries and keys stand behind rope
    query_scaled queries are multiplied with a factor of their position
    sinks        each head of queries has a logit that joins the denominator of its softmax and has no value
    layer_thetas layers have bases of rope of their own, 0 for none, by layer_rope_theta
    experts      the mixture of experts, from the config and the number of layers; None, or where it returns None:
                 MLPs alone
    in_columns   safetensors have the matrices of all experts as columns, see weights/columns/experts.py
    unless       config keys that must have one of the given values, else the family is another model
    """

    norms: str = "pre"
    norm_offset: float = 0.0
    head_norm: str = ""
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    qkv_bias: bool | None = None
    biased: bool = False
    output_bias: bool = True
    fused: bool = False
    mlp: tuple[str, ...] = ()
    inner: str = "intermediate_size"
    norm_names: tuple[str, ...] = ()
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
    in_columns: bool = False
    unless: tuple[tuple[str, tuple[Any, ...]], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the native runner needs to know of a model besides its weights. Sizes are in elements.

    Those of heads and of the MLP are the config's; what a layer has is in its LayerSpec. `both_ways`: tokens see those
    behind them, so a text is one pass and predicts nothing.
    """

    model_type: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    activation: str  # "silu" | "gelu_tanh"
    softmax_scale: float
    softcap: float
    logit_cap: float
    embedding_factor: float
    residual_factor: float
    logit_factor: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    max_context: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeKind, ...]
    per_layer: PerLayerInput | None
    query_scale: QueryScale | None
    experts: Experts | None
    both_ways: bool

    @property
    def first_shared(self) -> int:
        """The first layer behind which none computes keys and values; the number of layers where the last one does."""
        return 1 + max(index for index, layer in enumerate(self.layers) if layer.owns_kv)

    @property
    def kv_layers(self) -> tuple[LayerSpec, ...]:
        """The layers that compute keys and values, as the pool has them."""
        return tuple(layer for layer in self.layers if layer.owns_kv)


def _given(config: Config, key: str, default: float, low: float, high: float) -> float:
    """The number under a key, `default` where the config does not say."""
    return number_of(config, key, low, high) if key in config else default


def _cap(config: Config, key: str, default: float) -> float:
    """A softcap, 0 for none."""
    return 0.0 if config.get(key, default) is None else _given(config, key, default, 0.0, 1e6)


_ONE_WAY = ("use_bidirectional_attention", (None, False))
_EITHER_WAY = ("use_bidirectional_attention", (None, False, True))
_FUSED_MLP = ("mlp.gate_up_proj", "mlp.down_proj")
_LLAMA = Family()
_QWEN2 = Family(qkv_bias=True, windows=qwen_windows)
_ERNIE = Family(qkv_bias=False, tied=True, head_dim=128, eps=1e-5, theta=5e5, paired_rope=True,
                unless=(("use_bias", (None, False)),))  # fmt: skip
_GEMMA = Family(
    norm_offset=1.0, tied=True, head_dim=256, scaled_embedding=True, activation="gelu_pytorch_tanh", unless=(_ONE_WAY,)
)
_GEMMA4 = dataclasses.replace(
    _GEMMA, norms="both", norm_offset=0.0, head_norm="head", value_norm=True, layer_scalar=True, scale=1.0, capped=True,
    local_rope=True, theta=1e6, windows=all_but_every(6), shapes=gemma4_shapes, complete=with_gemma4_defaults,
    experts=gemma4_experts, unless=(("use_bidirectional_attention", (None, False, "vision")),),
)  # fmt: skip
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": Family(qkv_bias=False, windows=same_window(4096)),
        "qwen2": _QWEN2,
        "qwen3": Family(head_norm="head", head_dim=128, windows=qwen_windows),
        "qwen2_moe": dataclasses.replace(_QWEN2, experts=qwen2_experts, unless=(("qkv_bias", (None, True)),)),
        "mixtral": Family(qkv_bias=False, eps=1e-5, theta=1e6, windows=same_window(0), experts=mixtral_experts),
        "qwen3_moe": Family(head_norm="head", windows=qwen_windows, experts=qwen3_experts),
        "olmoe": Family(head_norm="all", eps=1e-5, experts=olmoe_experts, unless=(("clip_qkv", (None,)),)),
        "qwen3_vl_text": Family(head_norm="head", head_dim=128, theta=5e5),
        "gemma": _GEMMA,
        "gemma2": dataclasses.replace(
            _GEMMA, norms="both", query_scalar=True, softcaps=True, windows=every_second
        ),
        "gemma3_text": dataclasses.replace(
            _GEMMA, norms="both", head_norm="head", query_scalar=True, local_rope=True, theta=1e6,
            windows=all_but_every(6, "sliding_window_pattern", "_sliding_window_pattern"),
            unless=(_EITHER_WAY, ("attn_logit_softcapping", (None,)), ("final_logit_softcapping", (None,))),
        ),
        "gemma4_text": _GEMMA4,
        "gemma4_unified_text": _GEMMA4,
        "phi3": Family(qkv_bias=False, fused=True, mlp=_FUSED_MLP, eps=1e-5, windows=same_window(0)),
        "olmo2": Family(norms="post", head_norm="all", eps=1e-5),
        "olmo3": Family(norms="post", head_norm="all", eps=1e-5, theta=5e5, local_rope=True, local_theta=5e5,
                        windows=all_but_every(4)),
        "exaone4": Family(norms="post", head_norm="head", qkv_bias=False, eps=1e-5, no_rope="full",
                          windows=all_but_every(4, "sliding_window_pattern")),
        "ernie4_5": _ERNIE,
        "ernie4_5_moe": dataclasses.replace(_ERNIE, head_dim=None, experts=ernie_experts),
        "glm4": Family(
            norms="both", biased=True, output_bias=False, mlp=_FUSED_MLP, head_dim=128, eps=1.5625e-7,
            paired_rope=True, partial=0.5,
            norm_names=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
                        "post_mlp_layernorm"),
        ),
        "granite": Family(multipliers=True, no_rope="typed"),
        "granitemoe": Family(multipliers=True, no_rope="typed", experts=granite_experts),
        "granite_swa": Family(multipliers=True, tied=True, eps=1e-5, sinks=True, layer_thetas=True,
                              windows=all_but_first_of(4, 128)),
        "granitemoehybrid": Family(
            multipliers=True, no_rope="typed", mlp=("shared_mlp.input_linear", "shared_mlp.output_linear"),
            inner="shared_intermediate_size", complete=granite_hybrid,
        ),
        "gpt_oss": Family(
            biased=True, head_dim=64, eps=1e-5, theta=150000.0, sinks=True, windows=every_second,
            experts=gpt_oss_experts, in_columns=True, complete=gpt_oss,
            unless=(("swiglu_alpha", (None, 1.702)), ("swiglu_limit", (None, 7.0))),
        ),
        "minicpm": Family(multipliers=True, tied=True, complete=minicpm,
                          unless=(("num_experts", (None, 0)), ("sparse_config", (None,)))),
        "hunyuan_v1_dense": Family(head_norm="head", head_norms=("query_layernorm", "key_layernorm"), late_norm=True,
                                   eps=1e-5, complete=hunyuan),
        "ministral3": Family(qkv_bias=False, head_dim=128, eps=1e-5, query_scaled=True, complete=ministral3,
                             windows=same_window(0)),
        "smollm3": Family(tied=True, theta=2e6, no_rope="listed", windows=same_window(0),
                          unless=(("use_sliding_window", (None, False)),)),
    }
)  # fmt: skip
"""Families of the native runner by model_type."""

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def describe_model(config: Config) -> ModelSpec:
    """The spec of a config.json, of a model of several parts that of its language model. ModelFormatError with the
    reason where the native runner does not know the model."""
    config = text_config(config)
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        raise ModelFormatError(
            f"model_type={model_type!r} is not known to the native runner (known: {', '.join(sorted(FAMILIES))})"
        )
    for key, allowed in family.unless:
        if config.get(key) not in allowed:
            raise ModelFormatError(f"{model_type}: {key}={config.get(key)!r} is not known to the native runner")
    if config.get("quantization_config"):
        packed_layout(config)
    if family.complete is not None:
        config = family.complete(config)
    layers, heads, hidden = (_size(config, k) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    head_dim = size_of(config, "head_dim") or family.head_dim or hidden // heads
    if head_dim > _MAX_HEAD_DIM:
        raise ModelFormatError(f"head_dim={head_dim} is over {_MAX_HEAD_DIM}, the most of any model; check the config")
    kv_heads, inner = size_of(config, "num_key_value_heads") or heads, _size(config, family.inner)
    windows = family.windows(config, layers) if family.windows else [0] * layers
    shapes = family.shapes(config, windows) if family.shapes else same_shapes(layers, head_dim, kv_heads, inner)
    experts = family.experts(config, layers) if family.experts else None
    if experts is not None and not experts.beside:
        # What stands beside experts is an MLP of the width of the shared one.
        beside = zip(shapes, experts.sparse, strict=True)
        shapes = [one._replace(intermediate_size=experts.shared) if sparse else one for one, sparse in beside]
    ropes, rope_of = layer_ropes(config, family, [_head_dim(shapes, windows, is_full) for is_full in (True, False)])
    attention_bias = bool(config.get("attention_bias", family.biased))
    factor = _multipliers(config, family)
    scalar: float = head_dim
    if family.query_scalar:
        scalar = _given(config, "query_pre_attn_scalar", 256.0, 1e-6, 1e9)
    longest, pinned, vocab = context_length(config), pinned_context(config), _size(config, "vocab_size")
    longest, both_ways = longest if pinned is None else min(longest, pinned.length), attends_both_ways(config)
    return ModelSpec(
        model_type=model_type,
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        eps=_given(config, "rms_norm_eps", family.eps, 0.0, 1.0),
        activation=_activation(config, family),
        softmax_scale=family.scale or factor.get("attention_multiplier", 1 / math.sqrt(scalar)),
        softcap=_cap(config, "attn_logit_softcapping", 50.0) if family.softcaps else 0.0,
        logit_cap=_cap(config, "final_logit_softcapping", 30.0 if family.softcaps else 0.0)
        if family.softcaps or family.capped
        else 0.0,
        embedding_factor=math.sqrt(hidden) if family.scaled_embedding else factor.get("embedding_multiplier", 1.0),
        residual_factor=factor.get("residual_multiplier", 1.0),
        logit_factor=1.0 / factor.get("logits_scaling", 1.0),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bool(config.get("attention_output_bias", attention_bias))
        and family.qkv_bias is None
        and family.output_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        max_context=longest,
        layers=tuple(
            LayerSpec.of(w, rope_of(i, w), shape, longest * both_ways)
            for i, (w, shape) in enumerate(zip(windows, shapes, strict=True))
        ),
        ropes=ropes,
        both_ways=both_ways,
        per_layer=per_layer_input(config, vocab) if family.shapes is gemma4_shapes else None,
        query_scale=query_scale(rope_settings(config, family)) if family.query_scaled else None,
        experts=experts,
    )


def heads_by_layer(config: Config) -> list[tuple[int, int]]:
    """(head_dim, num_kv_heads) of each layer where a family's layers differ; empty where all have what the config says.
    ModelFormatError as `describe_model`."""
    family = FAMILIES.get(str(text_config(config).get("model_type")))
    if family is None or family.shapes is None:
        return []
    return [(layer.head_dim, layer.num_kv_heads) for layer in describe_model(config).layers]


def _size(config: Config, name: str) -> int:
    value = size_of(config, name)
    if value is None:
        raise ModelFormatError(f"the config lacks the key {name!r}")
    return value


def _activation(config: Config, family: Family) -> str:
    name = config.get("hidden_activation") or config.get("hidden_act") or family.activation
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelFormatError(f"activation {name!r} is not known to the native runner ({sorted(_ACTIVATIONS)})")
    return _ACTIVATIONS[name]


def _multipliers(config: Config, family: Family) -> dict[str, float]:
    names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    if not family.multipliers:
        return {}
    found = {name: number_of(config, name, 1e-6, 1e6) for name in names if config.get(name) is not None}
    return {"attention_multiplier": 1.0, **found}


def _head_dim(shapes: Sequence[LayerShape], windows: Sequence[int], is_full: bool) -> int:
    """What the layers without a window have, or those with one; of all where there are no such layers."""
    found = {shape.head_dim for shape, window in zip(shapes, windows, strict=True) if (window == 0) == is_full}
    found = found or {shape.head_dim for shape in shapes}
    if len(found) > 1:
        raise ModelFormatError(f"layers of one kind of attention have heads of {sorted(found)}, and one rope for all")
    return found.pop()
