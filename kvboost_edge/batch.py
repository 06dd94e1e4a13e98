"""KVBoost's batch functions, with the names and shapes of its module `batch`.

`pad_and_mask` differs from the top-level function of that name, which pads on the left and returns
tensors.
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
    """Pad rows on the right to the longest one; return lists (ids, masks).

    A mask is 1 on tokens and 0 on padding. After a shared prefix of P tokens, the attention mask of
    `batched_decode` is P ones followed by the row's mask, and start_pos is its sum. The logits of a
    row's next token are at the last 1 of its mask.
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
