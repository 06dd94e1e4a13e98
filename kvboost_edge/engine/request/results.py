"""Results of calls. Times are milliseconds on one clock that starts when the call began."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

from kvboost_edge.config import GenerationMode

__all__ = [
    "CorrectnessReport",
    "GenerationResult",
    "Missed",
    "PromptCheck",
    "TokenLogprobs",
    "WarmResult",
]

_MIN_CHUNK_TOKENS = 32  # a shorter tail of a warmed text is not worth a warning


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability of one output token and of the most likely ones, (token id, logprob)
    best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Missed(NamedTuple):
    """Why a prompt was not served further, see `GenerationResult`."""

    miss_reason: str
    evicted_from: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """The outcome of one request.

    Attributes:
        mode: the mode that ran; CHUNK_KV_REUSE only if KV of other positions was reused.
        approximate: whether KV of other positions was reused, so that the output may differ from
            that of a full computation.
        reused_span_tokens: prompt tokens whose KV was reused from other positions.
        recomputed_tokens: prompt tokens found at other positions and still recomputed.
        gate: quality gate of that reuse: "passed"; "unchecked" without a stored verdict; "off"
            (reuse_gate="off"); "" if nothing was reused.
        output_text: text without the EOS or stop token and without the stop string.
        output_token_ids: with the EOS or stop token that ended it.
        generated_tokens: number of output tokens.
        finish_reason: "stop", "length", "cancelled" or "timeout" (past its deadline).
        cached_tokens: prompt tokens whose KV came from the cache: `exact_cached_tokens`, which
            `hit_tokens` splits by tier, and `reused_span_tokens`.
        matched_tokens: prompt tokens whose KV was in the cache; more than `exact_cached_tokens`
            where a snapshot of the recurrent state was missing.
        kv_reuse_ratio: cached_tokens / prompt_tokens.
        miss_reason: why the first prompt token after the cached ones was computed: ""
            every token was cached "first_seen"   this tenant and salt never cached its block
            "evicted"      its block was cached and evicted "tail"         it is in the last block,
            which is not full "state"        its KV is cached, a snapshot of the recurrent state is
            not "bypassed"     the mode or prompt_logprobs asked for a computation "not_started"
            the request ended while it waited.
        evicted_from: the pool and tiers that evicted the block, nearest first; () unless "evicted".
        ttft_ms: entry of the call to the first token (the whole time if none came).
        total_ms: entry of the call to the end.
        tokens_per_sec: generated tokens over the whole time.
        token_times_ms: arrival of each output token, since entry.
        phases: milliseconds of tokenize, queue, lookup, load, probe, repair, prefill and decode;
            they add up to total_ms, and each is an attribute such as `queue_ms`. probe: deviation
            scoring of reused spans; repair: prefill up to the end of the last span.
        seed: the seed that reproduces a sampled output.
        preemptions: how often the request lost its blocks and was recomputed.
        step_share: share of the tokens of its steps that were its own, 0 to 1; a mean weighted by
            the steps' time.
        drafted_tokens: draft tokens verified, see `EngineConfig.speculation`.
        accepted_tokens: draft tokens accepted.
        prompt_logprobs: one entry per prompt token, the first None (nothing predicts it); None if
            not asked for.
    """

    mode: GenerationMode
    prompt: str
    output_text: str
    output_token_ids: tuple[int, ...]
    generated_tokens: int
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    kv_reuse_ratio: float
    hit_tokens: Mapping[str, int]
    miss_reason: str
    evicted_from: tuple[str, ...] = ()
    ttft_ms: float
    total_ms: float
    tokens_per_sec: float
    token_times_ms: tuple[float, ...]
    phases: Mapping[str, float]
    logprobs: tuple[TokenLogprobs, ...] | None
    seed: int
    preemptions: int
    step_share: float = 0.0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    reused_span_tokens: int = 0
    recomputed_tokens: int = 0
    gate: str = ""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    matched_tokens: int = 0

    @property
    def approximate(self) -> bool:
        return self.reused_span_tokens > 0

    @property
    def exact_cached_tokens(self) -> int:
        """Prompt tokens of the cached prefix, whose KV equals that of a full computation."""
        return self.cached_tokens - self.reused_span_tokens

    @property
    def computed_prompt_tokens(self) -> int:
        """Prompt tokens that were computed: neither cached nor shared at another position."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def prompt_ms(self) -> float:
        """Time spent on the prompt: probe, repair and prefill."""
        return self.phases["probe"] + self.phases["repair"] + self.phases["prefill"]

    @property
    def tokenize_ms(self) -> float:
        return self.phases["tokenize"]

    @property
    def queue_ms(self) -> float:
        return self.phases["queue"]

    @property
    def lookup_ms(self) -> float:
        return self.phases["lookup"]

    @property
    def load_ms(self) -> float:
        return self.phases["load"]

    @property
    def probe_ms(self) -> float:
        return self.phases["probe"]

    @property
    def repair_ms(self) -> float:
        return self.phases["repair"]

    @property
    def prefill_ms(self) -> float:
        return self.phases["prefill"]

    @property
    def decode_ms(self) -> float:
        return self.phases["decode"]


@functools.total_ordering
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WarmResult:
    """The outcome of `warm`. It is true, and compares, like the number `chunks_stored`.

    A text that prompts begin with counts in chunks of chunk_size tokens; a last one of at least 32
    tokens counts too. Of documents, and of a text for another position, a chunk is what they were
    cut into: chunk_size tokens, or the longest document where they were not cut.

    Attributes:
        chunks_stored: chunks that are in the cache now, the same number if it is warmed again.
        partial_tail_tokens: tokens after the last full chunk; of documents those in chunks that
            cannot be found.
        chunk_boundary_aligned: fewer than 32 tokens at its end are not cached: those after its last
            full block, or of documents the partial tail.
        alignment_warning: reports those tokens when it is not aligned, else None; `warm` logs it.
    """

    chunks_stored: int
    token_count: int
    chunk_size: int
    chunk_boundary_aligned: bool
    partial_tail_tokens: int
    alignment_warning: str | None

    @classmethod
    def of(cls, num_cached: int, num_tokens: int, chunk_size: int, block_size: int) -> WarmResult:
        """Describe a text of `num_tokens`, the first `num_cached` of which are in the cache.

        A chunk is there if its full blocks are.
        """
        tail = num_tokens % chunk_size
        lost = num_tokens % block_size
        ends = [*range(chunk_size, num_tokens + 1, chunk_size)]
        if tail >= _MIN_CHUNK_TOKENS and tail > lost:
            ends.append(num_tokens)
        aligned = lost < _MIN_CHUNK_TOKENS
        warning = f"the last {lost} tokens do not fill a block of {block_size} and are not cached"
        return cls(
            chunks_stored=sum(end // block_size * block_size <= num_cached for end in ends),
            token_count=num_tokens,
            chunk_size=chunk_size,
            chunk_boundary_aligned=aligned,
            partial_tail_tokens=tail,
            alignment_warning=None if aligned else warning,
        )

    @classmethod
    def of_chunks(
        cls,
        num_stored: int,
        stored_tokens: int,
        num_tokens: int,
        chunk_size: int,
        least_tokens: int,
    ) -> WarmResult:
        """Of documents of `num_tokens`, of which `num_stored` chunks with `stored_tokens` can be
        found; shorter ones than `least_tokens` never are.
        """
        lost = num_tokens - stored_tokens
        warning = (
            f"{lost} tokens are in chunks that cannot be found: shorter than "
            f"min_chunk_tokens={least_tokens}, or the pool is too small to keep them"
        )
        return cls(
            chunks_stored=num_stored,
            token_count=num_tokens,
            chunk_size=chunk_size,
            chunk_boundary_aligned=lost < _MIN_CHUNK_TOKENS,
            partial_tail_tokens=lost,
            alignment_warning=None if lost < _MIN_CHUNK_TOKENS else warning,
        )

    def __bool__(self) -> bool:
        return self.chunks_stored > 0

    def __int__(self) -> int:
        return self.chunks_stored

    def __index__(self) -> int:
        return self.chunks_stored

    def __eq__(self, other: object) -> bool:
        return self.chunks_stored == _number_of(other)

    def __lt__(self, other: object) -> bool:
        number = _number_of(other)
        return self.chunks_stored < number if isinstance(number, (int, float)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.chunks_stored)


def _number_of(other: object) -> object:
    return other.chunks_stored if isinstance(other, WarmResult) else other


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptCheck:
    """One prompt, run without and with the cache.

    Attributes:
        reused_tokens: prompt tokens the second run took from the cache, with mode chunk_kv_reuse
            those that it shared at other positions; 0 fails the check.
        max_logit_difference: largest absolute difference over the checked positions.
        relative_logit_l2: L2 norm of the difference over the norm of the cold logits.
        kl_divergence: largest KL(cold || warm) over the checked positions, of the distributions
            sampled from.
        mean_kl: the mean of it, of the model's own distributions.
        agreement: share of the checked positions at which both find the same token the most likely.
        text_equal: both runs gave the same tokens.
        problem: why it failed, else None.
    """

    prompt: str
    prompt_tokens: int
    reused_tokens: int
    max_logit_difference: float
    relative_logit_l2: float
    kl_divergence: float
    mean_kl: float
    agreement: float
    text_equal: bool
    cold_text: str
    warm_text: str
    problem: str | None

    @property
    def passed(self) -> bool:
        return self.problem is None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CorrectnessReport:
    """All checks of `verify_correctness`; truthy only if there is at least one and every one
    passed.

    Attributes:
        mode: what was compared with a full computation.
        logit_tolerance: relative L2 distance of the logits that rounding alone explains; 0: equal
            to the bit.
        kl_limit: with mode chunk_kv_reuse: largest allowed `mean_kl`, as much as another order of
            the documents changes; else None. There a check passes if it reused something and its
            answer is the same text.
    """

    checks: tuple[PromptCheck, ...]
    logit_tolerance: float
    mode: GenerationMode = GenerationMode.PREFIX_CACHE
    kl_limit: float | None = None

    @property
    def mean_kl(self) -> float:
        """Mean over the checks; 0 without any."""
        return sum(check.mean_kl for check in self.checks) / max(1, len(self.checks))

    @property
    def text_agreement(self) -> float:
        """Share of the checks whose answers are the same text; 0 without any."""
        return sum(check.text_equal for check in self.checks) / max(1, len(self.checks))

    @property
    def passed(self) -> bool:
        within = self.kl_limit is None or self.mean_kl <= self.kl_limit
        return bool(self.checks) and within and all(check.passed for check in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        lines = []
        for check in self.checks:
            verdict = "ok" if check.passed else f"FAILED: {check.problem}"
            lines.append(
                f"{check.reused_tokens}/{check.prompt_tokens} tokens reused, logits differ by "
                f"{check.max_logit_difference:.3g} (relative {check.relative_logit_l2:.3g}), KL "
                f"{check.kl_divergence:.3g} (mean {check.mean_kl:.3g}), {check.agreement:.0%} "
                f"agree, text {'equal' if check.text_equal else 'different'}: {verdict}"
            )
        if self.kl_limit is not None:
            equal = sum(check.text_equal for check in self.checks)
            lines.append(
                f"{equal} of {len(self.checks)} answers equal, mean KL {self.mean_kl:.3g}, at most "
                f"{self.kl_limit:.3g}: {'ok' if self.passed else 'FAILED'}"
            )
        return "\n".join(lines)
