"""What mixes tokens in layers that keep a state instead of keys and values."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Mixer"]


class Mixer(NamedTuple):
    """The mixer of a model's layers with a state. Sizes are in elements.

    kind         as in LayerSpec
    taps         inputs before a token that the convolution reads: its length less one
    channels     of the convolution
    key_heads    heads of queries and keys, value_heads those of values, which are as many or a multiple
    key_dim      of a head of queries and keys; value_dim: of values
    tiled_heads  value head h reads key head h mod key_heads; False: h div (value_heads / key_heads)
    """

    kind: str
    taps: int
    channels: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    tiled_heads: bool = False
