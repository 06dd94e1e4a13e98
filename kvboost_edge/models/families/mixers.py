"""Token mixers of layers with recurrent state."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["MIXER_NORMS", "Mixer", "MixerNames"]

MIXER_NORMS = ("gated_after", "gated_before", "none")
"""Norms of the output of the mixer's heads: norm, then times silu(gate); times silu(gate), then
norm; times silu(gate) alone.
"""


class Mixer(NamedTuple):
    """Token mixer of a model's recurrent layers. Sizes are in elements.

    Attributes:
        kind: one of STATE_KINDS in families/layers.py.
        taps: earlier inputs that the convolution reads, its length - 1.
        channels: channels of the convolution: [queries | keys | values] for "delta", [values | keys
            | queries] for "ssd", which its papers call x, B and C.
        key_heads: heads of queries and keys.
        value_heads: heads of values, a multiple of `key_heads`.
        key_dim: size of a query or key head.
        value_dim: size of a value head.
        tiled_heads: value head h reads key head h mod key_heads; False for h div (value_heads /
            key_heads).
        norm: one of MIXER_NORMS.
        norm_groups: 0 to normalize each value head with the same weights [value_dim]; else the
            number of groups of the row of all heads, with weights [value_heads * value_dim].
        time_limit: bounds of the time step of "ssd"; the second may be infinite.
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
    """Tensor names of a mixer inside a layer: without ".weight" for matrices, complete for others.

    Attributes:
        inputs: matrices whose rows are the mixer's inputs, stacked in this order.
        out: matrix of the output projection.
        conv: weights of the convolution.
        gates: matrices of the gates.
        decay: -exp(A_log) of the checkpoint.
        dt_bias: bias of the time step.
        norm: weights of the norm; "" without one.
        conv_bias: bias of the convolution; "" without one.
        skip: factor of each head for the value that is added to its output (D).
        whole: stored matrix that contains inputs and gates, see weights/ordered.py; "" if they are
            separate.
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
