"""Sampling of the next token from logits, using NumPy only.

Only enabled steps run. Their order is penalties, DRY, logit bias, forbidden tokens, temperature,
top_k, top_p, min_p and the draw. Other samplers run in a chain, see `chain.py`. Ties are broken by
token id. Each random number comes from Philox keyed by (seed, position), so it depends on neither
the batch nor preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.results import TokenLogprobs
from kvboost_edge.engine.request.sampler_order import DEFAULT_ORDER
from kvboost_edge.engine.request.words import NO_WORDS, RequestWords
from kvboost_edge.engine.samplers.chain import SamplerChain, make_chain
from kvboost_edge.engine.samplers.numbers import largest_places, uniform
from kvboost_edge.engine.samplers.repetition import make_bad_words, make_dry
from kvboost_edge.errors import RequestError

__all__ = ["Sampler", "make_sampler", "sampling_distribution", "token_logprobs", "uniform"]

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Step = Callable[[Numbers, Sequence[int], int], None]
Adjustment = Callable[[Floats, Sequence[int], int], Floats]  # without changing the array


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


def make_sampler(
    params: SamplingParams,
    seed: int,
    suppressed: Sequence[int] = (),
    *,
    stop_ids: Collection[int] = (),
    words: RequestWords = NO_WORDS,
) -> Sampler:
    """Return the sampler of one request, which is stateless except for mirostat.

    It raises RequestError if only suppressed tokens have finite logits.

    Args:
        suppressed: token ids that are never drawn, even with a positive logit bias. They still
            count in log probabilities.
        stop_ids: token ids that end the output. They are not drawn before `min_tokens`.
        words: the request's bad words and sequence breakers in tokens.
    """
    adjust, chain = _make_steps(params, seed, suppressed, stop_ids, words)

    def most_likely(
        logits: Floats, token_ids: Sequence[int], num_prompt: int, largest: int | None = None
    ) -> int:
        adjusted = adjust(logits, token_ids, num_prompt)
        return int(adjusted.argmax()) if largest is None or adjusted is not logits else largest

    def sample(
        logits: Floats, token_ids: Sequence[int], num_prompt: int, largest: int | None = None
    ) -> int:
        ids, probs = _filtered(adjust(logits, token_ids, num_prompt), params)
        index = _drawn(probs, seed, len(token_ids))
        return index if ids is None else int(ids[index])

    def sample_in_chain(
        logits: Floats, token_ids: Sequence[int], num_prompt: int, largest: int | None = None
    ) -> int:
        assert chain is not None
        ids, probs = chain(adjust(logits, token_ids, num_prompt), token_ids, num_prompt)
        index = _drawn(probs, seed, len(token_ids))
        chain.note(len(token_ids), num_prompt, float(probs[index]))
        return int(ids[index])

    if not params.samples:
        return most_likely
    return sample if chain is None else sample_in_chain


def sampling_distribution(
    logits: Floats,
    token_ids: Sequence[int],
    num_prompt: int,
    params: SamplingParams,
    *,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    words: RequestWords = NO_WORDS,
) -> npt.NDArray[np.float64]:
    """Return the distribution that the next token is drawn from, as float64 [vocab_size].

    For greedy sampling, return the softmax of the unmodified logits. Mirostat's distribution is
    that of the first token.
    """
    adjust, chain = _make_steps(params, seed, (), stop_ids, words)
    adjusted = adjust(logits, token_ids, num_prompt)
    if not params.samples:
        return _softmax(adjusted.astype(np.float64))
    ids, probs = (
        _filtered(adjusted, params) if chain is None else chain(adjusted, token_ids, num_prompt)
    )
    full = np.zeros(len(logits), np.float64)
    full[slice(None) if ids is None else ids] = probs
    full /= full.sum()
    return full


def _drawn(probs: npt.NDArray[np.float64], seed: int, position: int) -> int:
    """Return the place of the drawn token. The probabilities need not sum to 1."""
    cumulative = np.cumsum(probs)
    draw = uniform(seed, position) * cumulative[-1]
    index = int(np.searchsorted(cumulative, draw, side="right"))
    # Rounding can place the draw past the last token. Take the last token with a nonzero
    # probability.
    return min(index, int(np.flatnonzero(probs)[-1]))


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
        tuple((int(i), float(wide[i] - log_norm)) for i in largest_places(logits, num_top))
        if num_top
        else ()
    )
    return TokenLogprobs(token_id, float(wide[token_id] - log_norm), top)


def _make_steps(
    params: SamplingParams,
    seed: int,
    suppressed: Sequence[int],
    stop_ids: Collection[int],
    words: RequestWords,
) -> tuple[Adjustment, SamplerChain | None]:
    """Return the function of `_make_adjust`, and the chain of samplers if the request has one."""
    penalties = _make_penalties(params, words)
    in_chain = params.samples and params.samplers is not None and not params.mirostat
    before, inside = ({}, penalties) if in_chain else (penalties, {})
    adjust = _make_adjust(params, before, suppressed, stop_ids, words)
    if not params.samples:
        return adjust, None
    return adjust, make_chain(params, seed, inside, stop_ids=stop_ids, texts=words.texts)


def _make_penalties(params: SamplingParams, words: RequestWords) -> dict[str, Step]:
    """Return the functions that apply penalties to logits [vocab_size], by sampler name."""
    found: dict[str, Step] = {}
    if (together := _occurrence_penalties(params)) is not None:
        found["penalties"] = together
    if params.uses_dry:
        found["dry"] = make_dry(params, words.breakers)
    return found


def _occurrence_penalties(params: SamplingParams) -> Step | None:
    window = params.repeat_last_n
    if not params.uses_penalties:
        return None
    steps: list[Step] = []
    if params.repetition_penalty not in (None, 1.0):
        penalty = np.float32(params.repetition_penalty)

        def repetition(logits: Numbers, token_ids: Sequence[int], num_prompt: int) -> None:
            recent = token_ids if window < 0 else token_ids[max(0, len(token_ids) - window) :]
            seen = np.unique(np.asarray(recent, np.int64))
            logits[seen] = np.where(
                logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty
            )

        steps.append(repetition)
    if params.presence_penalty or params.frequency_penalty:
        presence = np.float32(params.presence_penalty)
        frequency = np.float32(params.frequency_penalty)

        def occurrence(logits: Numbers, token_ids: Sequence[int], num_prompt: int) -> None:
            start = num_prompt if window < 0 else max(num_prompt, len(token_ids) - window)
            seen, counts = np.unique(np.asarray(token_ids[start:], np.int64), return_counts=True)
            logits[seen] -= presence + frequency * counts.astype(np.float32)

        steps.append(occurrence)

    def together(logits: Numbers, token_ids: Sequence[int], num_prompt: int) -> None:
        for step in steps:
            step(logits, token_ids, num_prompt)

    return together if steps else None


def _make_adjust(
    params: SamplingParams,
    penalties: dict[str, Step],
    suppressed: Sequence[int],
    stop_ids: Collection[int],
    words: RequestWords,
) -> Adjustment:
    """Return a function that applies penalties and bias to logits and masks forbidden tokens.

    The function returns the input array itself if nothing changes, otherwise a copy.
    """
    names = DEFAULT_ORDER if params.samplers is None or params.mirostat else params.samplers
    steps: list[Step] = [penalties[name] for name in names if name in penalties]
    if params.logit_bias:
        biased = np.array(list(params.logit_bias), np.int64)
        values = np.array(list(params.logit_bias.values()), np.float32)

        def bias(logits: Numbers, token_ids: Sequence[int], num_prompt: int) -> None:
            logits[biased] += values

        steps.append(bias)
    if suppressed:
        never = np.array(suppressed, np.int64)

        def suppress(logits: Numbers, token_ids: Sequence[int], num_prompt: int) -> None:
            before = logits[never]
            logits[never] = -np.inf
            if logits.max() == -np.inf:
                raise RequestError(
                    f"the grammar allows only token {never[before.argmax()]}, which the model's "
                    "files suppress; allow another token"
                )

        steps.append(suppress)
    forbidden = _make_forbidden(params, stop_ids, words)
    if not steps and forbidden is None:
        return lambda logits, token_ids, num_prompt: logits

    def adjust(logits: Floats, token_ids: Sequence[int], num_prompt: int) -> Floats:
        masked = [] if forbidden is None else forbidden(token_ids, num_prompt)
        if not steps and not masked:
            return logits
        own = logits.astype(np.float32, copy=True)
        for step in steps:
            step(own, token_ids, num_prompt)
        if masked:
            places = np.array([token for token in masked if token < len(own)], np.int64)
            before = own[places]
            own[places] = -np.inf
            if own.max() == -np.inf:  # a grammar allows nothing else, and it goes first
                own[places] = before
        return own

    return adjust


def _make_forbidden(
    params: SamplingParams, stop_ids: Collection[int], words: RequestWords
) -> Callable[[Sequence[int], int], list[int]] | None:
    """Return a function that lists the token ids that must not come next, or None for none."""
    found: list[Callable[[Sequence[int], int], list[int]]] = []
    if params.min_tokens and stop_ids:
        ends = sorted(stop_ids)
        least = params.min_tokens

        def early(token_ids: Sequence[int], num_prompt: int) -> list[int]:
            return ends if len(token_ids) - num_prompt < least else []

        found.append(early)
    if words.bad:
        found.append(make_bad_words(words.bad))
    if not found:
        return None
    return lambda token_ids, num_prompt: [
        token for each in found for token in each(token_ids, num_prompt)
    ]


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
        ids = largest_places(logits, params.top_k)
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
        ids = largest_places(logits, _TOP_P_CANDIDATES)
        best = probs[ids]
        if best.sum() < top_p * total:
            ids = largest_places(logits, len(logits))
            best = probs[ids]
        probs = best
    count = int(np.searchsorted(np.cumsum(probs), top_p * total, side="left")) + 1
    return ids[:count], probs[:count]


def _softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum(), np.float64)
