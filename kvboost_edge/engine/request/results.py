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

_MIN_CHUNK_TOKENS = 32  # a shorter tail of a warmed text causes no warning


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities (natural logarithm) at one output token.

    Attributes:
        logprob: log probability of the token.
        top: (token id, log probability) of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Missed(NamedTuple):
    """The reason that no further prompt token was cached, see `GenerationResult`."""

    miss_reason: str
    evicted_from: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """The outcome of one request.

    Values of `miss_reason`, the reason that the first prompt token after the cached ones was
    computed:

    - "": every token was cached.
    - "first_seen": this tenant and salt never cached its block.
    - "evicted": its block was cached and evicted.
    - "tail": it is in the last block, which is not full.
    - "state": its KV is cached, but no snapshot of the recurrent state.
    - "bypassed": the mode or prompt_logprobs asked for a computation.
    - "not_started": the request ended while it waited.

    Attributes:
        mode: the mode that ran; CHUNK_KV_REUSE only if KV of other positions was reused.
        approximate: True if KV of other positions was reused. The output may then differ from a
            full computation.
        reused_span_tokens: prompt tokens whose KV was reused from other positions.
        recomputed_tokens: prompt tokens found at other positions and still recomputed.
        gate: quality gate of that reuse: "passed"; "unchecked" without a stored verdict; "off"
            (reuse_gate="off"); "" if nothing was reused.
        output_text: text without the EOS or stop token and without the stop string.
        output_token_ids: token ids of the output, with the EOS or stop token that ended it.
        generated_tokens: number of output tokens.
        finish_reason: "stop", "length", "cancelled" or "timeout" (past its deadline).
        cached_tokens: prompt tokens whose KV came from the cache: `exact_cached_tokens`, which
            `hit_tokens` splits by tier, and `reused_span_tokens`.
        matched_tokens: prompt tokens whose KV was in the cache. They exceed `exact_cached_tokens`
            if a snapshot of the recurrent state was missing.
        kv_reuse_ratio: cached_tokens / prompt_tokens.
        miss_reason: see above.
        evicted_from: the pool and tiers that evicted the block, nearest first; () unless "evicted".
        ttft_ms: time from the call to the first token, or the whole time without one.
        total_ms: time from the call to the end.
        tokens_per_sec: generated tokens over the whole time.
        token_times_ms: time from the call to each output token.
        phases: milliseconds of tokenize, queue, lookup, load, probe, repair, prefill and decode.
            Their sum is total_ms, and each is an attribute such as `queue_ms`. probe is the
            deviation scoring of reused spans, repair the prefill up to the end of the last span.
        seed: the seed that reproduces a sampled output.
        preemptions: number of times that the request lost its blocks and was recomputed.
        step_share: the request's share of the tokens of its steps, 0 to 1; a mean weighted by step
            time.
        drafted_tokens: draft tokens verified, see `EngineConfig.speculation`.
        accepted_tokens: draft tokens accepted.
        prompt_logprobs: one entry per prompt token, the first one None, because nothing predicts
            it; None if not requested.
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
        """Prompt tokens of the cached prefix, whose KV equals a full computation."""
        return self.cached_tokens - self.reused_span_tokens

    @property
    def computed_prompt_tokens(self) -> int:
        """Prompt tokens that were computed: neither cached nor reused from other positions."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def prompt_ms(self) -> float:
        """Time of the prompt: probe, repair and prefill."""
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
    """The outcome of `warm`. It compares, and tests as true, like the number `chunks_stored`.

    The start of prompts is counted in chunks of chunk_size tokens; a last chunk of at least 32
    tokens counts too. Documents, and a text for another position, are counted in the chunks that
    they were split into. Without a split, chunk_size is the length of the longest document.

    Attributes:
        chunks_stored: chunks in the cache now, including those cached before.
        token_count: tokens of the text or documents.
        chunk_size: tokens in a chunk.
        partial_tail_tokens: tokens after the last full chunk; for documents, tokens in chunks that
            cannot be found.
        chunk_boundary_aligned: True if fewer than 32 tokens at the end are not cached: those after
            the last full block, or the partial tail of documents.
        alignment_warning: message about these tokens, or None if aligned; `warm` logs it.
    """

    chunks_stored: int
    token_count: int
    chunk_size: int
    chunk_boundary_aligned: bool
    partial_tail_tokens: int
    alignment_warning: str | None

    @classmethod
    def of(cls, num_cached: int, num_tokens: int, chunk_size: int, block_size: int) -> WarmResult:
        """Describe a text of `num_tokens` tokens, the first `num_cached` of which are cached.

        A chunk counts as stored if its full blocks are cached.
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
        """Describe documents that are split into chunks.

        Args:
            num_stored: chunks that can be found.
            stored_tokens: tokens in these chunks.
            num_tokens: tokens of all documents.
            least_tokens: tokens of the shortest chunk that can be found.
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
        reused_tokens: prompt tokens that the second run took from the cache; with mode
            chunk_kv_reuse, those reused from other positions. 0 fails the check.
        max_logit_difference: largest absolute difference over the checked positions.
        relative_logit_l2: L2 norm of the difference over the norm of the logits without the cache.
        kl_divergence: largest KL(cold || warm) over the checked positions, of the distributions
            that tokens are drawn from.
        mean_kl: mean KL(cold || warm), of the model's own distributions.
        agreement: share of the checked positions with the same most likely token.
        text_equal: True if both runs gave the same tokens.
        problem: reason of a failure, or None.
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
    """All checks of `verify_correctness`. It is true if there are checks and all passed.

    Attributes:
        mode: the mode that was compared with a full computation.
        logit_tolerance: relative L2 distance of the logits that rounding alone explains; 0:
            bit-identical.
        kl_limit: largest allowed `mean_kl` with mode chunk_kv_reuse, else None. It is the change
            that another order of the documents causes. A check then passes if KV was reused and the
            answers have the same text.
    """

    checks: tuple[PromptCheck, ...]
    logit_tolerance: float
    mode: GenerationMode = GenerationMode.PREFIX_CACHE
    kl_limit: float | None = None

    @property
    def mean_kl(self) -> float:
        """Mean of `mean_kl` over the checks; 0 without checks."""
        return sum(check.mean_kl for check in self.checks) / max(1, len(self.checks))

    @property
    def text_agreement(self) -> float:
        """Share of the checks with equal answers; 0 without checks."""
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
