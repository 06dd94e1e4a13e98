"""Sampling of the next token from logits, using NumPy only.

Only enabled steps run. Their order is penalties, logit bias, suppressed tokens, temperature, top_k,
top_p, min_p and the draw. Ties are broken by token id. Each random number comes from Philox keyed
by (seed, position), so it depends on neither the batch nor preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.results import TokenLogprobs

__all__ = ["Sampler", "make_sampler", "sampling_distribution", "token_logprobs", "uniform"]

Floats = npt.NDArray[np.float32]


class Sampler(Protocol):
    """A function that chooses the next token from logits without modifying them."""

    def __call__(
        self,
        logits: Floats,
        token_ids: Sequence[int],
        num_prompt: int,
        largest: int | None = None,
        /,
    ) -> int:
        """Return the id of the next token.

        Args:
            logits: float32 [vocab_size].
            token_ids: token ids of the prompt and the output so far.
            num_prompt: number of prompt tokens.
            largest: index of the largest logit, if known.
        """
        ...


# Sorting 150,000 logits takes about 10 ms. The top_p nucleus is almost always within this many of
# the largest logits, so only these are sorted first.
_TOP_P_CANDIDATES = 1024


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) for the token at `position`, given a seed."""
    return float(
        np.random.Generator(
            np.random.Philox(key=np.array([seed, position], dtype=np.uint64))
        ).random()
    )


def make_sampler(params: SamplingParams, seed: int, suppressed: Sequence[int] = ()) -> Sampler:
    """Return a stateless sampler for one request.

    Args:
        suppressed: token ids that are never drawn, even with a positive logit bias. They still
            count in log probabilities.
    """
    adjust = _make_adjust(params, suppressed)

    def most_likely(
        logits: Floats, token_ids: Sequence[int], num_prompt: int, largest: int | None = None
    ) -> int:
        adjusted = adjust(logits, token_ids, num_prompt)
        return int(adjusted.argmax()) if largest is None or adjusted is not logits else largest

    def sample(
        logits: Floats, token_ids: Sequence[int], num_prompt: int, largest: int | None = None
    ) -> int:
        ids, probs = _filtered(adjust(logits, token_ids, num_prompt), params)
        cumulative = np.cumsum(probs)
        draw = uniform(seed, len(token_ids)) * cumulative[-1]
        index = int(np.searchsorted(cumulative, draw, side="right"))
        # Rounding can place the draw past the last token. Take the last token with a nonzero
        # probability.
        index = min(index, int(np.flatnonzero(probs)[-1]))
        return index if ids is None else int(ids[index])

    return sample if params.samples else most_likely


def sampling_distribution(
    logits: Floats, token_ids: Sequence[int], num_prompt: int, params: SamplingParams
) -> npt.NDArray[np.float64]:
    """Return the distribution that the next token is drawn from, as float64 [vocab_size].

    For greedy sampling, return the softmax of the unmodified logits.
    """
    adjusted = _make_adjust(params)(logits, token_ids, num_prompt)
    if not params.samples:
        return _softmax(adjusted.astype(np.float64))
    ids, probs = _filtered(adjusted, params)
    full = np.zeros(len(logits), np.float64)
    full[slice(None) if ids is None else ids] = probs
    full /= full.sum()
    return full


def token_logprobs(logits: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Return log probabilities computed from the unmodified logits.

    Args:
        token_id: the chosen token.
        num_top: number of most likely tokens to report.
    """
    wide = logits.astype(np.float64)
    peak = wide.max()
    log_norm = peak + np.log(np.exp(wide - peak).sum())
    top = (
        tuple((int(i), float(wide[i] - log_norm)) for i in _largest(logits, num_top))
        if num_top
        else ()
    )
    return TokenLogprobs(token_id, float(wide[token_id] - log_norm), top)


def _make_adjust(
    params: SamplingParams, suppressed: Sequence[int] = ()
) -> Callable[[Floats, Sequence[int], int], Floats]:
    """Return a function that applies penalties, bias and suppression to logits.

    The function returns the input array itself if no step is enabled, otherwise a copy.
    """
    steps: list[Callable[[Floats, Sequence[int], int], None]] = []
    if params.repetition_penalty not in (None, 1.0):
        penalty = np.float32(params.repetition_penalty)

        def repetition(logits: Floats, token_ids: Sequence[int], num_prompt: int) -> None:
            seen = np.unique(np.asarray(token_ids, np.int64))
            logits[seen] = np.where(
                logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty
            )

        steps.append(repetition)
    if params.presence_penalty or params.frequency_penalty:
        presence = np.float32(params.presence_penalty)
        frequency = np.float32(params.frequency_penalty)

        def occurrence(logits: Floats, token_ids: Sequence[int], num_prompt: int) -> None:
            seen, counts = np.unique(
                np.asarray(token_ids[num_prompt:], np.int64), return_counts=True
            )
            logits[seen] -= presence + frequency * counts.astype(np.float32)

        steps.append(occurrence)
    if params.logit_bias:
        biased = np.array(list(params.logit_bias), np.int64)
        values = np.array(list(params.logit_bias.values()), np.float32)

        def bias(logits: Floats, token_ids: Sequence[int], num_prompt: int) -> None:
            logits[biased] += values

        steps.append(bias)
    if suppressed:
        never = np.array(suppressed, np.int64)

        def suppress(logits: Floats, token_ids: Sequence[int], num_prompt: int) -> None:
            logits[never] = -np.inf

        steps.append(suppress)
    if not steps:
        return lambda logits, token_ids, num_prompt: logits

    def adjust(logits: Floats, token_ids: Sequence[int], num_prompt: int) -> Floats:
        own = logits.astype(np.float32, copy=True)
        for step in steps:
            step(own, token_ids, num_prompt)
        return own

    return adjust


def _filtered(
    logits: Floats, params: SamplingParams
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.float64]]:
    """Return the tokens that pass all filters.

    Returns:
        Their ids, or None for all tokens in order, and their probabilities. The probabilities need
            not sum to 1.
    """
    temperature = 1.0 if params.temperature is None else params.temperature
    scaled = logits.astype(np.float64)
    # A tiny temperature can overflow to -inf for tokens below the maximum. Their probability is
    # then correctly 0.
    with np.errstate(over="ignore"):
        probs = np.exp((scaled - scaled.max()) / temperature)
    ids: npt.NDArray[np.int64] | None = None
    if params.top_k and params.top_k < len(logits):
        ids = _largest(logits, params.top_k)
        probs = probs[ids]
    if params.top_p is not None and params.top_p < 1.0:
        ids, probs = _nucleus(logits, ids, probs, params.top_p)
    if params.min_p:
        probs = np.where(probs >= params.min_p * probs.max(), probs, 0.0)
    return ids, probs


def _nucleus(
    logits: Floats, ids: npt.NDArray[np.int64] | None, probs: npt.NDArray[np.float64], top_p: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the smallest set of most likely tokens whose total probability reaches `top_p`.

    Args:
        ids: token ids, most likely first, or None for all tokens.
    """
    total = probs.sum()
    if ids is None:
        ids = _largest(logits, _TOP_P_CANDIDATES)
        best = probs[ids]
        if best.sum() < top_p * total:
            ids = _largest(logits, len(logits))
            best = probs[ids]
        probs = best
    count = int(np.searchsorted(np.cumsum(probs), top_p * total, side="left")) + 1
    return ids[:count], probs[:count]


def _largest(logits: Floats, count: int) -> npt.NDArray[np.int64]:
    """Return the ids of the `count` largest logits in descending order. Ties are broken by id."""
    if count < len(logits):
        threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
        candidates = np.flatnonzero(logits >= threshold)
    else:
        candidates = np.arange(len(logits))
    order = np.argsort(-logits[candidates], kind="stable")
    return candidates[order[:count]].astype(np.int64, copy=False)


def _softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum(), np.float64)
