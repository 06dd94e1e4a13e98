"""Model specs for the native runner, derived from the config and the family.

`describe_model` raises ModelFormatError for an unknown setting instead of guessing its value. The
torch runner can then run the model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.architectures import is_bidirectional, pinned_context
from kvboost_edge.models.config.json_readers import MULTIPLIERS, context_length
from kvboost_edge.models.config.layer_ropes import layer_ropes, rope_settings
from kvboost_edge.models.config.nested import text_config
from kvboost_edge.models.config.quant_config import packed_layout
from kvboost_edge.models.config.rope_kinds import QueryScale, RopeKind, query_scale
from kvboost_edge.models.families.family import Family
from kvboost_edge.models.families.fields import number_of, size_of
from kvboost_edge.models.families.layers import (
    NO_FACTORS,
    LayerFactors,
    LayerShape,
    LayerSpec,
    PerLayerInput,
    mixed_shapes,
    same_shapes,
)
from kvboost_edge.models.families.mixers import Mixer, MixerNames
from kvboost_edge.models.families.moe import Experts, flag_of
from kvboost_edge.models.families.registry import FAMILIES
from kvboost_edge.models.families.ssm import Hybrid

__all__ = [
    "Describe",
    "LayerSpec",
    "ModelSpec",
    "describe_model",
    "heads_by_layer",
    "may_keep_states",
]

Config = Mapping[str, Any]

_MAX_HEAD_DIM = 1 << 16  # beyond any real model; limits the number of columns of RoPE tables


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """Description of a model for the native runner, without the weights.

    Sizes are in elements. Head and MLP sizes are the config's, and each LayerSpec has the sizes of
    its layer. `bidirectional` is True for bidirectional attention: a text is processed in a single
    pass, and the model cannot generate. `joins_hidden_states` is True for an MTP head, whose input
    rows join an embedding and a hidden state of the model. `backbone_size` is the hidden size of
    that model for an assistant, whose layers attend to the model's KV, and 0 for others.
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
    activation: str  # "silu", "gelu_tanh", "gated_relu2", or "relu2" for an MLP without a gate
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
    bidirectional: bool
    hybrid: Hybrid | None = None
    factors: LayerFactors = NO_FACTORS
    head_norm: str = ""  # see Family.head_norm
    joins_hidden_states: bool = False
    backbone_size: int = 0

    @property
    def mixer(self) -> Mixer | None:
        """Token mixer of the recurrent layers; None for a model without them."""
        return None if self.hybrid is None else self.hybrid.mixer

    @property
    def named_mixer(self) -> tuple[Mixer, MixerNames]:
        """Token mixer of a hybrid model, and the names of its tensors in the checkpoint."""
        assert self.hybrid is not None
        assert self.hybrid.mixer is not None
        return self.hybrid.mixer, self.hybrid.names

    @property
    def first_shared(self) -> int:
        """Number of layers up to and including the last one that computes KV or keeps recurrent
        state. For an assistant, which has no such layer, it is the number of layers.
        """
        last = len(self.layers) - 1
        computing = (
            index for index, layer in enumerate(self.layers) if layer.owns_kv or layer.state >= 0
        )
        return 1 + max(computing, default=last)

    @property
    def state_size(self) -> int:
        """Size of the hidden states that an MTP head joins with embeddings and returns."""
        return self.backbone_size or self.hidden_size

    @property
    def kv_layers(self) -> tuple[LayerSpec, ...]:
        """Layers that compute KV, in the order of the block pool."""
        return tuple(layer for layer in self.layers if layer.owns_kv)


Describe = Callable[[Config], ModelSpec]
"""Function that returns the spec of a config: `describe_model`, or a function with a cached result.
"""


def _given(config: Config, key: str, default: float, low: float, high: float) -> float:
    """Return the number under a key, or `default` if the key is missing."""
    return number_of(config, key, low, high) if key in config else default


def _cap(config: Config, key: str, default: float) -> float:
    """Return a softcap; 0 if it is null."""
    return 0.0 if config.get(key, default) is None else _given(config, key, default, 0.0, 1e6)


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "gated_relu2",
}
_WITHOUT_GATE = {"relu2": "relu2"}


class _Sizes(NamedTuple):
    """Sizes that a config gives for all layers."""

    layers: int
    heads: int
    hidden: int
    head_dim: int
    kv_heads: int
    inner: int


class _Arranged(NamedTuple):
    """Settings that may differ between layers."""

    windows: Sequence[int]
    shapes: Sequence[LayerShape]
    hybrid: Hybrid | None
    experts: Experts | None


def describe_model(config: Config) -> ModelSpec:
    """Return the spec of a model, or of the language model of a composite model.

    Raises:
        ModelFormatError: the native runner does not support the model; the message says why.
    """
    config = text_config(config)
    family = _known_family(config)
    if config.get("quantization_config"):
        packed_layout(config)
    if family.complete is not None:
        config = family.complete(config)
    sizes = _sizes(config, family)
    windows, shapes, hybrid, experts = _arranged(config, family, sizes)
    ropes, rope_of = layer_ropes(
        config, family, [_head_dim(shapes, windows, is_full) for is_full in (True, False)]
    )
    attention_bias = bool(config.get("attention_bias", family.biased))
    factor = _multipliers(config, family)
    softmax_scale = _softmax_scale(config, family, sizes, factor)
    longest = context_length(config)
    pinned = pinned_context(config)
    vocab = _size(config, "vocab_size")
    longest = longest if pinned is None else min(longest, pinned.length)
    bidirectional = is_bidirectional(config)
    return ModelSpec(
        model_type=str(config.get("model_type")),
        family=family,
        vocab_size=vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        eps=_given(config, "rms_norm_eps", family.eps, 0.0, 1.0),
        activation=_activation(config, family),
        softmax_scale=softmax_scale,
        softcap=_cap(config, "attn_logit_softcapping", 50.0) if family.softcaps else 0.0,
        logit_cap=_logit_cap(config, family),
        embedding_factor=math.sqrt(sizes.hidden)
        if family.scaled_embedding
        else factor.get("embedding_multiplier", 1.0),
        residual_factor=factor.get("residual_multiplier", 1.0),
        logit_factor=1.0 / factor.get("logits_scaling", 1.0),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bool(config.get("attention_output_bias", attention_bias))
        and family.qkv_bias is None
        and family.output_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        tied=_is_tied(config, family),
        max_context=longest,
        layers=tuple(
            LayerSpec.of(w, rope_of(i, w) if shape.kv >= 0 else -1, shape, longest * bidirectional)
            for i, (w, shape) in enumerate(zip(windows, shapes, strict=True))
        ),
        ropes=ropes,
        bidirectional=bidirectional,
        per_layer=family.per_layer(config, vocab) if family.per_layer else None,
        query_scale=query_scale(rope_settings(config, family)) if family.query_scaled else None,
        experts=experts,
        hybrid=hybrid,
        factors=family.factors(config) if family.factors else NO_FACTORS,
        head_norm=_head_norm(config, family),
    )


def _known_family(config: Config) -> Family:
    """Return the family of a config, after checking the keys whose values the family restricts."""
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        raise ModelFormatError(
            f"model_type={model_type!r} is not supported by the native runner (supported: "
            f"{', '.join(sorted(FAMILIES))})"
        )
    for key, allowed in family.unless:
        if config.get(key) not in allowed:
            raise ModelFormatError(
                f"{model_type}: {key}={config.get(key)!r} is not supported by the native runner"
            )
    return family


def _sizes(config: Config, family: Family) -> _Sizes:
    """Return the sizes in a config to which defaults have been added."""
    layers, heads, hidden = (
        _size(config, k) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    head_dim = size_of(config, "head_dim") or family.head_dim or hidden // heads
    if head_dim > _MAX_HEAD_DIM:
        raise ModelFormatError(
            f"head_dim={head_dim} exceeds the limit of {_MAX_HEAD_DIM}; check the config"
        )
    kv_heads = size_of(config, "num_key_value_heads") or heads
    return _Sizes(layers, heads, hidden, head_dim, kv_heads, _size(config, family.inner))


def _arranged(config: Config, family: Family, sizes: _Sizes) -> _Arranged:
    """Determine which layers have a window, attention, recurrent state or experts."""
    layers = sizes.layers
    windows = family.windows(config, layers) if family.windows else [0] * layers
    shapes = (
        family.shapes(config, windows)
        if family.shapes
        else same_shapes(layers, sizes.head_dim, sizes.kv_heads, sizes.inner)
    )
    hybrid = family.hybrid(config, layers) if family.hybrid else None
    if hybrid is not None:
        shapes = mixed_shapes(shapes, hybrid.kinds, alone=hybrid.alone)
    experts = family.experts(config, layers) if family.experts else None
    if experts is not None and not experts.beside:
        # In layers with experts, the dense MLP is the shared expert and has its width.
        beside = zip(shapes, experts.sparse, strict=True)
        shapes = [
            one._replace(intermediate_size=experts.shared) if sparse else one
            for one, sparse in beside
        ]
    return _Arranged(windows, shapes, hybrid, experts)


def may_keep_states(config: Config, num_attending: int = 0) -> bool:
    """Return whether layers may have recurrent state instead of KV.

    The result is True for an invalid config.

    Args:
        config: the object in config.json.
        num_attending: number of layers with attention tensors, if known from the files; see
            `Family.may_all_attend`.
    """
    config = text_config(config)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or family.hybrid is None:
        return False
    try:
        completed = family.complete(config) if family.complete is not None else config
        layers = _size(completed, "num_hidden_layers")
        if family.may_all_attend and completed["layer_types"] is None and num_attending == layers:
            return False
        hybrid = family.hybrid(completed, layers)
    except ModelFormatError:
        return True
    return hybrid is not None and hybrid.mixer is not None


def heads_by_layer(config: Config, describe: Describe = describe_model) -> list[tuple[int, int]]:
    """Return (head_dim, num_kv_heads) of each layer, or [] if the family's layers are all equal.

    Raises:
        ModelFormatError: raised by `describe`.
    """
    family = FAMILIES.get(str(text_config(config).get("model_type")))
    if family is None or family.shapes is None:
        return []
    return [(layer.head_dim, layer.num_kv_heads) for layer in describe(config).layers]


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
            f"activation {name!r} is not supported by the native runner (supported: "
            f"{', '.join(sorted(known))})"
        )
    return known[name]


def _multipliers(config: Config, family: Family) -> dict[str, float]:
    if not family.multipliers:
        return {}
    found = {
        name: number_of(config, name, 1e-6, 1e6)
        for name in MULTIPLIERS
        if config.get(name) is not None
    }
    return {"attention_multiplier": 1.0, **found}


def _softmax_scale(
    config: Config, family: Family, sizes: _Sizes, factor: Mapping[str, float]
) -> float:
    scalar: float = sizes.head_dim
    if family.query_scalar:
        scalar = _given(config, "query_pre_attn_scalar", 256.0, 1e-6, 1e9)
    return family.scale or factor.get("attention_multiplier", 1 / math.sqrt(scalar))


def _logit_cap(config: Config, family: Family) -> float:
    if not (family.softcaps or family.capped):
        return 0.0
    return _cap(config, "final_logit_softcapping", 30.0 if family.softcaps else 0.0)


def _head_norm(config: Config, family: Family) -> str:
    if family.head_norm_key and not flag_of(config, family.head_norm_key, False):
        return ""
    return family.head_norm


def _is_tied(config: Config, family: Family) -> bool:
    if config.get("tie_word_embeddings") is None:
        return family.tied
    return flag_of(config, "tie_word_embeddings", False)


def _head_dim(shapes: Sequence[LayerShape], windows: Sequence[int], is_full: bool) -> int:
    """Return the head size of full or of sliding layers.

    If the model has no layers of that type, it is the head size of the other layers.
    """
    found = {
        shape.head_dim
        for shape, window in zip(shapes, windows, strict=True)
        if (window == 0) == is_full
    }
    found = found or {shape.head_dim for shape in shapes}
    if len(found) > 1:
        raise ModelFormatError(
            f"layers with the same RoPE have different head sizes {sorted(found)}"
        )
    return found.pop()
