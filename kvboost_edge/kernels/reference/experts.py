"""Mixtures of experts in plain NumPy: which experts a token goes to, and what comes back. Slow on
purpose.

The order is part of the specification: a token's experts are taken by ascending number, whatever
else is in the pass, so its result has the same bits however a prompt was cut. Biases of an expert
are part of its result, which is then multiplied with the share.
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
    """How a router's logits become experts and their shares.

    Attributes:
        used: experts of a token.
        score: "softmax" of all logits, "sigmoid" of each, or "chosen": the softmax of the chosen
            ones' logits.
        renorm: "" as they are; "add": shares are divided by their sum + eps; "least": by their sum,
            at least eps.
        scale: what shares are multiplied with at last, beside a factor of each expert.
    """

    used: int
    score: str = "softmax"
    renorm: str = ""
    eps: float = 0.0
    scale: float = 1.0


def route_rows(
    logits: Floats, routing: Routing, bias: Floats | None = None, factors: Floats | None = None
) -> tuple[Longs, Floats]:
    """Experts [tokens, used], ascending, and their shares, in the dtype of `logits` [tokens,
    experts].

    bias: [experts], added to the scores where experts are chosen, and nowhere else. factors:
    [experts], what each one's shares are multiplied with. Of equal scores the lower number is
    chosen. A token with a score that is NaN has the first experts, and shares that are NaN.
    """
    dtype = logits.dtype
    used = routing.used
    scores = _scores(logits, routing.score)
    wanted = scores if bias is None else (scores + bias.astype(dtype)).astype(dtype)
    broken = np.isnan(wanted).any(axis=1, keepdims=True)
    order = np.argsort(-np.where(broken, 0, wanted), axis=1, kind="stable")
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


def _scores(logits: Floats, score: str) -> Floats:
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
    """Each expert that has tokens, ascending, with its places in `chosen` as one row: token * used
    + rank.
    """
    flat = chosen.reshape(-1)
    return [
        (expert, found)
        for expert in range(num_experts)
        if len(found := np.flatnonzero(flat == expert))
    ]


class ExpertWeights(NamedTuple):
    """One expert: gate_up [2 * width, hidden], the gate's rows first, down [hidden, width], and
    their biases [rows].
    """

    gate_up: Floats
    down: Floats
    gate_up_bias: Floats | None = None
    down_bias: Floats | None = None


def expert_rows(
    x: Floats, expert: ExpertWeights, activate: Callable[[Floats, Floats], Floats]
) -> Floats:
    """down(activate(gate, up)) of rows [tokens, hidden], as `mixed_rows` takes it; each matrix's
    sums are of float64 and rounded once, with the bias, to the dtype of `x`.
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
    """before + the sum over each token's experts, ascending, of share * mlp(expert, its row of x),
    each step rounded once to the dtype of `before`.
    """
    out = before.copy()
    used = chosen.shape[1]
    for expert, slots in slots_of(chosen, num_experts):
        tokens = slots // used
        rows = mlp(expert, x[tokens]).astype(np.float64)
        share = shares.reshape(-1)[slots, None].astype(np.float64)
        out[tokens] = (rows * share + out[tokens]).astype(out.dtype)
    return out
