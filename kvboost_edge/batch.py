"""Batch functions of KVBoost's module `batch`, with the same names and shapes.

`kvboost_edge.pad_and_mask` is a different function. It pads on the left and returns tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kvboost_edge.errors import RequestError

__all__ = ["pad_and_mask"]


def pad_and_mask(
    suffix_ids_list: Sequence[Sequence[int]], pad_token_id: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Pad rows of token ids on the right to the longest row.

    Masks are 1 on tokens and 0 on padding. After a shared prefix of P tokens, the attention mask
    for `batched_decode` is P ones followed by the row's mask, and start_pos is the sum of that
    mask. The logits of a row's next token are at the last 1 of its mask.

    Returns:
        The padded rows and their masks.
    """
    if not len(suffix_ids_list):
        raise RequestError("pad_and_mask needs at least one row")
    longest = max(map(len, suffix_ids_list))
    gaps = [longest - len(ids) for ids in suffix_ids_list]
    rows = [[*ids, *[pad_token_id] * gap] for ids, gap in zip(suffix_ids_list, gaps, strict=True)]
    return rows, [[1] * (longest - gap) + [0] * gap for gap in gaps]


def __getattr__(name: str) -> Any:
    """Load a public name of KVBoost's module on first use."""
    return import_module("kvboost_edge")._load(__name__, name)
