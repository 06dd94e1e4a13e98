"""Mamba2's state space in plain NumPy, token by token, in float64 or in float32 rounding steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.reference.floats import exp_f32, fma_f32, softplus_f32
from kvboost_edge.kernels.reference.scan import multiply_add, sum_over_keys

__all__ = ["SsdSteps", "ssd_rows", "ssd_steps"]

Floats = npt.NDArray[np.floating[Any]]


class SsdSteps(NamedTuple):
    """Inputs of Mamba2's state update for each token.

    Attributes:
        queries: [tokens, key_heads, key_dim], C in the paper.
        keys: [tokens, key_heads, key_dim], B in the paper.
        times: [tokens, value_heads], dt in the paper.
        decays: [tokens, value_heads].
    """

    queries: Floats
    keys: Floats
    times: Floats
    decays: Floats


def ssd_steps(
    queries: Floats,
    keys: Floats,
    steps: Floats,
    decay: Floats,
    dt_bias: Floats,
    limit: tuple[float, float],
) -> SsdSteps:
    """Compute times and decays.

    Times are softplus(step + dt_bias), clipped to the limit. Decays are exp(decay * time).

    Args:
        queries: [tokens, key_heads, key_dim].
        keys: [tokens, key_heads, key_dim].
        steps: [tokens, value_heads].
        decay: [value_heads].
        dt_bias: [value_heads].
        limit: (lowest, highest) time.
    """
    if queries.dtype == np.float64:
        times = np.clip(np.logaddexp(0, steps + dt_bias), *limit)
        return SsdSteps(queries, keys, times, np.exp(decay * times))
    times = np.clip(softplus_f32(steps + dt_bias), np.float32(limit[0]), np.float32(limit[1]))
    return SsdSteps(queries, keys, times, exp_f32(np.minimum(decay * times, np.float32(88.0))))


def ssd_rows(steps: SsdSteps, values: Floats, skip: Floats, state: Floats) -> tuple[Floats, Floats]:
    """Return the results of all tokens and the states after the last token.

    Args:
        steps: inputs of the update.
        values: [tokens, value_heads, value_dim]; the results have the same dtype.
        skip: [value_heads]; each value times this factor is added to its result.
        state: [value_heads, key_dim, value_dim], before the first token.

    Returns:
        ([tokens, value_heads, value_dim], [value_heads, key_dim, value_dim]).
    """
    out = np.empty_like(values)
    state = state.astype(values.dtype)
    heads = values.shape[1]
    key_heads = steps.keys.shape[1]
    which = [head // (heads // key_heads) for head in range(heads)]
    fma = multiply_add if values.dtype == np.float64 else fma_f32
    for token in range(len(values)):
        q = steps.queries[token, which, :, None]
        k = steps.keys[token, which, :, None]
        taken = values[token] * steps.times[token, :, None]
        state = fma(k, taken[:, None, :], state * steps.decays[token, :, None, None])
        out[token] = fma(skip[:, None], values[token], sum_over_keys(fma, q, state))
    return out, state
