"""Token mixers of layers with recurrent state."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["MIXER_NORMS", "Mixer", "MixerNames"]

MIXER_NORMS = ("gated_after", "gated_before", "none")
"""Ways to normalize and gate the mixer's output.

- gated_after: normalize, then multiply by silu(gate).
- gated_before: multiply by silu(gate), then normalize.
- none: multiply by silu(gate).
"""


class Mixer(NamedTuple):
    """Token mixer of a model's recurrent layers. Sizes are in elements.

    Attributes:
        kind: one of STATE_KINDS in families/layers.py.
        taps: number of earlier inputs that the convolution reads, its length - 1.
        channels: channels of the convolution: [queries | keys | values] for "delta", and [values |
            keys | queries] for "ssd", whose papers call them x, B and C.
        key_heads: number of query and key heads.
        value_heads: number of value heads, a multiple of `key_heads`.
        key_dim: size of a query or key head.
        value_dim: size of a value head.
        tiled_heads: True if value head h uses key head h mod key_heads. False if it uses key head h
            div (value_heads / key_heads).
        norm: one of MIXER_NORMS.
        norm_groups: 0 to normalize each value head separately, with the weights [value_dim]. Else
            all heads are normalized in this number of groups, with the weights [value_heads *
            value_dim].
        time_limit: lower and upper bound of the time step of "ssd"; the upper bound may be
            infinite.
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
    """Tensor names of a mixer inside a layer. The names of matrices are without ".weight".

    Attributes:
        inputs: matrices that compute the mixer's inputs, in the order in which they are stacked.
        out: matrix of the output projection.
        conv: weights of the convolution.
        gates: matrices that compute the gates.
        decay: decay, -exp(A_log) of the checkpoint.
        dt_bias: bias of the time step.
        norm: weights of the norm; "" for no norm.
        conv_bias: bias of the convolution; "" for no bias.
        skip: factor per head for the input that is added to the output (D).
        whole: stored matrix that contains inputs and gates, see weights/reordered.py; "" if they
            are stored separately.
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
