"""Per-layer differences within a model: shapes, windows, RoPE and shared KV."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "ATTENTION",
    "NO_FACTORS",
    "NO_MIXER",
    "PARALLEL",
    "STATE_KINDS",
    "LayerFactors",
    "LayerShape",
    "LayerSpec",
    "PerLayerInput",
    "mixed_shapes",
    "same_shapes",
]

STATE_KINDS = ("conv", "delta", "ssd")
"""Kinds of layers with recurrent state: short convolution, gated delta rule, state space with
scalar decay (Mamba2).
"""
ATTENTION = "attention"
PARALLEL = "parallel"
NO_MIXER = "none"
"""Other kinds of layers: attention; attention and Mamba2 in parallel, on the same inputs; no token
mixing.
"""


class PerLayerInput(NamedTuple):
    """Per-layer embedding: a table with `width` numbers per token and layer.

    Attributes:
        rows: tokens of the table.
        width: numbers per token and layer.
    """

    rows: int
    width: int


class LayerFactors(NamedTuple):
    """Multipliers of the matrices of a layer.

    Attributes:
        attention: for the QKV projections.
        attention_out: for the output of attention.
        mixer: for the inputs of the recurrent mixer.
        mixer_conv: for the convolution weights of x, B and C, in addition to `mixer`.
        mixer_gates: for the inputs of the time steps (dt).
        mixer_out: for the output of the mixer.
        mlp: for gate and up.
        mlp_out: for the output of the MLP.
    """

    attention: float = 1.0
    attention_out: float = 1.0
    mixer: float = 1.0
    mixer_conv: tuple[float, float, float] = (1.0, 1.0, 1.0)
    mixer_gates: float = 1.0
    mixer_out: float = 1.0
    mlp: float = 1.0
    mlp_out: float = 1.0


NO_FACTORS = LayerFactors()
"""Multipliers of a model without any."""


class LayerShape(NamedTuple):
    """Sizes of a layer, in elements, and its indices in the block pool.

    Attributes:
        head_dim: size of a head.
        num_kv_heads: number of KV heads.
        intermediate_size: width of its MLP, or of the MLP next to its experts; 0 without one.
        kv: index of the pool's KV layer that it attends to; -1 if it does not attend.
        owns_kv: False if an earlier layer computes that KV.
        has_values: False if its values are its keys before norm and RoPE.
        state: index of its recurrent state; -1 without one.
    """

    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    kv: int
    owns_kv: bool = True
    has_values: bool = True
    state: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSpec:
    """Layer of a model. Further fields are those of LayerShape.

    Attributes:
        window: tokens that a query sees up to its own position; 0 for all.
        rope: index into `ModelSpec.ropes`, -1 for none.
        ahead: number of tokens after a query that it sees.
    """

    window: int
    rope: int
    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    kv: int
    owns_kv: bool
    has_values: bool
    ahead: int = 0
    state: int = -1

    @property
    def attends(self) -> bool:
        """True if the layer has attention, alone or in parallel with a recurrent mixer."""
        return self.kv >= 0

    @property
    def keeps_state(self) -> bool:
        """True if the layer has the recurrent mixer. A layer may have neither."""
        return self.state >= 0

    @classmethod
    def of(cls, window: int, rope: int, shape: LayerShape, ahead: int = 0) -> LayerSpec:
        """Return a layer whose queries see `ahead` following tokens if it has no window. With a
        window and `ahead`, the window is split between the tokens before and after a query.
        """
        if window and ahead:
            window, ahead = window // 2 + 1, window // 2
        return cls(window, rope, *shape[:6], ahead, shape.state)


def same_shapes(
    num_layers: int, head_dim: int, num_kv_heads: int, intermediate_size: int
) -> Sequence[LayerShape]:
    """Return layers of equal shape, each with its own KV."""
    return [
        LayerShape(head_dim, num_kv_heads, intermediate_size, index) for index in range(num_layers)
    ]


def mixed_shapes(
    shapes: Sequence[LayerShape], kinds: Sequence[str], *, alone: bool = False
) -> Sequence[LayerShape]:
    """Return the layers by kind.

    Args:
        shapes: shapes as if all layers attended.
        kinds: ATTENTION, one of STATE_KINDS, PARALLEL or NO_MIXER for each layer.
        alone: True if layers that mix tokens have no MLP.
    """
    found = []
    kv = 0
    state = 0
    for shape, kind in zip(shapes, kinds, strict=True):
        attends = kind in (ATTENTION, PARALLEL)
        keeps = kind in (*STATE_KINDS, PARALLEL)
        if alone and kind != NO_MIXER:
            shape = shape._replace(intermediate_size=0)
        found.append(
            shape._replace(kv=kv if attends else -1, owns_kv=attends, state=state if keeps else -1)
        )
        kv = kv + attends
        state = state + keeps
    return found
