"""Mixtures of experts: sizes, routing, shared experts, parallel MLPs, and GGUF keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.fields import integer_of
from kvboost_edge.models.families.gguf_keys import Keys

__all__ = [
    "LOCAL_KEYS",
    "SIGMOID",
    "STEP_KEYS",
    "ExpertNames",
    "Experts",
    "experts_by_step",
    "experts_of",
    "flag_of",
    "gguf_experts",
    "renorm_of",
]

Config = Mapping[str, Any]

STEP_KEYS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
LOCAL_KEYS = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
"""Config keys for the number of experts, the experts per token and the width of an expert."""

SIGMOID = 2
"""Value of `expert_gating_func` in a GGUF file for sigmoid routing weights."""

# Inputs per quantization group, and rows of a tile, see kernels/linear/weight_formats.py.
_GROUP = 32
_TILE = 16
_ALSO = {
    "num_experts": "num_local_experts",
    "moe_num_experts": "num_experts",
    "moe_k": "num_experts_per_tok",
}
_MOST = 1 << 12  # maximum number of experts, far beyond any real model


class ExpertNames(NamedTuple):
    """Tensor names of a mixture of experts inside a layer, without ".weight".

    Attributes:
        router: matrix of the router.
        experts: prefix before the number of an expert.
        parts: names after the number: gate (if experts have one), up and down.
        bias: complete name of the router's bias; "" for no bias.
        shared: matrices of the shared expert, in the order of `parts`; () for no shared expert.
        shared_gate: row whose sigmoid weights the shared expert; "" for a weight of 1.
        scales: complete names of two vectors, which scale the router's inputs and the weight of
            each expert; () for none.
        norms: norms of experts in parallel with an MLP: after the MLP, before the experts and after
            them; () for other models.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts."
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    bias: str = ""
    shared: tuple[str, ...] = ()
    shared_gate: str = ""
    scales: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts of a model.

    Attributes:
        count: number of experts in a layer.
        used: number of experts selected for each token.
        width: inner width of an expert.
        sparse: for each layer, True if it has experts and False if it has a dense MLP.
        score, renorm, eps, scale, groups, used_groups: see `kernels.reference.experts.Routing`.
        shared: inner width of the shared expert; 0 for no shared expert.
        beside: True if layers have experts in parallel with an MLP. Each of the two has its own
            norms before and after it, and the layer adds their outputs.
        biased: True if the router and all expert matrices have biases.
        activation: activation function of the experts; "" for the model's.
    """

    count: int
    used: int
    width: int
    sparse: tuple[bool, ...]
    names: ExpertNames
    score: str = "softmax"
    renorm: str = ""
    eps: float = 0.0
    scale: float = 1.0
    groups: int = 1
    used_groups: int = 1
    shared: int = 0
    beside: bool = False
    biased: bool = False
    activation: str = ""


def experts_of(
    config: Config,
    keys: Sequence[str],
    usual: Sequence[int | None],
    sparse: Sequence[bool],
    **rest: Any,
) -> Experts:
    """Return the mixture of experts that a config describes.

    Args:
        config: config of the language model.
        keys: config keys for the number of experts, the experts per token and the width of an
            expert.
        usual: default for each key; None if the key is required.
        sparse: for each layer, True if it has experts.
        rest: further fields of `Experts`.
    """
    # Later versions of transformers use other names for these keys.
    keys = [_ALSO[key] if key not in config and _ALSO.get(key) in config else key for key in keys]
    config = {**dict(zip(keys, usual, strict=True)), **config}
    of_count, of_used, of_width = keys
    count, used, width = (integer_of(config, key, 1) for key in keys)
    if count > _MOST:
        raise ModelFormatError(f"{of_count}={count} exceeds the limit of {_MOST}")
    if used > count:
        raise ModelFormatError(
            f"{of_used}={used} exceeds {of_count}={count}: a token cannot use more experts than "
            "there are"
        )
    if width % _GROUP:
        raise ModelFormatError(
            f"{of_width}={width} of the experts must be a multiple of {_GROUP} for the expert "
            "kernels"
        )
    hidden = integer_of(config, "hidden_size", 1)
    if hidden % _TILE:
        raise ModelFormatError(
            f"hidden_size={hidden} must be a multiple of {_TILE} for the expert kernels"
        )
    return Experts(count, used, width, tuple(sparse), rest.pop("names", ExpertNames()), **rest)


def flag_of(config: Config, key: str, default: bool) -> bool:
    """Return the boolean under a key, or `default` if the key is missing.

    Raises:
        ModelFormatError: the value is not a boolean.
    """
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ModelFormatError(f"config: {key}={value!r} must be true or false")
    return value


def experts_by_step(config: Config, layers: int, usual: tuple[int, int, int]) -> Experts:
    """Return a mixture of experts in every decoder_sparse_step-th layer.

    Routing weights are the softmax of all logits. If norm_topk_prob is set, they are divided by the
    sum over the selected experts.
    """
    sparse = _by_step(config, layers)
    return experts_of(config, STEP_KEYS, usual, sparse, renorm=renorm_of(config))


def _by_step(config: Config, layers: int) -> list[bool]:
    """Select every decoder_sparse_step-th layer that mlp_only_layers does not list."""
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, (list, tuple)) or any(
        isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < layers for i in dense
    ):
        raise ModelFormatError(
            f"mlp_only_layers={dense!r:.200} must be a list of layer indices below {layers}"
        )
    step = integer_of({"decoder_sparse_step": 1, **config}, "decoder_sparse_step", 1)
    return [(index + 1) % step == 0 and index not in dense for index in range(layers)]


def renorm_of(config: Config) -> str:
    """Return `Experts.renorm`: "add" if norm_topk_prob asks to divide weights by their sum, else
    "".
    """
    return "add" if flag_of(config, "norm_topk_prob", False) else ""


def gguf_experts(
    keys: Keys, count: str = "num_experts", used: str = "num_experts_per_tok"
) -> dict[str, Any]:
    """Return the number of experts and the experts per token.

    Files do not store how routing weights are computed. As in llama.cpp, the architecture decides.
    """
    return {count: keys.size("expert_count"), used: keys.size("expert_used_count")}
