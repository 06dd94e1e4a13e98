"""Results of calls. Times are in milliseconds since the start of the call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

from kvboost_edge.config import GenerationMode
from kvboost_edge.shareable import ALL_TOKENS

__all__ = [
    "CorrectnessReport",
    "DraftCounts",
    "GenerationResult",
    "MissReason",
    "PromptCheck",
    "TokenLogprobs",
    "WarmResult",
]

_MIN_CHUNK_TOKENS = 32  # an uncached tail shorter than this causes no warning


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities (natural logarithm) for one token position.

    Attributes:
        logprob: log probability of the token.
        top: pairs of token id and log probability for the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class DraftCounts(NamedTuple):
    """Counts of the drafts from one source.

    Attributes:
        num_drafts: number of drafts that were verified.
        drafted_tokens: number of draft tokens verified.
        accepted_by_position: number of drafts whose first, second and following tokens were
            accepted.
    """

    num_drafts: int = 0
    drafted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()

    @property
    def accepted_tokens(self) -> int:
        """Number of draft tokens accepted."""
        return sum(self.accepted_by_position)

    def plus(self, num_drafted: int, num_accepted: int) -> DraftCounts:
        """Return the counts with one more draft, of at least one token."""
        before = self.accepted_by_position
        before += (0,) * (num_accepted - len(before))
        return DraftCounts(
            self.num_drafts + 1,
            self.drafted_tokens + num_drafted,
            tuple(count + (place < num_accepted) for place, count in enumerate(before)),
        )


class MissReason(NamedTuple):
    """The reason that no further prompt tokens were cached, see `GenerationResult`."""

    miss_reason: str
    evicted_from: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """The result of one request.

    `miss_reason` tells why the first prompt token after the cached ones was computed:

    - "": every token was cached.
    - "first_seen": this tenant and salt never cached the token's block.
    - "evicted": the block was cached and then evicted.
    - "tail": the token is in the last block, which is not full or cannot be rewritten.
    - "private_tail": the token's KV depends on more than the tokens before it and is not shared,
      with arithmetic="wide" or prefill="sparse".
    - "state": the KV is cached, but a snapshot of the recurrent state is missing.
    - "bypassed": the mode or prompt_logprobs required a computation.
    - "not_started": the request ended while it was waiting.

    Attributes:
        mode: the mode that was used. CHUNK_KV_REUSE only if KV from other positions was reused.
        approximate: True if KV from other positions was reused, or if `approximations` is not
            empty. The output may then differ from a full computation.
        approximations: labels of the options that make this answer approximate, such as
            "wide_arithmetic" with arithmetic="wide", or "sparse_prefill" with prefill="sparse" if
            the prompt is long enough.
        reused_span_tokens: number of prompt tokens whose KV was reused from other positions.
        recomputed_tokens: number of prompt tokens that were found at other positions but
            recomputed.
        gate: quality gate status of the reuse. "passed", "unchecked" without a stored verdict,
            "off" with reuse_gate="off", or "" if nothing was reused.
        output_text: text without the EOS or stop token and without the stop string.
        output_token_ids: token ids of the output, including the EOS or stop token that ended it.
        generated_tokens: number of output tokens.
        finish_reason: "stop", "length", "cancelled" or "timeout" (the deadline passed).
        cached_tokens: number of prompt tokens whose KV came from the cache. This is the sum of
            `exact_cached_tokens`, which `hit_tokens` splits by tier, and `reused_span_tokens`.
        matched_tokens: number of prompt tokens whose KV was in the cache. It exceeds
            `exact_cached_tokens` if a snapshot of the recurrent state was missing.
        kv_reuse_ratio: cached_tokens / prompt_tokens.
        miss_reason: reason for the first cache miss, listed above.
        evicted_from: the pool and tiers that evicted the block, nearest first. Empty unless
            miss_reason is "evicted".
        ttft_ms: time from the call to the first token, or to the end if there was no token.
        total_ms: time from the call to the end.
        tokens_per_sec: generated tokens divided by the total time.
        token_times_ms: time from the call to each output token.
        phases: milliseconds of tokenize, queue, lookup, load, probe, repair, prefill and decode.
            They add up to total_ms, and each is also an attribute such as `queue_ms`. probe is the
            deviation scoring of reused spans. repair is the prefill up to the end of the last span.
        seed: seed that reproduces a sampled output.
        preemptions: number of times that the request lost its blocks and was recomputed.
        step_share: the request's mean share of the tokens in its steps, 0 to 1, weighted by step
            time.
        drafted_tokens: number of draft tokens verified, see `EngineConfig.speculation`.
        accepted_tokens: number of draft tokens accepted.
        drafts: counts of the drafts by source: "lookup", "grammar", "draft_model" and "mtp".
        reasoning_tokens: number of output tokens between the markers of the model's reasoning,
            without a reasoning_budget_message. None without a reasoning_budget, because the engine
            then does not parse reasoning.
        prompt_logprobs: one entry per prompt token, or None if not requested. The first entry is
            None, because nothing predicts the first token.
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
    drafts: Mapping[str, DraftCounts] = dataclasses.field(default_factory=dict)
    matched_tokens: int = 0
    reasoning_tokens: int | None = None
    approximations: tuple[str, ...] = ()

    @property
    def approximate(self) -> bool:
        return self.reused_span_tokens > 0 or bool(self.approximations)

    @property
    def exact_cached_tokens(self) -> int:
        """Number of prompt tokens in the cached prefix, whose KV equals a full computation."""
        return self.cached_tokens - self.reused_span_tokens

    @property
    def computed_prompt_tokens(self) -> int:
        """Number of prompt tokens that were computed instead of cached or reused."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def prompt_ms(self) -> float:
        """Milliseconds spent on the prompt in the phases probe, repair and prefill."""
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
    """The result of `warm`, which compares like the number `chunks_stored`.

    A text at the start of prompts is counted in chunks of chunk_size tokens. A last chunk counts if
    it has at least 32 tokens. Documents and text for another position are counted in the chunks
    they were split into. If they were not split, chunk_size is the length of the longest document.

    Attributes:
        chunks_stored: number of chunks in the cache now, including those cached before.
        token_count: number of tokens in the text or documents.
        chunk_size: number of tokens in a chunk.
        partial_tail_tokens: number of tokens after the last full chunk. For documents, the number
            of tokens in chunks that cannot be found.
        chunk_boundary_aligned: True if fewer than 32 tokens are uncached, counting tokens after the
            last full block that is shared, or the partial tail of documents.
        alignment_warning: message about these tokens, or None if aligned. `warm` logs it.
    """

    chunks_stored: int
    token_count: int
    chunk_size: int
    chunk_boundary_aligned: bool
    partial_tail_tokens: int
    alignment_warning: str | None

    @classmethod
    def of(
        cls,
        num_cached: int,
        num_tokens: int,
        chunk_size: int,
        block_size: int,
        num_shareable: int = ALL_TOKENS,
    ) -> WarmResult:
        """Describe a text whose first `num_cached` of `num_tokens` tokens are cached.

        A chunk counts as stored if its full blocks are cached. Up to 31 tokens at the end of the
        text may be missing because their KV is not shared.

        Args:
            num_shareable: number of leading tokens whose KV is shared, see `shareable_end`.
        """
        tail = num_tokens % chunk_size
        last = num_tokens // block_size * block_size
        shared = min(last, num_shareable)
        lost = num_tokens - shared
        ends = [*range(chunk_size, num_tokens + 1, chunk_size)]
        if tail >= _MIN_CHUNK_TOKENS and tail > num_tokens - last:
            ends.append(num_tokens)
        full = [end // block_size * block_size for end in ends]
        aligned = lost < _MIN_CHUNK_TOKENS
        warning = f"the last {lost} tokens do not fill a block of {block_size} and are not cached"
        if shared < last:
            warning = (
                f"the last {lost} tokens are not cached: with the engine's approximate options, "
                "their KV depends on more than the text"
            )
        return cls(
            chunks_stored=sum(
                min(end, shared) <= num_cached and end - shared < _MIN_CHUNK_TOKENS for end in full
            ),
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
        """Describe documents that are split into chunks.

        Args:
            num_stored: number of chunks that can be found.
            stored_tokens: number of tokens in these chunks.
            num_tokens: number of tokens in all documents.
            least_tokens: minimum length in tokens of a chunk that can be found.
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
    """The comparison of one prompt without and with the cache.

    Attributes:
        reused_tokens: number of prompt tokens that the second run took from the cache. With mode
            chunk_kv_reuse, only tokens reused from other positions count. 0 fails the check.
        max_logit_difference: largest absolute logit difference over the checked positions.
        relative_logit_l2: L2 norm of the difference divided by the norm of the uncached logits.
        kl_divergence: largest KL(cold || warm) over the checked positions, for the distributions
            that tokens are sampled from.
        mean_kl: mean KL(cold || warm) of the model's unmodified distributions.
        agreement: share of the checked positions with the same most likely token.
        text_equal: True if both runs generated the same tokens.
        problem: reason why the check failed, or None.
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
    """All checks of `verify_correctness`. The report is true if it has checks and all passed.

    Attributes:
        mode: the mode that was compared with a full computation.
        logit_tolerance: relative L2 distance of logits that rounding can cause. 0 requires
            bit-identical logits.
        kl_limit: maximum `mean_kl` for mode chunk_kv_reuse, else None. It is the change that
            reordering the documents causes. A check then passes if KV was reused and the answers
            have the same text.
    """

    checks: tuple[PromptCheck, ...]
    logit_tolerance: float
    mode: GenerationMode = GenerationMode.PREFIX_CACHE
    kl_limit: float | None = None

    @property
    def mean_kl(self) -> float:
        """Mean of `mean_kl` over the checks, or 0 without checks."""
        return sum(check.mean_kl for check in self.checks) / max(1, len(self.checks))

    @property
    def text_agreement(self) -> float:
        """Share of the checks with equal answers, or 0 without checks."""
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
