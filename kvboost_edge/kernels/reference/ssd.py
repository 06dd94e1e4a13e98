"""A state space with a scalar decay in plain NumPy, one token after another, in float64 or with the
kernels' rounding steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.reference.floats import exp_f32, fma_f32, softplus_f32
from kvboost_edge.kernels.reference.scan import multiply_add, sum_over_keys

__all__ = ["SsdSteps", "ssd_rows", "ssd_steps"]

Floats = npt.NDArray[np.floating[Any]]


class SsdSteps(NamedTuple):
    """What tokens do to the states.

    Attributes:
        queries, keys: [tokens, key_heads, key_dim]: C and B of the papers.
        times, decays: [tokens, value_heads].
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
    """Queries and keys as they come, [tokens, key_heads, key_dim]; steps [tokens, value_heads], for
    times softplus(step + dt_bias) within the limit, and decays exp(decay * time).
    """
    if queries.dtype == np.float64:
        times = np.clip(np.logaddexp(0, steps + dt_bias), *limit)
        return SsdSteps(queries, keys, times, np.exp(decay * times))
    times = np.clip(softplus_f32(steps + dt_bias), np.float32(limit[0]), np.float32(limit[1]))
    return SsdSteps(queries, keys, times, exp_f32(np.minimum(decay * times, np.float32(88.0))))


def ssd_rows(steps: SsdSteps, values: Floats, skip: Floats, state: Floats) -> tuple[Floats, Floats]:
    """Results [tokens, value_heads, value_dim] and the states behind the last token, in the dtype
    of `values`, which are of the same shape.

    Args:
        skip: [value_heads], how much of a value is added to its result.
        state: [value_heads, key_dim, value_dim] before the first token.
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
