"""What may differ from layer to layer of a model: shapes, windows, ropes, and whose keys and values
a layer reads.
"""

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
"""What keeps a state: a short convolution; the gated delta rule; a state space with a scalar decay.
"""
ATTENTION = "attention"
PARALLEL = "parallel"
NO_MIXER = "none"
"""Other kinds of layers: one that attends; one that attends and keeps a state, each of the same
inputs; one that mixes no tokens.
"""


class PerLayerInput(NamedTuple):
    """A second embedding: of each token `width` numbers for every layer, from a table of `rows`
    tokens.
    """

    rows: int
    width: int


class LayerFactors(NamedTuple):
    """What results of a layer's matrices are multiplied with.

    Attributes:
        attention: queries, keys and values; attention_out: what attention adds to the hidden state.
        mixer: the inputs of a mixer with a state; mixer_conv: taps of its convolution beside that,
            of x, B and C; mixer_gates: what its steps of time are made of;  mixer_out: what it
            adds.
        mlp: gate and up; mlp_out: what the MLP adds.
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
"""Those of a model that multiplies nothing."""


class LayerShape(NamedTuple):
    """Sizes of one layer, in elements, and its place in the pool of keys and values.

    Attributes:
        intermediate_size: of its MLP, or of what stands beside its experts; 0 where there is none.
        kv: which of the pool's layers holds the keys and values it attends to; -1 where it does not
            attend.
        owns_kv: False: these are an earlier layer's, and this one computes none.
        has_values: False: its values are its keys before their norm and rope.
        state: which of the pool's states is its own; -1 where it keeps none.
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
    """`window` 0: all tokens before; `rope`: index into ModelSpec.ropes, -1 none; `ahead`: so many
    tokens behind a query are seen too; the rest as in LayerShape.
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
        """Whether attention mixes tokens, alone or beside what keeps a state."""
        return self.kv >= 0

    @property
    def keeps_state(self) -> bool:
        """Whether it has the model's mixer. A layer may have neither of the two."""
        return self.state >= 0

    @classmethod
    def of(cls, window: int, rope: int, shape: LayerShape, ahead: int = 0) -> LayerSpec:
        """Return a layer that sees `ahead` tokens behind a query where it has no window; half of
        that to either side else.
        """
        if window and ahead:
            window, ahead = window // 2 + 1, window // 2
        return cls(window, rope, *shape[:6], ahead, shape.state)


def same_shapes(
    num_layers: int, head_dim: int, num_kv_heads: int, intermediate_size: int
) -> Sequence[LayerShape]:
    """Return layers that are all alike, with keys and values of their own."""
    return [
        LayerShape(head_dim, num_kv_heads, intermediate_size, index) for index in range(num_layers)
    ]


def mixed_shapes(
    shapes: Sequence[LayerShape], kinds: Sequence[str], *, alone: bool = False
) -> Sequence[LayerShape]:
    """Return the layers by their kinds: ATTENTION, one of STATE_KINDS, PARALLEL or NO_MIXER. alone:
    those that mix tokens have no MLP.
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
