"""Usage and timing members of answers: OpenAI's `usage`, llama.cpp's `timings` and `kvboost`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.server.response_types import AnswerCosts, Cause, Timings, Usage

__all__ = ["approximate_label", "approximations_of", "costs", "progress_of", "usage_of"]


def usage_of(
    results: Sequence[GenerationResult],
    per_prompt: int,
    reasoning_tokens: int = 0,
    default_mode: GenerationMode = GenerationMode.PREFIX_CACHE,
) -> Usage:
    """Return OpenAI's usage, summed over all sequences.

    Each prompt counts once. Its cached tokens are the minimum over its sequences, because later
    sequences find blocks that this request itself computed. Tokens reused at other positions do not
    count as cached. Generated tokens count for all sequences, including those that best_of
    discards.

    Args:
        results: results of all sequences, prompt by prompt.
        per_prompt: number of sequences per prompt.
        reasoning_tokens: number of generated tokens that are reasoning, or 0 for the number that
            the engine counted.
        default_mode: the server's default cache mode.
    """
    firsts = first_comers(results, per_prompt)
    prompt = sum(result.prompt_tokens for result in firsts)
    reasoning_tokens = reasoning_tokens or sum(result.reasoning_tokens or 0 for result in results)
    completion = sum(result.generated_tokens for result in results)
    usage: Usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(result.exact_cached_tokens for result in firsts)
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
    approximate = approximate_label(results, default_mode)
    if approximate is not None:
        usage["approximate"] = approximate
    return usage


def approximate_label(
    results: Sequence[GenerationResult], default_mode: GenerationMode
) -> bool | None:
    """Return the value of `approximate` in a usage, or None to leave it out.

    It is left out if both the answer and the server's default mode are exact.
    """
    if any(result.approximate for result in results):
        return True
    return False if default_mode is GenerationMode.CHUNK_KV_REUSE else None


def approximations_of(results: Sequence[GenerationResult]) -> list[str]:
    """Return the labels of the options that make any of the results approximate."""
    return list(dict.fromkeys(label for result in results for label in result.approximations))


def costs(
    results: Sequence[GenerationResult],
    per_prompt: int,
    tokenize_ms: float,
    dropped: int = 0,
    cause: str = "",
) -> AnswerCosts:
    """Return the `timings` and `kvboost` members of an answer.

    - Times are wall-clock milliseconds.
    - The phases in `kvboost` are those of the slowest sequence. They add up to its total_ms, from
      the complete request to the last token.
    - ttft_ms is the time to the first token of any sequence.
    - The answer is approximate if any sequence is.
    - Token counts of non-prefix reuse are those of each prompt's sequence with the most reused
      tokens.

    Args:
        results: results of all sequences, prompt by prompt.
        per_prompt: number of sequences per prompt.
        tokenize_ms: milliseconds spent on tokenization.
        dropped: number of messages left out of the prompt.
        cause: cause in the cache-miss report on the first prompt; "" for the engine's own reason.
            `miss_reason` has the same value, except that "none" becomes "".
    """
    firsts = first_comers(results, per_prompt)
    shared = [
        max(group, key=lambda result: result.reused_span_tokens)
        for group in _groups(results, per_prompt)
    ]
    slowest = max(results, key=lambda result: result.total_ms)
    cause = cause or next((result.miss_reason for result in firsts if result.miss_reason), "none")
    # The wait for a batch window or a thread, before the engine's queue, counts too.
    waited = slowest.queue_ms + max(0.0, slowest.tokenize_ms - tokenize_ms)
    return {
        "timings": _timings(results, firsts),
        "kvboost": {
            "mode": next(
                (result.mode for result in shared if result.reused_span_tokens), slowest.mode
            ).value,
            "approximate": any(result.approximate for result in shared),
            "approximations": approximations_of(results),
            "reused_span_tokens": sum(result.reused_span_tokens for result in shared),
            "recomputed_tokens": sum(result.recomputed_tokens for result in shared),
            "hit_tokens": _by_tier(firsts),
            "matched_tokens": sum(result.matched_tokens for result in firsts),
            "cause": cast("Cause", cause),
            "miss_reason": "" if cause == "none" else cause,
            "tokenize_ms": round(tokenize_ms, 3),
            "queue_ms": round(waited, 3),
            "lookup_ms": round(slowest.lookup_ms, 3),
            "load_ms": round(slowest.load_ms, 3),
            "probe_ms": round(slowest.probe_ms, 3),
            "repair_ms": round(slowest.repair_ms, 3),
            "prefill_ms": round(slowest.prefill_ms, 3),
            "decode_ms": round(slowest.decode_ms, 3),
            "ttft_ms": round(min(result.ttft_ms for result in results), 3),
            "total_ms": round(slowest.total_ms, 3),
            "dropped_messages": dropped,
            "preemptions": sum(result.preemptions for result in results),
            "step_share": round(slowest.step_share, 4),
            "seeds": [result.seed for result in results],
        },
    }


def progress_of(progress: Progress) -> dict[str, Any]:
    """Return the progress of a prompt in llama.cpp's format, with the estimated time left."""
    left = progress.seconds_left
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.computed,
        "time_ms": round(progress.elapsed * 1e3),
        "estimated_ms": None if left is None else round(left * 1e3),
    }


def first_comers(results: Sequence[GenerationResult], per_prompt: int) -> list[GenerationResult]:
    """Return the sequence with the fewest cached tokens for each prompt."""
    return [
        min(group, key=lambda result: result.exact_cached_tokens)
        for group in _groups(results, per_prompt)
    ]


def _groups(
    results: Sequence[GenerationResult], per_prompt: int
) -> list[Sequence[GenerationResult]]:
    """Group the results by prompt, with `per_prompt` results in each group."""
    return [results[first : first + per_prompt] for first in range(0, len(results), per_prompt)]


def _by_tier(results: Sequence[GenerationResult]) -> dict[str, int]:
    tiers: dict[str, int] = {}
    for result in results:
        for tier, tokens in result.hit_tokens.items():
            tiers[tier] = tiers.get(tier, 0) + tokens
    return tiers


def _timings(results: Sequence[GenerationResult], firsts: Sequence[GenerationResult]) -> Timings:
    """Return timings in llama.cpp's format.

    - prompt_n and cache_n: computed and cached prompt tokens. Each prompt counts once, and tokens
      reused at other positions are in neither.
    - predicted_n: generated tokens of all sequences.
    - prompt_ms and predicted_ms: times of the slowest sequence.
    - Speeds: all tokens divided by these times, because sequences run in parallel.
    """
    cached = sum(result.exact_cached_tokens for result in firsts)
    computed = sum(result.computed_prompt_tokens for result in firsts)
    predicted = sum(result.generated_tokens for result in results)
    prompt_ms = max(result.prompt_ms for result in firsts)
    predicted_ms = max(result.decode_ms for result in results)
    return {
        "cache_n": cached,
        "prompt_n": computed,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": _ratio(prompt_ms, computed),
        "prompt_per_second": _ratio(computed * 1e3, prompt_ms),
        "predicted_n": predicted,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_token_ms": _ratio(predicted_ms, predicted),
        "predicted_per_second": _ratio(predicted * 1e3, predicted_ms),
        "draft_n": sum(result.drafted_tokens for result in results),
        "draft_n_accepted": sum(result.accepted_tokens for result in results),
    }


def _ratio(amount: float, of: float) -> float:
    """Divide two numbers. Return 0 for a zero divisor, because JSON has no infinity."""
    return round(amount / of, 3) if of > 0 else 0.0
