"""Mixture of experts in plain NumPy: routing, and the sum of the experts' results.

The order is part of the specification. A token's experts are added in ascending order, regardless
of the other tokens in the pass, so the result is bit-identical for any chunking of a prompt. A
share multiplies an expert's result including its biases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["ExpertWeights", "Routing", "expert_rows", "mixed_rows", "route_rows", "slots_of"]

Floats = npt.NDArray[np.floating[Any]]
Longs = npt.NDArray[np.int64]


class Routing(NamedTuple):
    """Rule that turns router logits into experts and shares.

    Attributes:
        used: number of experts per token.
        score: "softmax" of all logits, "sigmoid" of each logit, or "chosen" for the softmax of the
            chosen logits.
        renorm: divisor of the shares: "add" for their sum + eps, "least" for their sum but at least
            eps, or "" for none.
        eps: see `renorm`.
        scale: factor applied to all shares.
        groups: number of groups that the experts are divided into. A group's score is the sum of
            its two largest scores.
        used_groups: number of groups, those with the largest scores, from which a token's experts
            are chosen.
    """

    used: int
    score: str = "softmax"
    renorm: str = ""
    eps: float = 0.0
    scale: float = 1.0
    groups: int = 1
    used_groups: int = 1


def route_rows(
    logits: Floats, routing: Routing, bias: Floats | None = None, factors: Floats | None = None
) -> tuple[Longs, Floats]:
    """Return each token's experts, int64 [tokens, used] ascending, and their shares.

    Ties go to the lower number of an expert or group. If any score is NaN, the token gets the
    first experts with NaN shares.

    Args:
        logits: [tokens, experts]; the shares have the same dtype.
        routing: the rule.
        bias: [experts], added to scores for the selection only.
        factors: [experts], factors of the shares.
    """
    dtype = logits.dtype
    used = routing.used
    scores = _scores(logits, routing.score)
    wanted = scores if bias is None else (scores + bias.astype(dtype)).astype(dtype)
    broken = np.isnan(wanted).any(axis=1, keepdims=True)
    wanted = _limited(np.where(broken, 0, wanted), routing)
    order = np.argsort(-wanted, axis=1, kind="stable")
    order = np.where(broken, np.arange(order.shape[1]), order)
    chosen: Longs = np.sort(order[:, :used], axis=1).astype(np.int64)
    shares = np.take_along_axis(scores, chosen, axis=1)
    if routing.score == "chosen":
        shares = _scores(shares, "softmax")
    if routing.renorm:
        total = np.zeros((len(shares), 1), dtype)
        for index in range(used):
            total = total + shares[:, index : index + 1]
        eps = dtype.type(routing.eps)
        shares = shares / (total + eps if routing.renorm == "add" else np.maximum(total, eps))
    shares = shares * dtype.type(routing.scale)
    if factors is not None:
        shares = shares * factors.astype(dtype)[chosen]
    shares = np.where(broken, dtype.type(np.nan), shares)
    return chosen, shares.astype(dtype)


def _limited(wanted: Floats, routing: Routing) -> Floats:
    """Return the scores, with -inf in all groups that a token does not use."""
    if routing.used_groups >= routing.groups:
        return wanted
    parts = wanted.reshape(len(wanted), routing.groups, -1)
    totals = np.sort(parts, axis=2)[:, :, -2:].sum(axis=2)
    order = np.argsort(-totals, axis=1, kind="stable")
    limited = np.full_like(parts, -np.inf)
    kept = order[:, : routing.used_groups, None]
    np.put_along_axis(limited, kept, np.take_along_axis(parts, kept, axis=1), axis=1)
    return limited.reshape(wanted.shape)


def _scores(logits: Floats, score: str) -> Floats:
    """Return the sigmoid or softmax of the logits; for "chosen", return the logits."""
    one = logits.dtype.type(1)
    with np.errstate(over="ignore", invalid="ignore"):
        if score == "chosen":
            return logits
        if score == "sigmoid":
            passed: Floats = one / (one + np.exp(-logits))
            return passed
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        total = np.zeros((len(logits), 1), logits.dtype)
        for index in range(logits.shape[1]):
            total = total + powers[:, index : index + 1]
        shares: Floats = powers / total
        return shares


def slots_of(chosen: Longs, num_experts: int) -> list[tuple[int, Longs]]:
    """Map each expert that has tokens, ascending, to its places: token * used + rank."""
    flat = chosen.reshape(-1)
    return [
        (expert, found)
        for expert in range(num_experts)
        if len(found := np.flatnonzero(flat == expert))
    ]


class ExpertWeights(NamedTuple):
    """Weights of one expert.

    Attributes:
        gate_up: [2 * width, hidden], gate rows first.
        down: [hidden, width].
        gate_up_bias: [2 * width], or None.
        down_bias: [hidden], or None.
    """

    gate_up: Floats
    down: Floats
    gate_up_bias: Floats | None = None
    down_bias: Floats | None = None


def expert_rows(
    x: Floats, expert: ExpertWeights, activate: Callable[[Floats, Floats], Floats]
) -> Floats:
    """Return down(activate(gate, up)) of rows [tokens, hidden].

    Each matrix product is summed in float64. The sum with its bias is rounded once to the dtype of
    `x`.
    """

    def linear(rows: Floats, matrix: Floats, bias: Floats | None) -> Floats:
        sums = rows.astype(np.float64) @ matrix.astype(np.float64).T
        return (sums if bias is None else sums + bias.astype(np.float64)).astype(x.dtype)

    gate, up = np.split(linear(x, expert.gate_up, expert.gate_up_bias), 2, axis=1)
    return linear(activate(gate, up), expert.down, expert.down_bias)


def mixed_rows(
    x: Floats,
    before: Floats,
    chosen: Longs,
    shares: Floats,
    mlp: Callable[[int, Floats], Floats],
    num_experts: int,
) -> Floats:
    """Add share * mlp(expert, row of x) to `before` for each of a token's experts, ascending.

    Each step is rounded once to the dtype of `before`.
    """
    out = before.copy()
    used = chosen.shape[1]
    for expert, slots in slots_of(chosen, num_experts):
        tokens = slots // used
        rows = mlp(expert, x[tokens]).astype(np.float64)
        share = shares.reshape(-1)[slots, None].astype(np.float64)
        out[tokens] = (rows * share + out[tokens]).astype(out.dtype)
    return out
