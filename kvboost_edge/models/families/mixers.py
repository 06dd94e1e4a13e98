"""What mixes tokens in layers that keep a state instead of keys and values."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["MIXER_NORMS", "Mixer", "MixerNames"]

MIXER_NORMS = ("gated_after", "gated_before", "none")
"""Of what heads result in: normed, then times silu(gate); times silu(gate), then normed; times
silu(gate) alone.
"""


class Mixer(NamedTuple):
    """The mixer of a model's layers with a state. Sizes are in elements.

    Attributes:
        kind: as in LayerSpec.
        taps: inputs before a token that the convolution reads: its length less one.
        channels: of the convolution: of "delta" [queries | keys | values], of "ssd" [values | keys
            | queries], which its papers call x, B and C.
        key_heads: heads of queries and keys, value_heads those of values, which are as many or a
            multiple.
        key_dim: of a head of queries and keys; value_dim: of values.
        tiled_heads: value head h reads key head h mod key_heads; False: h div (value_heads /
            key_heads).
        norm: one of MIXER_NORMS.
        norm_groups: 0: each head of values is normed, all with the same weights [value_dim]; else
            the row of all of them is cut into so many groups, with weights [value_heads *
            value_dim].
        time_limit: of "ssd": steps of time are at least the first and at most the second, which may
            be infinite.
    """

    kind: str
    taps: int
    channels: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    tiled_heads: bool = False
    norm: str = "gated_after"
    norm_groups: int = 0
    time_limit: tuple[float, float] = (0.0, math.inf)


class MixerNames(NamedTuple):
    """What the checkpoint calls the tensors of a mixer inside a layer; all but the matrices with
    their whole name.

    Attributes:
        inputs: the matrices whose rows are the mixer's inputs, one below the other; gates: the same
            of its gates.
        decay: what a state is multiplied with is exp(decay * ...): -exp(A_log) of the checkpoint.
        skip: how much of a value is added to its result, of each head.
        whole: a stored matrix of which inputs and gates are pieces, see weights/ordered.py.
    """

    inputs: tuple[str, ...]
    out: str
    conv: str
    gates: tuple[str, ...] = ()
    decay: str = ""
    dt_bias: str = ""
    norm: str = ""
    conv_bias: str = ""
    skip: str = ""
    whole: str = ""
