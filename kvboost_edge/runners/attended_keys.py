"""Attention from the end of a prompt to stored keys, which decides what to recompute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import AttentionParams

__all__ = ["asked_layer", "attended_masses"]

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]


def asked_layer(windows: Sequence[int]) -> int:
    """Return the layer whose attention decides which stored keys matter.

    It is the layer at two thirds of the depth, or the nearest layer without a sliding window.

    Args:
        windows: sliding window of each layer, or 0 without a window.
    """
    # Measured on SmolLM2 (30 layers, 15% of the blocks): layer 1 is no better than chance, and
    # layers 10 and 15 are worse than layer 20.
    wanted = 2 * len(windows) // 3
    return min(
        range(len(windows)), key=lambda layer: (windows[layer] > 0, abs(layer - wanted), layer)
    )


def attended_masses(
    queries: Floats,
    lse: Floats,
    positions: Longs,
    keys: Floats,
    key_positions: Longs,
    params: AttentionParams,
) -> Floats:
    """Return the attention probability of each key, summed over queries and heads.

    Args:
        queries: float32 [num_queries, num_q_heads, head_dim], after RoPE.
        lse: float32 [num_queries, num_q_heads], log-sum-exp of each query's scores over all keys.
        positions: int64 [num_queries], positions of the queries.
        keys: float32 [num_keys, num_kv_heads, head_dim], rotated to `key_positions`.
        key_positions: int64 [num_keys], positions of the keys.
        params: attention constants of the layer.

    Returns:
        Summed probabilities, float32 [num_keys].
    """
    seen = key_positions <= positions[:, None]
    if params.window:
        seen &= key_positions > positions[:, None] - params.window
    masses = np.zeros(len(keys), dtype=np.float32)
    for head in range(queries.shape[1]):
        scores = (
            queries[:, head]
            @ keys[:, head * keys.shape[1] // queries.shape[1]].T
            * params.softmax_scale
        )
        if params.softcap:
            scores = params.softcap * np.tanh(scores / params.softcap)
        masses += np.exp(np.where(seen, scores - lse[:, head, None], -np.inf)).sum(axis=0)
    return masses
