"""What tokens attend to, in plain NumPy: for runners that are asked which stored keys matter to a
prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import AttentionParams

__all__ = ["asked_layer", "attended_masses"]

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]


def asked_layer(windows: Sequence[int]) -> int:
    """The layer whose attention tells what a prompt's end looks for: at two thirds of the depth, or
    the nearest that sees everything. windows: of each layer, 0 for none.

    Measured on SmolLM2 (30 layers, 15% of the blocks): layer 1 chooses no better than chance, 10
    and 15 less well.
    """
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
    """The probabilities that queries give to keys, summed over queries and heads, float32
    [num_keys].

    Args:
        queries: float32 [num_queries, num_q_heads, head_dim], rotated.
        lse: float32 [num_queries, num_q_heads], of their attention to all they see.
        positions: int64 [num_queries].
        keys: float32 [num_keys, num_kv_heads, head_dim], as they are at `key_positions`, int64
            [num_keys].
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
