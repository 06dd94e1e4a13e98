"""Model families as data: what differs between the Llama-like decoders that the native runner
computes.

`describe_model` reads a config into a `ModelSpec`; what it does not know raises ModelFormatError
with the reason, so that the torch runner can take over. Nothing is guessed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.architectures import attends_both_ways, pinned_context
from kvboost_edge.models.config.file import context_length
from kvboost_edge.models.config.layer_ropes import layer_ropes, rope_settings
from kvboost_edge.models.config.nested import text_config
from kvboost_edge.models.config.quant_config import packed_layout
from kvboost_edge.models.config.rope_kinds import QueryScale, RopeKind, query_scale
from kvboost_edge.models.families.completed import gpt_oss, hunyuan, minicpm, ministral3
from kvboost_edge.models.families.falcon_h1 import (
    falcon_factors,
    falcon_layers,
    with_falcon_words,
)
from kvboost_edge.models.families.family import Family
from kvboost_edge.models.families.fields import number_of, size_of
from kvboost_edge.models.families.gemma4 import (
    PerLayerInput,
    gemma4_shapes,
    per_layer_input,
    with_gemma4_defaults,
)
from kvboost_edge.models.families.granite import granite_layers, with_granite_words
from kvboost_edge.models.families.layers import (
    NO_FACTORS,
    LayerFactors,
    LayerShape,
    LayerSpec,
    mixed_shapes,
    same_shapes,
)
from kvboost_edge.models.families.mixers import Mixer, MixerNames
from kvboost_edge.models.families.moe import (
    GRANITE_SHARED,
    Experts,
    ernie_experts,
    flag_of,
    gemma4_experts,
    gpt_oss_experts,
    granite_experts,
    granite_hybrid_experts,
    lfm2_experts,
    mixtral_experts,
    olmoe_experts,
    qwen2_experts,
    qwen3_5_experts,
    qwen3_experts,
)
from kvboost_edge.models.families.nemotron import (
    nemotron_experts,
    nemotron_layers,
    with_nemotron_words,
)
from kvboost_edge.models.families.ssm import (
    Hybrid,
    conv_layers,
    delta_layers,
    with_lfm2_defaults,
    with_shared_width,
)
from kvboost_edge.models.families.windows import (
    all_but_every,
    all_but_first_of,
    every_second,
    qwen_windows,
    same_window,
)

__all__ = [
    "FAMILIES",
    "Family",
    "LayerSpec",
    "ModelSpec",
    "describe_model",
    "heads_by_layer",
    "may_keep_states",
]

Config = Mapping[str, Any]

_MAX_HEAD_DIM = 1 << 16  # beyond any real model: rope makes tables of as many numbers


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the native runner needs to know of a model besides its weights. Sizes are in
    elements.

    Those of heads and of the MLP are the config's; what a layer has is in its LayerSpec.
    `both_ways`: tokens see those behind them, so a text is one pass and predicts nothing.
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
    activation: str  # "silu" | "gelu_tanh" | "relu2", which has no gate
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
    hybrid: Hybrid | None = None
    factors: LayerFactors = NO_FACTORS

    @property
    def mixer(self) -> Mixer | None:
        """What mixes tokens in the layers that keep a state; None where there is no such layer."""
        return None if self.hybrid is None else self.hybrid.mixer

    @property
    def named_mixer(self) -> tuple[Mixer, MixerNames]:
        """The same with what the checkpoint calls it, of a model that has such layers."""
        assert self.hybrid is not None
        assert self.hybrid.mixer is not None
        return self.hybrid.mixer, self.hybrid.names

    @property
    def first_shared(self) -> int:
        """The first layer behind which none computes keys and values, or keeps a state; the number
        of layers where the last one does.
        """
        return 1 + max(
            index for index, layer in enumerate(self.layers) if layer.owns_kv or layer.state >= 0
        )

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
_ERNIE = Family(
    qkv_bias=False,
    tied=True,
    head_dim=128,
    eps=1e-5,
    theta=5e5,
    paired_rope=True,
    unless=(("use_bias", (None, False)),),
)
_LFM2 = Family(
    qkv_bias=False,
    tied=True,
    eps=1e-5,
    theta=1e6,
    head_norm="head",
    head_norms=("q_layernorm", "k_layernorm"),
    norm_names=("operator_norm", "ffn_norm"),
    last_norm="model.embedding_norm",
    out="self_attn.out_proj",
    mlp=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    complete=with_lfm2_defaults,
    hybrid=conv_layers,
    unless=(("conv_bias", (None, False)),),
)
_QWEN35 = Family(
    norm_offset=1.0,
    head_norm="head",
    head_dim=256,
    partial=0.25,
    output_gate=True,
    hybrid=delta_layers,
    unless=(("attn_output_gate", (None, True)), ("hidden_act", (None, "silu", "swish"))),
)
_GEMMA = Family(
    norm_offset=1.0,
    tied=True,
    head_dim=256,
    scaled_embedding=True,
    activation="gelu_pytorch_tanh",
    unless=(_ONE_WAY,),
)
_GEMMA4 = dataclasses.replace(
    _GEMMA,
    norms="both",
    norm_offset=0.0,
    head_norm="head",
    value_norm=True,
    layer_scalar=True,
    scale=1.0,
    capped=True,
    local_rope=True,
    theta=1e6,
    windows=all_but_every(6),
    shapes=gemma4_shapes,
    complete=with_gemma4_defaults,
    experts=gemma4_experts,
    unless=(("use_bidirectional_attention", (None, False, "vision")),),
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": Family(qkv_bias=False, windows=same_window(4096)),
        "qwen2": _QWEN2,
        "qwen3": Family(head_norm="head", head_dim=128, windows=qwen_windows),
        "qwen2_moe": dataclasses.replace(
            _QWEN2, experts=qwen2_experts, unless=(("qkv_bias", (None, True)),)
        ),
        "mixtral": Family(
            qkv_bias=False, eps=1e-5, theta=1e6, windows=same_window(0), experts=mixtral_experts
        ),
        "qwen3_moe": Family(head_norm="head", windows=qwen_windows, experts=qwen3_experts),
        "olmoe": Family(
            head_norm="all", eps=1e-5, experts=olmoe_experts, unless=(("clip_qkv", (None,)),)
        ),
        "qwen3_vl_text": Family(head_norm="head", head_dim=128, theta=5e5),
        "gemma": _GEMMA,
        "gemma2": dataclasses.replace(
            _GEMMA, norms="both", query_scalar=True, softcaps=True, windows=every_second
        ),
        "gemma3_text": dataclasses.replace(
            _GEMMA,
            norms="both",
            head_norm="head",
            query_scalar=True,
            local_rope=True,
            theta=1e6,
            windows=all_but_every(6, "sliding_window_pattern", "_sliding_window_pattern"),
            unless=(
                _EITHER_WAY,
                ("attn_logit_softcapping", (None,)),
                ("final_logit_softcapping", (None,)),
            ),
        ),
        "gemma4_text": _GEMMA4,
        "gemma4_unified_text": _GEMMA4,
        "phi3": Family(
            qkv_bias=False, fused=True, mlp=_FUSED_MLP, eps=1e-5, windows=same_window(0)
        ),
        "olmo2": Family(norms="post", head_norm="all", eps=1e-5),
        "olmo3": Family(
            norms="post",
            head_norm="all",
            eps=1e-5,
            theta=5e5,
            local_rope=True,
            local_theta=5e5,
            windows=all_but_every(4),
        ),
        "exaone4": Family(
            norms="post",
            head_norm="head",
            qkv_bias=False,
            eps=1e-5,
            no_rope="full",
            windows=all_but_every(4, "sliding_window_pattern"),
        ),
        "ernie4_5": _ERNIE,
        "ernie4_5_moe": dataclasses.replace(_ERNIE, head_dim=None, experts=ernie_experts),
        "glm4": Family(
            norms="both",
            biased=True,
            output_bias=False,
            mlp=_FUSED_MLP,
            head_dim=128,
            eps=1.5625e-7,
            paired_rope=True,
            partial=0.5,
            norm_names=(
                "input_layernorm",
                "post_self_attn_layernorm",
                "post_attention_layernorm",
                "post_mlp_layernorm",
            ),
        ),
        "granite": Family(multipliers=True, no_rope="typed"),
        "granitemoe": Family(multipliers=True, no_rope="typed", experts=granite_experts),
        "granite_swa": Family(
            multipliers=True,
            tied=True,
            eps=1e-5,
            sinks=True,
            layer_thetas=True,
            windows=all_but_first_of(4, 128),
        ),
        "granitemoehybrid": Family(
            multipliers=True,
            no_rope="typed",
            inner="shared_intermediate_size",
            complete=with_granite_words,
            mlp=GRANITE_SHARED,
            mlp_whole="shared_mlp.input_linear",
            hybrid=granite_layers,
            experts=granite_hybrid_experts,
        ),
        "lfm2": _LFM2,
        "lfm2_moe": dataclasses.replace(_LFM2, experts=lfm2_experts),
        "qwen3_5_text": _QWEN35,
        "qwen3_5_moe_text": dataclasses.replace(
            _QWEN35,
            inner="shared_expert_intermediate_size",
            experts=qwen3_5_experts,
            complete=with_shared_width,
        ),
        "falcon_h1": Family(
            qkv_bias=False,
            eps=1e-5,
            norm_names=("input_layernorm", "pre_ff_layernorm"),
            multipliers=True,
            last_norm="model.final_layernorm",
            complete=with_falcon_words,
            hybrid=falcon_layers,
            factors=falcon_factors,
            mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
            unless=(
                ("attention_bias", (None, False)),
                ("mlp_bias", (None, False)),
                ("mamba_proj_bias", (None, False)),
                ("projectors_bias", (None, False)),
                ("hidden_act", (None, "silu", "swish")),
            ),
        ),
        "nemotron_h": Family(
            qkv_bias=False,
            gated=False,
            no_rope="typed",
            norm_names=("norm", "norm"),
            mlp=("mlp.up_proj", "mlp.down_proj"),
            complete=with_nemotron_words,
            hybrid=nemotron_layers,
            experts=nemotron_experts,
            unless=(
                ("attention_bias", (None, False)),
                ("use_bias", (None, False)),
                ("mamba_proj_bias", (None, False)),
                ("mamba_hidden_act", (None, "silu")),
                ("moe_latent_size", (None,)),
                ("n_group", (None, 1)),
                ("n_shared_experts", (None, 1)),
                ("sliding_window", (None,)),
            ),
        ),
        "gpt_oss": Family(
            biased=True,
            head_dim=64,
            eps=1e-5,
            theta=150000.0,
            sinks=True,
            windows=every_second,
            experts=gpt_oss_experts,
            in_columns=True,
            complete=gpt_oss,
            unless=(("swiglu_alpha", (None, 1.702)), ("swiglu_limit", (None, 7.0))),
        ),
        "minicpm": Family(
            multipliers=True,
            tied=True,
            complete=minicpm,
            unless=(("num_experts", (None, 0)), ("sparse_config", (None,))),
        ),
        "hunyuan_v1_dense": Family(
            head_norm="head",
            head_norms=("query_layernorm", "key_layernorm"),
            late_norm=True,
            eps=1e-5,
            complete=hunyuan,
        ),
        "ministral3": Family(
            qkv_bias=False,
            head_dim=128,
            eps=1e-5,
            query_scaled=True,
            complete=ministral3,
            windows=same_window(0),
        ),
        "smollm3": Family(
            tied=True,
            theta=2e6,
            no_rope="listed",
            windows=same_window(0),
            unless=(("use_sliding_window", (None, False)),),
        ),
    }
)
"""Families of the native runner by model_type."""

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_WITHOUT_GATE = {"relu2": "relu2"}


def describe_model(config: Config) -> ModelSpec:
    """The spec of a config.json, of a model of several parts that of its language model.
    ModelFormatError with the reason where the native runner does not know the model.
    """
    config = text_config(config)
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        raise ModelFormatError(
            f"model_type={model_type!r} is not known to the native runner (known: "
            f"{', '.join(sorted(FAMILIES))})"
        )
    for key, allowed in family.unless:
        if config.get(key) not in allowed:
            raise ModelFormatError(
                f"{model_type}: {key}={config.get(key)!r} is not known to the native runner"
            )
    if config.get("quantization_config"):
        packed_layout(config)
    if family.complete is not None:
        config = family.complete(config)
    layers, heads, hidden = (
        _size(config, k) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    head_dim = size_of(config, "head_dim") or family.head_dim or hidden // heads
    if head_dim > _MAX_HEAD_DIM:
        raise ModelFormatError(
            f"head_dim={head_dim} is over {_MAX_HEAD_DIM}, the most of any model; check the config"
        )
    kv_heads = size_of(config, "num_key_value_heads") or heads
    inner = _size(config, family.inner)
    windows = family.windows(config, layers) if family.windows else [0] * layers
    shapes = (
        family.shapes(config, windows)
        if family.shapes
        else same_shapes(layers, head_dim, kv_heads, inner)
    )
    hybrid = family.hybrid(config, layers) if family.hybrid else None
    if hybrid is not None:
        shapes = mixed_shapes(shapes, hybrid.kinds, alone=hybrid.alone)
    experts = family.experts(config, layers) if family.experts else None
    if experts is not None and not experts.beside:
        # What stands beside experts is an MLP of the width of the shared one.
        beside = zip(shapes, experts.sparse, strict=True)
        shapes = [
            one._replace(intermediate_size=experts.shared) if sparse else one
            for one, sparse in beside
        ]
    ropes, rope_of = layer_ropes(
        config, family, [_head_dim(shapes, windows, is_full) for is_full in (True, False)]
    )
    attention_bias = bool(config.get("attention_bias", family.biased))
    factor = _multipliers(config, family)
    scalar: float = head_dim
    if family.query_scalar:
        scalar = _given(config, "query_pre_attn_scalar", 256.0, 1e-6, 1e9)
    longest = context_length(config)
    pinned = pinned_context(config)
    vocab = _size(config, "vocab_size")
    longest = longest if pinned is None else min(longest, pinned.length)
    both_ways = attends_both_ways(config)
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
        embedding_factor=math.sqrt(hidden)
        if family.scaled_embedding
        else factor.get("embedding_multiplier", 1.0),
        residual_factor=factor.get("residual_multiplier", 1.0),
        logit_factor=1.0 / factor.get("logits_scaling", 1.0),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bool(config.get("attention_output_bias", attention_bias))
        and family.qkv_bias is None
        and family.output_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        tied=family.tied
        if config.get("tie_word_embeddings") is None
        else flag_of(config, "tie_word_embeddings", False),
        max_context=longest,
        layers=tuple(
            LayerSpec.of(w, rope_of(i, w) if shape.kv >= 0 else -1, shape, longest * both_ways)
            for i, (w, shape) in enumerate(zip(windows, shapes, strict=True))
        ),
        ropes=ropes,
        both_ways=both_ways,
        per_layer=per_layer_input(config, vocab) if family.shapes is gemma4_shapes else None,
        query_scale=query_scale(rope_settings(config, family)) if family.query_scaled else None,
        experts=experts,
        hybrid=hybrid,
        factors=family.factors(config) if family.factors else NO_FACTORS,
    )


def may_keep_states(config: Config, num_attending: int = 0) -> bool:
    """Whether layers of the model keep a state instead of keys and values, as its family's may;
    True where the config makes no sense. `num_attending`: layers that have keys and values, where
    files show it; a Granite 4 whose config names no layers and of which all have them keeps no
    state.
    """
    config = text_config(config)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or family.hybrid is None:
        return False
    try:
        completed = family.complete(config) if family.complete is not None else config
        layers = _size(completed, "num_hidden_layers")
        if (
            family.hybrid is granite_layers
            and completed["layer_types"] is None
            and num_attending == layers
        ):
            return False
        hybrid = family.hybrid(completed, layers)
    except ModelFormatError:
        return True
    return hybrid is not None and hybrid.mixer is not None


def heads_by_layer(config: Config) -> list[tuple[int, int]]:
    """(head_dim, num_kv_heads) of each layer where a family's layers differ; empty where all have
    what the config says. ModelFormatError as `describe_model`.
    """
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
    known = _ACTIVATIONS if family.gated else _WITHOUT_GATE
    if not isinstance(name, str) or name not in known:
        raise ModelFormatError(
            f"activation {name!r} is not known to the native runner ({sorted(known)})"
        )
    return known[name]


def _multipliers(config: Config, family: Family) -> dict[str, float]:
    names = (
        "attention_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
    )
    if not family.multipliers:
        return {}
    found = {
        name: number_of(config, name, 1e-6, 1e6) for name in names if config.get(name) is not None
    }
    return {"attention_multiplier": 1.0, **found}


def _head_dim(shapes: Sequence[LayerShape], windows: Sequence[int], is_full: bool) -> int:
    """What the layers without a window have, or those with one; of all where there are no such
    layers.
    """
    found = {
        shape.head_dim
        for shape, window in zip(shapes, windows, strict=True)
        if (window == 0) == is_full
    }
    found = found or {shape.head_dim for shape in shapes}
    if len(found) > 1:
        raise ModelFormatError(
            f"layers of one kind of attention have heads of {sorted(found)}, and one rope for all"
        )
    return found.pop()
