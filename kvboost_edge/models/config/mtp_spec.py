"""Specs of multi-token prediction (MTP) heads, which include assistants."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from kvboost_edge.errors import DraftModelMismatch, ModelFormatError
from kvboost_edge.models.config.spec import LayerSpec, ModelSpec, describe_model
from kvboost_edge.models.families.fields import size_of
from kvboost_edge.models.families.registry import ASSISTANTS

__all__ = ["MtpSpec", "describe_assistant", "describe_mtp", "fitted_head", "is_assistant"]

# Entries of a pack plan that a head may share with the model, and their tensors.
_SHARED = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}


@dataclasses.dataclass(frozen=True, slots=True)
class MtpSpec:
    """Description of an MTP head, see families/mtp.py.

    Attributes:
        model: spec of a model with the layers of the head. The KV of a head with one layer has
            index 0. An assistant's layers have the indices of the model's KV that they attend to.
            The spec is not tied: a file with the head alone may lack an LM head, which does not
            mean that the embedding serves as one.
        shared: entries of the model's pack plan that the head uses instead of own ones, some of
            "embed", "norm" and "head". In a tied model, "embed" serves as "head".
    """

    model: ModelSpec
    shared: tuple[str, ...]


def describe_mtp(spec: ModelSpec, names: Container[str]) -> MtpSpec:
    """Return the spec of a model's MTP head.

    The layer has the shape of the model's last layer with attention. In a mixture of experts, it
    has experts.

    Args:
        spec: spec of the model.
        names: names of the head's tensors.
    """
    layer = next((one for one in reversed(spec.layers) if one.attends), None)
    if layer is None or not layer.owns_kv:
        raise ModelFormatError(
            f"{spec.model_type}: a multi-token prediction head needs a layer with attention and "
            "its own KV"
        )
    experts = spec.experts
    if experts is not None:
        layer = dataclasses.replace(layer, intermediate_size=experts.shared)
        experts = dataclasses.replace(experts, sparse=(True,))
    model = dataclasses.replace(
        spec,
        layers=(dataclasses.replace(layer, kv=0, state=-1),),
        experts=experts,
        hybrid=None,
        tied=False,
        joins_hidden_states=True,
    )
    return MtpSpec(model, tuple(name for name, tensor in _SHARED.items() if tensor not in names))


def fitted_head(head: MtpSpec, own: ModelSpec, target: ModelSpec) -> MtpSpec:
    """Return the spec of a head in a file of its own, for the model that it drafts for.

    Args:
        head: spec of the head, by the file's metadata.
        own: spec of the whole model, likewise. A file without an embedding may give fewer tokens
            than its model has rows.
        target: spec of the model.

    Raises:
        DraftModelMismatch: the head belongs to another model. The message names the difference.
    """
    wanted = describe_mtp(target, ()).model
    layer, fitting = (model.layers[0] for model in (head.model, wanted))
    pairs = (
        ("model_type", own.model_type, target.model_type),
        ("number of layers", len(own.layers), len(target.layers)),
        ("hidden size", own.hidden_size, target.hidden_size),
        ("number of query heads", own.num_heads, target.num_heads),
        ("number of KV heads", layer.num_kv_heads, fitting.num_kv_heads),
        ("head size", layer.head_dim, fitting.head_dim),
        ("MLP size", layer.intermediate_size, fitting.intermediate_size),
        ("RoPE", _rope(head.model, layer), _rope(wanted, fitting)),
        ("vocabulary", max(own.vocab_size, target.vocab_size), target.vocab_size),
    )
    for name, found, expected in pairs:
        if found != expected:
            raise DraftModelMismatch(
                f"the multi-token prediction head belongs to a model with another {name}: "
                f"{found}, but the model has {expected}; give the head of this model"
            )
    model = dataclasses.replace(head.model, vocab_size=target.vocab_size)
    return dataclasses.replace(head, model=model)


_GROUP = 32  # inputs per quantization group of a matrix


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Return whether a config is that of an assistant."""
    return config.get("model_type") in ASSISTANTS


def describe_assistant(config: Mapping[str, Any], target: ModelSpec) -> MtpSpec:
    """Return the spec of an assistant.

    Args:
        config: config of the assistant.
        target: spec of the model that it drafts for.

    Raises:
        ModelFormatError: the assistant is damaged.
        DraftModelMismatch: the assistant does not fit the model. The message names the difference.
    """
    kind = str(config.get("model_type"))
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        raise ModelFormatError(
            f"the config of model_type={kind!r} has text_config={inner!r:.60}, which must be an "
            "object that describes its layers"
        )
    layers = ASSISTANTS[kind]
    own = describe_model(
        {"hidden_size_per_layer_input": 0, **inner, "model_type": layers, "num_kv_shared_layers": 0}
    )
    if own.per_layer is not None or own.experts is not None:
        raise ModelFormatError(
            f"the text_config of model_type={kind!r} has per-layer embeddings or experts, which "
            "are not supported in an assistant"
        )
    if target.family is not own.family:
        raise DraftModelMismatch(
            f"an assistant of model_type={kind!r} drafts for models of its family, not for "
            f"model_type={target.model_type!r}"
        )
    backbone = size_of(config, "backbone_hidden_size") or 0
    pairs = (
        ("backbone_hidden_size", backbone, "hidden_size", target.hidden_size),
        ("vocab_size", own.vocab_size, "vocab_size", target.vocab_size),
    )
    for name, found, key, wanted in pairs:
        if found != wanted:
            raise DraftModelMismatch(
                f"the assistant has {name}={found}, but the model has {key}={wanted}; give the "
                "assistant of this model"
            )
    if backbone % _GROUP:
        raise ModelFormatError(
            f"backbone_hidden_size={backbone} is not a multiple of {_GROUP}, which is not supported"
        )
    model = dataclasses.replace(
        own,
        layers=tuple(_borrowing(index, own, target) for index in range(len(own.layers))),
        embedding_factor=target.embedding_factor,
        logit_cap=0.0,
        tied=False,
        joins_hidden_states=True,
        backbone_size=backbone,
    )
    return MtpSpec(model, ("embed",))


def _borrowing(index: int, own: ModelSpec, target: ModelSpec) -> LayerSpec:
    """Return a layer of an assistant with the index of the model's KV that it attends to.

    A query sees no KV at its own position, so its window has one position less.

    Raises:
        DraftModelMismatch: the model has no KV that fits the layer.
    """
    layer = own.layers[index]
    kind = "sliding" if layer.window else "full"
    of_kind = [
        one for one in target.layers if one.owns_kv and bool(one.window) == bool(layer.window)
    ]
    if not of_kind:
        raise DraftModelMismatch(
            f"layer {index} of the assistant needs the KV of a layer with {kind} attention, but "
            "the model has none"
        )
    giver = of_kind[-1]
    pairs = (
        ("head_dim", layer.head_dim, giver.head_dim),
        ("number of KV heads", layer.num_kv_heads, giver.num_kv_heads),
        ("sliding window", layer.window, giver.window),
        ("RoPE", _rope(own, layer), _rope(target, giver)),
    )
    for name, found, wanted in pairs:
        if found != wanted:
            raise DraftModelMismatch(
                f"layer {index} of the assistant ({kind} attention) has another {name} than the "
                f"KV of the model that it attends to: {found}, but the model has {wanted}; give "
                "the assistant of this model"
            )
    if layer.window == 1:
        raise ModelFormatError("an assistant with a sliding window of 1 token is not supported")
    return dataclasses.replace(
        layer, kv=giver.kv, owns_kv=False, has_values=True, window=max(layer.window - 1, 0)
    )


def _rope(spec: ModelSpec, layer: LayerSpec) -> tuple[str, int]:
    """Return the RoPE of a layer as a value for comparison and messages."""
    if layer.rope < 0:
        return "none", 0
    rope = spec.ropes[layer.rope]
    frequencies = np.array(rope.frequencies) * rope.factor
    return " ".join(f"{one:.4g}" for one in frequencies[[0, -1]]), len(frequencies)
