"""Selection of the strips that sparse prefill attends to, in plain NumPy: the oracle."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.attention.block_selection import (
    KEPT_PERMILLE,
    LOCAL_STRIPS,
    SINK_STRIPS,
    UNITS,
)
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.segments import GROUP_TOKENS

__all__ = ["kept_strips", "largest_kept", "strip_masses"]

Doubles = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]


def strip_masses(queries: Doubles, keys: Doubles) -> Doubles:
    """Return the mean softmax mass of each strip over the query heads, float64 [num_strips].

    Args:
        queries: [16 tokens, heads, dim], with the softmax scale applied.
        keys: [num_strips * 16, dim].
    """
    strips = keys.reshape(-1, LANES, keys.shape[1])
    scores = np.einsum("thd,std->hs", queries[::-1], strips) / GROUP_TOKENS
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    masses: Doubles = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
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


def kept_strips(masses: Doubles) -> npt.NDArray[np.bool_]:
    """Mark the strips that the rows of a group attend to.

    Args:
        masses: result of `strip_masses`.
    """
    units = np.minimum(masses * UNITS, UNITS - 1).astype(np.int64)
    index = np.arange(units.size)
    fixed = (index < SINK_STRIPS) | (index >= units.size - LOCAL_STRIPS)
    needed = -(-int(units.sum()) * KEPT_PERMILLE // 1000) - int(units[fixed].sum())
    return fixed | largest_kept(np.where(fixed, 0, units), needed)
