"""Layers with recurrent state, whose mixer is a short convolution, a gated delta rule or Mamba2.

This module describes the kinds of layers, and the sizes and tensor names of mixers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.fields import integer_of
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.mixers import Mixer, MixerNames

__all__ = [
    "CONV_NAMES",
    "DELTA_NAMES",
    "FULL",
    "GROUP",
    "LANES",
    "LINEAR",
    "MAMBA_KEYS",
    "MOST_DIM",
    "MOST_TAPS",
    "OUTPUT_GATE",
    "TILED_HEADS",
    "Hybrid",
    "SsdKeys",
    "check_most",
    "gguf_heads",
    "hybrid_of",
    "kinds_of_layers",
    "ssd_mixer",
    "ssd_names",
    "time_limit_of",
]

Config = Mapping[str, Any]

TILED_HEADS = "kvboost-edge: tiled_heads"
"""Config key that marks value heads stored in the order of GGUF files, see `Mixer.tiled_heads`.

The reader of GGUF files sets it. Model files never contain it.
"""

OUTPUT_GATE = "self_attn.output_gate"
"""Name of the gates of the attention output after they are split from the query projection."""

FULL = "full_attention"
LINEAR = "linear_attention"
"""Values of layer_types for layers with attention and for most recurrent layers."""

_ATTENTION = "attention"
# Limits of the recurrent kernels. The native runner also checks them, but only after packing the
# weights.
MOST_TAPS = 16
MOST_DIM = 1 << 11
LANES = 16
GROUP = 32
"""Maximum length of a convolution, maximum head size, value channels per kernel step, and inputs
per quantization group.
"""
_MOST_STATE = 1 << 8  # maximum size of B and C
_NO_LIMIT = (0.0, math.inf)
_INFINITY = {"__float__": "Infinity"}


class Hybrid(NamedTuple):
    """Layers of a hybrid model.

    Attributes:
        kinds: kind of each layer, see `mixed_shapes`.
        mixer: mixer of the recurrent layers; None without such layers.
        names: tensor names of the mixer.
        alone: True if a layer has either a token mixer or an MLP, but not both.
    """

    kinds: tuple[str, ...]
    mixer: Mixer | None
    names: MixerNames
    alone: bool = False


CONV_NAMES = MixerNames(("conv.in_proj",), "conv.out_proj", "conv.conv.weight")
DELTA_NAMES = MixerNames(
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "linear_attn.out_proj",
    "linear_attn.conv1d.weight",
    ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    "linear_attn.decay",
    "linear_attn.dt_bias",
    "linear_attn.norm.weight",
)
"""Tensor names of a short convolution, and of a gated delta rule."""


def check_most(name: str, value: int, most: int) -> None:
    """Raise ModelFormatError if a size exceeds the limit of the recurrent kernels."""
    if value > most:
        raise ModelFormatError(f"{name}={value} exceeds {most}, the limit of the recurrent kernels")


def hybrid_of(kinds: tuple[str, ...], mixer: Mixer, names: MixerNames) -> Hybrid:
    """Return the description of a hybrid model.

    Raises:
        ModelFormatError: no layer has attention.
    """
    if _ATTENTION not in kinds:
        raise ModelFormatError(
            "the model has no attention layers, and such models are not supported"
        )
    return Hybrid(kinds, mixer if mixer.kind in kinds else None, names)


def kinds_of_layers(
    config: Config, layers: int, name: str, kind: str, rule: Sequence[str] | None
) -> tuple[str, ...]:
    """Return the kind of each layer.

    Args:
        config: config of the language model.
        layers: number of layers.
        name: value of layer_types for recurrent layers.
        kind: kind of the recurrent layers, one of STATE_KINDS.
        rule: layer types according to an older key; None without such a key.

    Raises:
        ModelFormatError: layer_types is invalid or contradicts `rule`.
    """
    types = config.get("layer_types")
    known = {FULL: _ATTENTION, name: kind}
    if types is None:
        types = rule if rule is not None else [FULL] * layers
    if (
        not isinstance(types, (list, tuple))
        or len(types) != layers
        or any(one not in list(known) for one in types)
    ):
        raise ModelFormatError(
            f"layer_types={types!r:.200} must have {layers} entries, each one of {sorted(known)}"
        )
    if rule is not None and list(types) != list(rule):
        at = next(
            index
            for index, (one, other) in enumerate(zip(types, rule, strict=True))
            if one != other
        )
        raise ModelFormatError(
            f"layer_types gives {types[at]!r} for layer {at}, but {_rule_of(config)} gives "
            f"{rule[at]!r}"
        )
    return tuple(known[one] for one in types)


def _rule_of(config: Config) -> str:
    key = next(
        key for key in ("full_attn_idxs", "full_attention_interval") if config.get(key) is not None
    )
    return f"{key}={config[key]!r:.60}"


class SsdKeys(NamedTuple):
    """Config keys for the sizes of a Mamba2 mixer.

    Attributes:
        heads: key for the number of heads.
        head_dim: key for the size of a head.
        groups: key for the number of groups of heads that share B and C.
        state: key for the size of B and C.
        length: key for the length of the convolution.
    """

    heads: str
    head_dim: str
    groups: str
    state: str
    length: str


MAMBA_KEYS = SsdKeys(
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"
)


def ssd_mixer(
    config: Config, keys: SsdKeys, norm: str, time_limit: tuple[float, float] = _NO_LIMIT
) -> Mixer:
    """Return the Mamba2 mixer of a config that has all of `keys`.

    The groups of its norm are the groups of heads that share B and C.

    Raises:
        ModelFormatError: the kernels do not support a size; the message names its key.
    """
    heads, dim, groups, state = (integer_of(config, key, 1) for key in keys[:4])
    length = integer_of(config, keys.length, 2)
    if heads % groups:
        raise ModelFormatError(f"{keys.heads}={heads} is not a multiple of {keys.groups}={groups}")
    for key, value, most in (
        (keys.length, length, MOST_TAPS),
        (keys.head_dim, dim, MOST_DIM),
        (keys.state, state, _MOST_STATE),
    ):
        if value > most:
            raise ModelFormatError(
                f"{key}={value} exceeds {most}, the limit of the recurrent kernels"
            )
    for key, value in ((keys.head_dim, dim), (keys.state, state)):
        if value % LANES:
            raise ModelFormatError(
                f"{key}={value} must be a multiple of {LANES} for the recurrent kernels"
            )
    width = heads * dim
    if width % GROUP:
        raise ModelFormatError(
            f"{keys.heads}={heads} x {keys.head_dim}={dim} = {width} must be a multiple of "
            f"{GROUP} for the recurrent kernels"
        )
    norm_groups = 0 if norm == "none" else groups
    channels = width + 2 * groups * state
    return Mixer(
        "ssd",
        length - 1,
        channels,
        groups,
        heads,
        state,
        dim,
        norm=norm,
        norm_groups=norm_groups,
        time_limit=time_limit,
    )


def ssd_names(prefix: str, mixer: Mixer, *, conv_bias: bool) -> MixerNames:
    """Return the tensor names of a Mamba2 mixer whose module is named `prefix`."""
    # The checkpoint stores the input projection as one matrix [z | x | B | C | dt]. It is split
    # into [x | B | C], z and dt.
    whole = f"{prefix}.in_proj"
    return MixerNames(
        (f"{whole}_xbc", f"{whole}_z"),
        f"{prefix}.out_proj",
        f"{prefix}.conv1d.weight",
        gates=(f"{whole}_dt",),
        decay=f"{prefix}.decay",
        dt_bias=f"{prefix}.dt_bias",
        norm="" if mixer.norm == "none" else f"{prefix}.norm.weight",
        conv_bias=f"{prefix}.conv1d.bias" if conv_bias else "",
        skip=f"{prefix}.D",
        whole=whole,
    )


def time_limit_of(config: Config, key: str = "time_step_limit") -> tuple[float, float]:
    """Return the bounds of the time step, or (0, inf) if the key is missing or null.

    Raises:
        ModelFormatError: the value is not a pair of numbers with 0 <= first <= second and a finite
            first number.
    """
    given = config.get(key)
    if given is None:
        return _NO_LIMIT
    # JSON has no infinity, so transformers writes it as an object.
    pair = (
        [math.inf if one == _INFINITY else one for one in given]
        if isinstance(given, (list, tuple))
        else []
    )
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in pair)
    if len(pair) != 2 or not numbers or not 0.0 <= pair[0] <= pair[1] or math.isinf(pair[0]):
        raise ModelFormatError(
            f"config: {key}={given!r:.60} must be two numbers (minimum, maximum) with 0 <= minimum "
            "<= maximum"
        )
    return float(pair[0]), float(pair[1])


def gguf_heads(keys: Keys) -> tuple[int, int]:
    """Return the number of Mamba2 heads in a GGUF file, and the size of a head."""
    heads = keys.size("ssm.time_step_rank")
    inner = keys.size("ssm.inner_size")
    if inner % heads:
        raise keys.error(
            "ssm.inner_size", inner, f"must be a multiple of the number of heads, {heads}"
        )
    return heads, inner // heads
