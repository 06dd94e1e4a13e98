"""Selection of the key blocks that sparse prefill attends to, in plain NumPy: the oracle."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.attention.block_selection import (
    FULL_MASS,
    LOCAL_BLOCKS,
    MASS_THRESHOLD,
    SINK_BLOCKS,
)
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.segments import QUERY_BLOCK

__all__ = ["block_masses", "kept_blocks", "largest_kept"]

Doubles = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]


def block_masses(queries: Doubles, keys: Doubles) -> Doubles:
    """Return the softmax mass of each key block, float64 [heads, num_blocks].

    Args:
        queries: [16 tokens, heads, dim], with the softmax scale applied.
        keys: [num_blocks * 16, dim].
    """
    blocks = keys.reshape(-1, LANES, keys.shape[1])
    scores = np.einsum("thd,std->hs", queries[::-1], blocks) / QUERY_BLOCK
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    masses: Doubles = weights / weights.sum(axis=1, keepdims=True)
    return masses


def largest_kept(numbers: Longs, needed: int) -> npt.NDArray[np.bool_]:
    """Mark the fewest of the largest numbers whose sum is at least `needed`; the first of equals.

    Args:
        numbers: int64, at least 0.
        needed: the sum to reach.
    """
    order = np.argsort(-numbers, kind="stable")
    before = np.cumsum(numbers[order]) - numbers[order]
    kept = np.zeros(numbers.size, np.bool_)
    kept[order[before < needed]] = True
    return kept & (numbers > 0)


def kept_blocks(masses: Doubles) -> npt.NDArray[np.bool_]:
    """Mark the key blocks that a query block attends to.

    Args:
        masses: result of `block_masses`.
    """
    rounded = np.minimum(masses * FULL_MASS, FULL_MASS - 1).astype(np.int64)
    index = np.arange(rounded.shape[1])
    always = (index < SINK_BLOCKS) | (index >= index.size - LOCAL_BLOCKS)
    kept = always
    for head in rounded:
        needed = -(-int(head.sum()) * MASS_THRESHOLD // 1000) - int(head[always].sum())
        kept = kept | largest_kept(np.where(always, 0, head), needed)
    return kept
