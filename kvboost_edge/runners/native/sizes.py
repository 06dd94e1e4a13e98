"""How wide the rows of a pass's buffers are."""

from __future__ import annotations

import dataclasses

from kvboost_edge.kernels.linear.tiles import GROUP
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.models.config.families import ModelSpec
from kvboost_edge.runners.native.mixture import MixtureSizes
from kvboost_edge.runners.native.states import MixerSizes

__all__ = ["Sizes", "padded"]


def padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Floats in a row of each buffer, those of the widest layer, padded so that vectors and groups may run over the end
    of what counts. What attention takes and leaves is as wide as the layer's heads, and `attended` that, padded."""

    hidden: int
    normed: int
    wide: int
    query: int
    key: int
    value: int
    attended: tuple[int, ...]
    per_layer: int
    logits: int
    groups: int
    mixture: MixtureSizes | None

    @classmethod
    def of(cls, spec: ModelSpec, *, floats: bool = False) -> Sizes:
        """floats: whether the weights of experts are."""
        query = max(spec.num_heads * layer.head_dim for layer in spec.layers)
        key = max(layer.num_kv_heads * layer.head_dim for layer in spec.layers)
        gated = 2 if spec.family.output_gate else 1
        qkv = max((gated * spec.num_heads + 2 * layer.num_kv_heads) * layer.head_dim for layer in spec.layers)
        mixer = MixerSizes(0, 0, 0) if spec.mixer is None else MixerSizes.of(spec.mixer)
        inner = max(layer.intermediate_size for layer in spec.layers)
        width = 0 if spec.per_layer is None else spec.per_layer.width
        hidden, normed = padded(spec.hidden_size, GROUP), padded(max(spec.hidden_size, inner, width), GROUP)
        wide = padded(max(qkv, 2 * inner, spec.hidden_size, width, mixer.wide), GROUP) + 2 * GROUP
        query, value, key = max(query, mixer.key, mixer.mixed), max(key, mixer.value), max(key, mixer.key)
        attended = tuple(padded(spec.num_heads * layer.head_dim, GROUP) for layer in spec.layers)
        groups = max(normed, mixer.mixed, *attended) // GROUP
        per_layer = padded(len(spec.layers) * width, LANES) + GROUP * (width % GROUP > 0)
        mixture = None if spec.experts is None else MixtureSizes.of(spec.experts, hidden, floats=floats)
        logits = padded(spec.vocab_size, LANES)
        return cls(hidden, normed, wide, query, key, value, attended, per_layer, logits, groups, mixture)
