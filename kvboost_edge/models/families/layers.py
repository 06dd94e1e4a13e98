"""Settings that may differ between the layers of a model: shapes, windows, RoPE and shared KV."""

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
"""Kinds of layers with recurrent state: short convolution, gated delta rule, and Mamba2 (state
space with scalar decay).
"""
ATTENTION = "attention"
PARALLEL = "parallel"
NO_MIXER = "none"
"""Other kinds of layers: attention, attention in parallel with Mamba2, and no token mixing."""


class PerLayerInput(NamedTuple):
    """Size of the per-layer embedding table.

    Attributes:
        rows: number of tokens in the table.
        width: numbers per token and layer.
    """

    rows: int
    width: int


class LayerFactors(NamedTuple):
    """Multipliers of the matrices of a layer.

    Attributes:
        attention: multiplier of the QKV projections.
        attention_out: multiplier of the attention output.
        mixer: multiplier of the inputs of the recurrent mixer.
        mixer_conv: multipliers of the convolution weights of x, B and C, in addition to `mixer`.
        mixer_gates: multiplier of the inputs of the time steps (dt).
        mixer_out: multiplier of the mixer output.
        mlp: multiplier of gate and up.
        mlp_out: multiplier of the MLP output.
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
"""Multipliers that change nothing."""


class LayerShape(NamedTuple):
    """Sizes of a layer, in elements, and its indices in the block pool.

    Attributes:
        head_dim: size of a head.
        num_kv_heads: number of KV heads.
        intermediate_size: width of the MLP, which may be in parallel with experts; 0 for no MLP.
        kv: index of the KV layer in the pool that the layer attends to; -1 without attention.
        owns_kv: False if an earlier layer computes that KV.
        has_values: False if the keys before norm and RoPE serve as values.
        state: index of the recurrent state; -1 without one.
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
    """Layer of a model. The other fields are those of LayerShape.

    Attributes:
        window: number of tokens that a query sees, up to and including its own position; 0 for all.
        rope: index into `ModelSpec.ropes`; -1 for no RoPE.
        ahead: number of tokens after its own position that a query sees.
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
        """True if the layer has the recurrent mixer."""
        return self.state >= 0

    @classmethod
    def of(cls, window: int, rope: int, shape: LayerShape, ahead: int = 0) -> LayerSpec:
        """Return a layer spec.

        Args:
            window: sliding window in tokens; 0 for none.
            rope: index into `ModelSpec.ropes`; -1 for no RoPE.
            shape: sizes of the layer.
            ahead: number of following tokens that queries see. With a window, any value above 0
                centers the window on the query.
        """
        if window and ahead:
            window, ahead = window // 2 + 1, window // 2
        return cls(window, rope, *shape[:6], ahead, shape.state)


def same_shapes(
    num_layers: int, head_dim: int, num_kv_heads: int, intermediate_size: int
) -> Sequence[LayerShape]:
    """Return layers of equal shape that each compute their own KV."""
    return [
        LayerShape(head_dim, num_kv_heads, intermediate_size, index) for index in range(num_layers)
    ]


def mixed_shapes(
    shapes: Sequence[LayerShape], kinds: Sequence[str], *, alone: bool = False
) -> Sequence[LayerShape]:
    """Return the shapes of layers of different kinds.

    Args:
        shapes: shape that each layer would have with attention.
        kinds: kind of each layer: ATTENTION, PARALLEL, NO_MIXER, or one of STATE_KINDS.
        alone: True if a layer has either a token mixer or an MLP, but not both.
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
