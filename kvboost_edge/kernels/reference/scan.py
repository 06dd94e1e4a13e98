"""Gated delta rule in plain NumPy, token by token, in float64 or with float32 rounding steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.reference.floats import (
    exp_f32,
    fma_f32,
    norm_rows_f32,
    sigmoid_f32,
    softplus_f32,
)

__all__ = [
    "DeltaSteps",
    "delta_rows",
    "delta_steps",
    "key_head_of",
    "multiply_add",
    "sum_over_keys",
]

Floats = npt.NDArray[np.floating[Any]]
_CHAINS = 4  # chains of a sum over keys


class DeltaSteps(NamedTuple):
    """Inputs of the gated delta rule for each token.

    Attributes:
        queries: [tokens, key_heads, key_dim].
        keys: [tokens, key_heads, key_dim].
        shares: [tokens, value_heads].
        decays: [tokens, value_heads].
    """

    queries: Floats
    keys: Floats
    shares: Floats
    decays: Floats


def key_head_of(head: int, key_heads: int, value_heads: int, *, tiled: bool) -> int:
    """Return the key head that a value head reads."""
    return head % key_heads if tiled else head // (value_heads // key_heads)


def delta_steps(
    queries: Floats,
    keys: Floats,
    gates: tuple[Floats, Floats],
    decay: Floats,
    dt_bias: Floats,
    eps: float = 1e-6,
) -> DeltaSteps:
    """Norm queries and keys to unit length, and compute shares and decays.

    Queries are also divided by sqrt(key_dim). Shares are sigmoid(b), decays are exp(decay *
    softplus(a + dt_bias)).

    Args:
        queries: [tokens, key_heads, key_dim].
        keys: [tokens, key_heads, key_dim].
        gates: (b, a), [tokens, value_heads] each.
        decay: [value_heads].
        dt_bias: [value_heads].
        eps: epsilon of the norms.
    """
    dim = queries.shape[-1]
    shares, wide = gates
    if queries.dtype == np.float64:
        lengths = (np.sqrt((x * x).sum(-1, keepdims=True) + eps) for x in (queries, keys))
        q, k = (x / length for x, length in zip((queries, keys), lengths, strict=True))
        passed = 1 / (1 + np.exp(-shares))
        decays = np.exp(decay * np.logaddexp(0, wide + dt_bias))
        return DeltaSteps(q / np.sqrt(dim), k, passed, decays)
    of_queries, of_keys = (np.full(dim, factor, np.float32) for factor in (1 / dim, dim**-0.5))
    q = norm_rows_f32(queries, of_queries, eps / dim)
    k = norm_rows_f32(keys, of_keys, eps / dim)
    powers = np.minimum(decay * softplus_f32(wide + dt_bias), np.float32(88.0))
    return DeltaSteps(q, k, sigmoid_f32(shares), exp_f32(powers))


def delta_rows(
    steps: DeltaSteps, values: Floats, state: Floats, *, tiled: bool = False
) -> tuple[Floats, Floats]:
    """Return the results of all tokens and the states after the last token.

    Args:
        steps: inputs of the update.
        values: [tokens, value_heads, value_dim]; the results have the same dtype.
        state: [value_heads, key_dim, value_dim], before the first token.
        tiled: see `key_head_of`.

    Returns:
        ([tokens, value_heads, value_dim], [value_heads, key_dim, value_dim]).
    """
    out = np.empty_like(values)
    state = state.astype(values.dtype)
    heads = values.shape[1]
    key_heads = steps.keys.shape[1]
    which = [key_head_of(head, key_heads, heads, tiled=tiled) for head in range(heads)]
    fma = multiply_add if values.dtype == np.float64 else fma_f32
    for token in range(len(values)):
        q = steps.queries[token, which, :, None]
        k = steps.keys[token, which, :, None]
        share = steps.shares[token, :, None]
        decay = steps.decays[token, :, None]
        delta = fma(-decay, sum_over_keys(fma, k, state), values[token]) * share
        state = fma(k, delta[:, None, :], state * decay[:, None])
        out[token] = sum_over_keys(fma, q, state)
    return out, state


def multiply_add(x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z in float64."""
    return x * y + z


def sum_over_keys(fma: Any, x: Floats, state: Floats) -> Floats:
    """Sum x [heads, key_dim, 1] * state [heads, key_dim, value_dim] over keys in four chains.

    Key i is added to chain i mod 4.
    """
    chains = np.zeros((_CHAINS, state.shape[0], state.shape[2]), state.dtype)
    for key in range(state.shape[1]):
        chains[key % _CHAINS] = fma(x[:, key], state[:, key], chains[key % _CHAINS])
    total: Floats = (chains[0] + chains[1]) + (chains[2] + chains[3])
    return total
