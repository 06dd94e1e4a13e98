"""Mixtures of experts as configs of the families say them: how many, how a router chooses, what
stands beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.fields import integer_of, number_of

__all__ = [
    "GRANITE_SHARED",
    "ExpertNames",
    "Experts",
    "ernie_experts",
    "experts_of",
    "flag_of",
    "gemma4_experts",
    "gpt_oss_experts",
    "granite_experts",
    "granite_hybrid_experts",
    "lfm2_experts",
    "mixtral_experts",
    "olmoe_experts",
    "qwen2_experts",
    "qwen3_5_experts",
    "qwen3_experts",
]

Config = Mapping[str, Any]

GRANITE_SHARED = ("shared_mlp.gate_proj", "shared_mlp.up_proj", "shared_mlp.output_linear")
"""Gate, up and down of Granite 4's only MLPs, and of what its experts share."""

# inputs quantized together, rows of a tile: see kernels/linear/tiles.py
_GROUP = 32
_TILE = 16
_ALSO = {
    "num_experts": "num_local_experts",
    "moe_num_experts": "num_experts",
    "moe_k": "num_experts_per_tok",
}
_MOST = 1 << 12  # experts, beyond any model


class ExpertNames(NamedTuple):
    """What the checkpoint calls them inside a layer, without ".weight".

    experts       the prefix of an expert's number; parts: gate, if it has one, up and down behind
                  it
    bias          of the choice, all of the name; "" where there is none
    shared        the same of the expert that all tokens share; () where there is none
    shared_gate   the row whose sigmoid is the shared expert's share; "": its share is 1
    scales        vectors: what the router's inputs are multiplied with, and what each expert's
                  share is; all of the names; () where there are none
    norms         of a mixture beside an MLP: behind the MLP, before the experts, behind them; ()
                  elsewhere
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
    """The mixture of experts of a model.

    count, used   experts of a layer, and those a token goes to;  width: of one
    score, renorm, eps, scale   as in `kernels.reference.experts.Routing`
    shared        width of the expert that all tokens share, 0 without one
    sparse        by layer: whether it has experts, or an MLP as other models
    beside        experts stand beside an MLP of the layer's own width: each reads the hidden state
                  through a norm of its own, has one behind it, and their sum is the layer's
    biased        the router and every matrix of an expert have a bias
    activation    of experts, where it is another than the model's
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
    """The mixture of a config. keys: of the number of experts, of those a token goes to, and of the
    width of one; usual: what they are where the config does not say.
    """
    # One name became another in later versions of transformers.
    keys = [_ALSO[key] if key not in config and _ALSO.get(key) in config else key for key in keys]
    config = {**dict(zip(keys, usual, strict=True)), **config}
    of_count, of_used, of_width = keys
    count, used, width = (integer_of(config, key, 1) for key in keys)
    if count > _MOST:
        raise ModelFormatError(f"{of_count}={count} is above {_MOST}, the most that are read")
    if used > count:
        raise ModelFormatError(
            f"{of_used}={used} is above {of_count}={count}: a token cannot go to more experts"
        )
    if width % _GROUP:
        raise ModelFormatError(
            f"{of_width}={width} of the experts is no multiple of {_GROUP}, which their kernels "
            "need"
        )
    hidden = integer_of(config, "hidden_size", 1)
    if hidden % _TILE:
        raise ModelFormatError(
            f"hidden_size={hidden} beside experts is no multiple of {_TILE}, which their kernels "
            "need"
        )
    return Experts(count, used, width, tuple(sparse), rest.pop("names", ExpertNames()), **rest)


def flag_of(config: Config, key: str, default: bool) -> bool:
    """The truth value under a key, `default` where the config does not say. ModelFormatError if it
    is none.
    """
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ModelFormatError(f"config: {key}={value!r} must be true or false")
    return value


def _by_step(config: Config, layers: int) -> list[bool]:
    """Every decoder_sparse_step-th layer, but those of mlp_only_layers."""
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, (list, tuple)) or any(
        isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < layers for i in dense
    ):
        raise ModelFormatError(
            f"mlp_only_layers={dense!r:.200} must be numbers of layers below {layers}"
        )
    step = integer_of({"decoder_sparse_step": 1, **config}, "decoder_sparse_step", 1)
    return [(index + 1) % step == 0 and index not in dense for index in range(layers)]


_QWEN_KEYS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_LOCAL_KEYS = ("num_local_experts", "num_experts_per_tok", "intermediate_size")


def qwen3_experts(config: Config, layers: int) -> Experts:
    """Shares are the softmax of all logits, divided by their sum where norm_topk_prob says so."""
    return _qwen(config, layers, (128, 8, 768))


def qwen2_experts(config: Config, layers: int) -> Experts:
    """The same beside an expert that all tokens share, by a gate of its own."""
    found = _qwen(config, layers, (60, 4, 1408))
    config = {"shared_expert_intermediate_size": 5632, **config}
    parts = (
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_expert.down_proj",
    )
    names = ExpertNames(shared=parts, shared_gate="mlp.shared_expert_gate")
    return dataclasses.replace(
        found, shared=integer_of(config, "shared_expert_intermediate_size", 1), names=names
    )


def _qwen(config: Config, layers: int, usual: tuple[int, int, int]) -> Experts:
    return experts_of(config, _QWEN_KEYS, usual, _by_step(config, layers), renorm=_renorm(config))


def _renorm(config: Config) -> str:
    return "add" if flag_of(config, "norm_topk_prob", False) else ""


def qwen3_5_experts(config: Config, layers: int) -> Experts:
    """As Qwen2's in all layers; shares are divided by their sum whatever the config says."""
    usual = {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
    full = {
        **usual,
        **config,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return qwen2_experts(full, layers)


def lfm2_experts(config: Config, layers: int) -> Experts:
    """The sigmoid of each logit, with a bias where experts are chosen, which are divided by their
    sum and scaled; the first num_dense_layers layers have none.
    """
    full = {"num_dense_layers": 2, "routed_scaling_factor": 1.0, **config}
    dense = integer_of(full, "num_dense_layers", 0)
    bias = "feed_forward.expert_bias" if flag_of(config, "use_expert_bias", True) else ""
    names = ExpertNames("feed_forward.gate", "feed_forward.experts.", ("w1", "w3", "w2"), bias)
    return experts_of(
        full,
        _QWEN_KEYS,
        (32, 4, 1792),
        [index >= dense for index in range(layers)],
        names=names,
        score="sigmoid",
        renorm="add" if flag_of(config, "norm_topk_prob", True) else "",
        eps=1e-6,
        scale=number_of(full, "routed_scaling_factor", 1e-6, 1e6),
    )


def olmoe_experts(config: Config, layers: int) -> Experts:
    """As Qwen3's, in all layers."""
    keys = ("num_experts", "num_experts_per_tok", "intermediate_size")
    return experts_of(config, keys, (64, 8, None), [True] * layers, renorm=_renorm(config))


def mixtral_experts(config: Config, layers: int) -> Experts:
    """The softmax of all logits, divided by the sum of the chosen."""
    names = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.", ("w1", "w3", "w2"))
    return experts_of(config, _LOCAL_KEYS, (8, 2, None), [True] * layers, renorm="add", names=names)


def granite_experts(config: Config, layers: int) -> Experts:
    """The softmax of the chosen logits."""
    names = ExpertNames("block_sparse_moe.router.layer", "block_sparse_moe.experts.")
    return experts_of(
        config, _LOCAL_KEYS, (8, 2, None), [True] * layers, score="chosen", names=names
    )


def granite_hybrid_experts(config: Config, layers: int) -> Experts | None:
    """The same beside an expert that all tokens share. None where the config says that there are
    none.
    """
    if integer_of(config, "num_local_experts", 0) == 0:
        return None
    found = granite_experts(config, layers)
    width = integer_of(config, "shared_intermediate_size", 1)
    return dataclasses.replace(
        found, shared=width, names=found.names._replace(shared=GRANITE_SHARED)
    )


def gpt_oss_experts(config: Config, layers: int) -> Experts:
    """The softmax of the chosen logits, biases everywhere, and an activation of clamped gates."""
    names = ExpertNames("mlp.router")
    usual = (128, 4, 2880)
    found = experts_of(config, _LOCAL_KEYS, usual, [True] * layers, names=names, score="chosen")
    return dataclasses.replace(found, biased=True, activation="clamped_swiglu")


def ernie_experts(config: Config, layers: int) -> Experts:
    """A bias of the choice; shares are the softmax of all logits, divided by the sum of the chosen;
    shared experts are one of their widths together.
    """
    usual = {
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    }
    full = {**usual, **{key: value for key, value in config.items() if value is not None}}
    start, step, shared = (
        integer_of(full, key, low)
        for key, low in (
            ("moe_layer_start_index", 0),
            ("moe_layer_interval", 1),
            ("moe_num_shared_experts", 0),
        )
    )
    end = (
        layers - 1
        if full["moe_layer_end_index"] == -1
        else integer_of(full, "moe_layer_end_index", 0)
    )
    sparse = [(index + 1) % step == 0 and start <= index <= end for index in range(layers)]
    parts = (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj",
    )
    names = ExpertNames(
        bias="mlp.moe_statics.e_score_correction_bias", shared=parts if shared else ()
    )
    found = experts_of(
        full,
        ("moe_num_experts", "moe_k", "moe_intermediate_size"),
        (64, 6, 1536),
        sparse,
        names=names,
        renorm="least",
        eps=number_of(full, "moe_norm_min", 0.0, 1.0),
    )
    return dataclasses.replace(found, shared=shared * found.width)


def gemma4_experts(config: Config, layers: int) -> Experts | None:
    """Beside the MLP: shares are the softmax of all logits, divided by the sum of the chosen, times
    a number of each expert. The router has a norm of its own. None without enable_moe_block.
    """
    if not flag_of(config, "enable_moe_block", False):
        return None
    after = "post_feedforward_layernorm"
    names = ExpertNames(
        "router.proj",
        "experts.",
        scales=("router.scale", "router.per_expert_scale"),
        norms=(f"{after}_1", "pre_feedforward_layernorm_2", f"{after}_2"),
    )
    keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
    return experts_of(
        config, keys, (None, None, None), [True] * layers, renorm="add", names=names, beside=True
    )
