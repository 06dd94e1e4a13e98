"""Mamba2's mixers as configs say them, for all families that have one: sizes, checked, and names of
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.fields import integer_of
from kvboost_edge.models.families.mixers import Mixer, MixerNames

__all__ = ["MAMBA_KEYS", "SsdKeys", "ssd_mixer", "ssd_names", "time_limit_of"]

Config = Mapping[str, Any]

# What the kernels of states take. The native runner checks the same, but only after the weights
# were packed. length of a convolution; dims of heads and of B and C
_MOST_TAPS = 16
_MOST_DIM = 1 << 11
_MOST_STATE = 1 << 8
_LANES = 16  # value channels that a kernel takes at once
_GROUP = 32  # inputs of a matrix that a kernel takes at once
_NO_LIMIT = (0.0, math.inf)
_INFINITY = {"__float__": "Infinity"}


class SsdKeys(NamedTuple):
    """What a config calls the sizes of a mixer: heads and their dim, groups of heads that share B
    and C, the dim of these, and the length of the convolution.
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
    """A mixer of a config with all of these keys; what it results in is normed in as many groups as
    share B and C.

    ModelFormatError that names the key for sizes that the kernels do not take.
    """
    heads, dim, groups, state = (integer_of(config, key, 1) for key in keys[:4])
    length = integer_of(config, keys.length, 2)
    if heads % groups:
        raise ModelFormatError(f"{keys.heads}={heads} is not a multiple of {keys.groups}={groups}")
    for key, value, most in (
        (keys.length, length, _MOST_TAPS),
        (keys.head_dim, dim, _MOST_DIM),
        (keys.state, state, _MOST_STATE),
    ):
        if value > most:
            raise ModelFormatError(
                f"{key}={value} is above {most}, the most that kernels of states take"
            )
    for key, value in ((keys.head_dim, dim), (keys.state, state)):
        if value % _LANES:
            raise ModelFormatError(
                f"{key}={value} is no multiple of {_LANES}, which the kernels of states need"
            )
    width = heads * dim
    if width % _GROUP:
        raise ModelFormatError(
            f"{keys.heads}={heads} x {keys.head_dim}={dim} are {width} values, no multiple of "
            f"{_GROUP}, which the kernels of states need"
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
    """Names of a mixer's tensors inside a layer, where its module is called so there. The input
    projection is stored as
    one matrix, [z | x | B | C | dt]; here x, B and C are one piece, z and dt others.
    """
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
    """Least and most of a step of time, under a key that may be missing or null. ModelFormatError
    that names it unless these are two numbers, from 0 on, of which the second may be infinite.
    """
    given = config.get(key)
    if given is None:
        return _NO_LIMIT
    # transformers writes what JSON has no word for as an object.
    pair = (
        [math.inf if one == _INFINITY else one for one in given]
        if isinstance(given, (list, tuple))
        else []
    )
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in pair)
    if len(pair) != 2 or not numbers or not 0.0 <= pair[0] <= pair[1] or math.isinf(pair[0]):
        raise ModelFormatError(
            f"config: {key}={given!r:.60} must be two numbers, 0 <= least <= most"
        )
    return float(pair[0]), float(pair[1])
