"""What may differ from layer to layer of a model: shapes, windows, ropes, and whose keys and values a layer reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["STATE_KINDS", "LayerShape", "LayerSpec", "mixed_shapes", "same_shapes"]

STATE_KINDS = ("conv", "delta", "ssd")
"""A short convolution; the gated delta rule; a state space with a scalar decay."""


class LayerShape(NamedTuple):
    """Sizes of one layer, in elements, and its place in the pool of keys and values.

    kv          which of the pool's layers holds the keys and values it attends to; -1 where `kind` has none
    owns_kv     False: these are an earlier layer's, and this one computes none
    has_values  False: its values are its keys before their norm and rope
    kind        what mixes tokens: "attention", or one of STATE_KINDS, which keep a state instead of keys and values
    state       which of the pool's states is its own; -1 of attention
    """

    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    kv: int
    owns_kv: bool = True
    has_values: bool = True
    kind: str = "attention"
    state: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSpec:
    """`window` 0: all tokens before; `rope`: index into ModelSpec.ropes, -1 none; `ahead`: so many tokens behind a
    query are seen too; the rest as in LayerShape."""

    window: int
    rope: int
    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    kv: int
    owns_kv: bool
    has_values: bool
    ahead: int = 0
    kind: str = "attention"
    state: int = -1

    @classmethod
    def of(cls, window: int, rope: int, shape: LayerShape, ahead: int = 0) -> LayerSpec:
        """A layer that sees `ahead` tokens behind a query where it has no window; half of that to either side else."""
        if window and ahead:
            window, ahead = window // 2 + 1, window // 2
        return cls(window, rope, *shape[:6], ahead, shape.kind, shape.state)


def same_shapes(num_layers: int, head_dim: int, num_kv_heads: int, intermediate_size: int) -> Sequence[LayerShape]:
    """Layers that are all alike, with keys and values of their own."""
    return [LayerShape(head_dim, num_kv_heads, intermediate_size, index) for index in range(num_layers)]


def mixed_shapes(shapes: Sequence[LayerShape], kinds: Sequence[str]) -> Sequence[LayerShape]:
    """The same layers, where those of another kind than "attention" have a state in the place of keys and values."""
    found: list[LayerShape] = []
    for shape, kind in zip(shapes, kinds, strict=True):
        before = sum(one.kind != "attention" for one in found)
        if kind == "attention":
            found.append(shape._replace(kv=len(found) - before))
        else:
            found.append(shape._replace(kv=-1, owns_kv=False, kind=kind, state=before))
    return found
