"""What a request cost: OpenAI's `usage`, llama.cpp's `timings`, and where the cached tokens came
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.server.response_types import Cause, Spent, Timings, Usage

__all__ = ["approximate_label", "costs", "progress_of", "usage_of"]


def usage_of(
    results: Sequence[GenerationResult],
    per_prompt: int,
    reasoning_tokens: int = 0,
    default_mode: GenerationMode = GenerationMode.PREFIX_CACHE,
) -> Usage:
    """OpenAI's usage of all sequences, `per_prompt` of them for each prompt, prompt by prompt.

    A prompt counts once however many sequences continue it; its cached tokens are what the cache
    held before the request itself filled it, so the least of its sequences; what was shared at
    other positions is not among them. Every generated token counts, of unchosen sequences too;
    `reasoning_tokens` of them are reasoning. `default_mode` is the server's.
    """
    firsts = first_comers(results, per_prompt)
    prompt = sum(result.prompt_tokens for result in firsts)
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
    """Return the member `approximate` of a usage; None: it is left out, as the answer is exact and
    the server's default mode too.
    """
    if any(result.approximate for result in results):
        return True
    return False if default_mode is GenerationMode.CHUNK_KV_REUSE else None


def costs(
    results: Sequence[GenerationResult],
    per_prompt: int,
    tokenize_ms: float,
    dropped: int = 0,
    cause: str = "",
) -> Spent:
    """The `timings` and `kvboost` members of an answer; `dropped` messages were left out of the
    prompt. `cause` comes from the report on the first prompt; "": the engine's own reason.
    `miss_reason` equals it, and is "" for "none".

    All times are wall-clock milliseconds. Those of `kvboost` are of the sequence that took longest
    and add up to its total_ms, from the complete request to the last token; ttft_ms is the first
    token of any sequence. Where one of them is approximate the answer is; of each prompt the
    sequence counts that shared most at other positions.
    """
    firsts = first_comers(results, per_prompt)
    shared = [
        max(group, key=lambda result: result.reused_span_tokens)
        for group in _groups(results, per_prompt)
    ]
    slowest = max(results, key=lambda result: result.total_ms)
    cause = cause or next((result.miss_reason for result in firsts if result.miss_reason), "none")
    # Before the engine's queue it waited for the batch window, or for a thread.
    waited = slowest.queue_ms + max(0.0, slowest.tokenize_ms - tokenize_ms)
    return {
        "timings": _timings(results, firsts),
        "kvboost": {
            "mode": next(
                (result.mode for result in shared if result.approximate), slowest.mode
            ).value,
            "approximate": any(result.approximate for result in shared),
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
    """llama.cpp's figures of a prompt that is being read, and how many milliseconds are left until
    the first token.
    """
    left = progress.seconds_left
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.computed,
        "time_ms": round(progress.elapsed * 1e3),
        "estimated_ms": None if left is None else round(left * 1e3),
    }


def first_comers(results: Sequence[GenerationResult], per_prompt: int) -> list[GenerationResult]:
    """Return of each prompt the sequence that found the least in the cache."""
    return [
        min(group, key=lambda result: result.exact_cached_tokens)
        for group in _groups(results, per_prompt)
    ]


def _groups(
    results: Sequence[GenerationResult], per_prompt: int
) -> list[Sequence[GenerationResult]]:
    """The sequences of each prompt."""
    return [results[first : first + per_prompt] for first in range(0, len(results), per_prompt)]


def _by_tier(results: Sequence[GenerationResult]) -> dict[str, int]:
    tiers: dict[str, int] = {}
    for result in results:
        for tier, tokens in result.hit_tokens.items():
            tiers[tier] = tiers.get(tier, 0) + tokens
    return tiers


def _timings(results: Sequence[GenerationResult], firsts: Sequence[GenerationResult]) -> Timings:
    """llama.cpp's figures. The prompt's are those of `usage`: each prompt once, as its first
    sequence met it; prompt_n were computed, cache_n were not, and what was shared at other
    positions is in neither. predicted_n counts all sequences. prompt_ms and predicted_ms are the
    longest of them, so with several sequences, which are computed side by side, the speeds are
    those of all together.
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
    """amount / of, 0 where there is nothing to divide by: JSON has no infinity."""
    return round(amount / of, 3) if of > 0 else 0.0
