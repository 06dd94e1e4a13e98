"""Specs of multi-token prediction (MTP) heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Container

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.spec import ModelSpec

__all__ = ["MtpSpec", "describe_mtp"]

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
        model: spec of a model with one layer, the head's. The layer's KV has index 0. The model is
            not tied: a file with the head alone may lack an LM head, which does not mean that the
            embedding serves as one.
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
        joins_states=True,
    )
    return MtpSpec(model, tuple(name for name, tensor in _SHARED.items() if tensor not in names))
