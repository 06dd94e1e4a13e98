"""The progress of one request, with its tokens, blocks, text and times."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.handle import RequestHandle, TokenEvent
from kvboost_edge.engine.request.request import Request
from kvboost_edge.engine.request.results import GenerationResult, MissReason
from kvboost_edge.engine.samplers.sampling import make_sampler
from kvboost_edge.engine.schedule.feature import SequenceFeatures
from kvboost_edge.engine.schedule.output import OutputText, PhaseMarks, TokenScores
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens

if TYPE_CHECKING:
    from kvboost_edge.kvcache.block_table import BlockTable
    from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["Sequence", "SequenceStatus"]

Floats = npt.NDArray[np.float32]

_MAX_LOGPROB_ROWS = 64  # rows of logits per step; tens of MB with a large vocabulary


class SequenceStatus(enum.Enum):
    """The status of a sequence. Only RUNNING sequences have a block table.

    WAITING sequences are new or preempted.
    """

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """A request in progress, whose `num_computed_tokens` catches up with `num_tokens`.

    Example: a prompt of 40 tokens with 32 cached starts at num_computed_tokens 32. The step that
    computes tokens 32..39 samples token 40. num_tokens becomes 41, and the next step computes that
    token. After a preemption, num_computed_tokens is reset to the number of tokens still cached.
    Sampled tokens are kept.

    When num_computed_tokens reaches a span from another position, it skips the span.

    Attributes:
        index: the request's index.
        rank: the request's rank.
        table: block table, or None unless RUNNING.
        num_charged_tokens: number of tokens charged to the tenant for fairness.
        last_turn: number of the sequence's last decoding turn, counted over all sequences. Used for
            fairness.
        blocked_at: the cache's `progress` at the last failed admission, or None.
        awaited_hash: hash of the block that another sequence or a prefetch will bring, or None.
        features: optional features of the sequence, see `Feature`.
        drafting: speculative decoding.
        grammar: structured output, and a reasoning budget around it.
        spans: non-prefix KV reuse.
        prefill: exact or sparse computation of the prompt.
    """

    def __init__(
        self,
        request: Request,
        handle: RequestHandle,
        tokenizer: Tokenizer,
        features: SequenceFeatures | None = None,
    ) -> None:
        self.request = request
        self.index = request.index
        self.rank = request.rank
        self.handle = handle
        self.status = SequenceStatus.WAITING
        self.token_ids = list(request.prompt_ids)
        self.table: BlockTable | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_matched_tokens = 0
        self.num_charged_tokens = 0
        self.preemptions = 0
        self.last_turn = -1
        self.blocked_at: int | None = None
        self.awaited_hash: bytes | None = None
        self.missed = MissReason("not_started")
        self.features = features or SequenceFeatures()
        # These features are used in every step, so keep direct references.
        self.drafting = self.features.drafting
        self.grammar = self.features.grammar
        self.spans = self.features.spans
        self.prefill = self.features.prefill
        self.marks = PhaseMarks(request)
        self.scores = TokenScores(request)
        self._sample = make_sampler(
            request.params,
            request.seed,
            request.suppressed,
            stop_ids=request.stop_ids,
            words=request.words,
        )
        self._output = OutputText(request, tokenizer)

    @property
    def tenant(self) -> bytes:
        return self.request.tenant

    @property
    def priority(self) -> int:
        """The priority level, which is higher for background requests than for all others."""
        return self.request.terms.level

    @property
    def is_background(self) -> bool:
        return self.request.terms.background is not None

    @property
    def needs_idle(self) -> bool:
        """True for a background request that runs only while no other request runs."""
        return self.request.terms.background == "idle"

    @property
    def is_ready(self) -> bool:
        """True if its features allow the sequence in the next step."""
        return self.grammar.is_ready and self.spans.is_ready

    @property
    def prepares(self) -> bool:
        """True if a feature must compute something before the sequence's next tokens."""
        return self.spans.prepares

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Number of tokens whose KV is not computed yet. 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens - self.spans.num_ahead

    @property
    def num_due(self) -> int:
        """Number of tokens left to score while the sequence prepares, otherwise `num_pending`."""
        probe = self.spans.probe
        return self.num_pending if probe is None else probe.num_left

    @property
    def decodes(self) -> bool:
        """True if the sequence lacks one token, so that its next step samples another."""
        return self.num_pending == 1 and not self.prepares

    @property
    def uses_cache(self) -> bool:
        return self.request.uses_cache

    @property
    def most_at_once(self) -> int:
        """Maximum number of tokens per step, limited further if each token needs logits.

        They are tokens to score while the sequence prepares.
        """
        wants_logprobs = (
            self.request.params.prompt_logprobs is not None and self.logits_from is not None
        )
        return min(self.num_due, _MAX_LOGPROB_ROWS) if wants_logprobs else self.num_due

    @property
    def logits_from(self) -> int | None:
        """Index of the first token whose logits are needed, or None for only the last token."""
        if self.request.logits_start is not None:
            return self.request.logits_start
        if self.request.params.prompt_logprobs is not None:
            return self.scores.prompt_logits_from
        return None

    @property
    def cacheable_ids(self) -> list[int]:
        """Tokens that may be served from the cache at admission."""
        # At least one more token is always computed.
        end = self.request.num_shareable + 1
        start = self.logits_from
        if start is not None:
            end = min(end, self.prefill.query_block_start(start) + 1)
        return self.token_ids if end >= len(self.token_ids) else self.token_ids[:end]

    @property
    def blocks(self) -> BlockTable:
        """The block table of a running sequence."""
        assert self.table is not None, "only a running sequence has blocks"
        return self.table

    def next_work(self, limit: int) -> list[ScheduledTokens[Sequence]]:
        """Return the next tokens to compute, with one item for each run between spans.

        Args:
            limit: maximum number of tokens, at least 1.
        """
        start = self.num_computed_tokens
        left = min(limit, self.most_at_once)
        found = []
        wanted = self.logits_from
        for first, end in (*self.spans.ahead(), (len(self.token_ids), 0)):
            stop = min(first, start + left)
            if stop > start:
                rows = 1 if wanted is None else max(1, stop - max(start, wanted))
                drafted = self.drafting.tokens if stop == len(self.token_ids) else []
                ids = self.token_ids[start:stop] + drafted
                found.append(ScheduledTokens(self, start, ids, rows + len(drafted), len(drafted)))
            left -= stop - start
            if left == 0:
                break
            start = end
        return found

    def whole_query_blocks(self, count: int) -> int:
        """Return how many tokens a step computes if it has room for `count`; see `Prefill`."""
        return self.prefill.whole_query_blocks(self.num_computed_tokens, count)

    def finish(self) -> None:
        """End the sequence and free its features' resources."""
        self.status = SequenceStatus.FINISHED
        for feature in self.features:
            feature.release()

    def stop_after(self, count: int) -> int:
        """Return the position after the next `count` tokens to compute."""
        if not self.spans.num_ahead:
            return self.num_computed_tokens + count
        return self.next_work(count)[-1].stop

    def take(
        self, work: ScheduledTokens[Sequence], rows: Floats, largest: Several[int] = ()
    ) -> str | None:
        """Process the logits of computed tokens and sample the next tokens.

        Rows of known tokens are stored if the request wants them. Each later row samples a token.
        Sampling stops after the first token that differs from the draft token. Rejected draft
        tokens do not count as computed.

        Args:
            work: the computed tokens.
            rows: logits [num_rows, vocab_size].
            largest: index of the largest logit for the leading rows where it is known.

        Returns:
            The finish reason, or None if the sequence continues.
        """
        computed = work.stop
        reason = None
        first = computed - len(rows)
        self.scores.keep_logits(first, rows)
        if self.scores.read_prompt(first, rows) and self.handle.prompt_logprobs is None:
            self.handle.prompt_logprobs = self.scores.prompt
        if self.request.prefill_only or self.request.logits_start is not None:
            reason = "length" if computed == len(self.token_ids) else None
        else:
            certain = work.certain_stop
            for position in range(max(first, len(self.token_ids) - 1), computed):
                i = position - first
                # Recompute a draft token with non-finite logits as a certain token. If its logits
                # are still non-finite, the request fails.
                if position >= certain and not (
                    self.token_ids[position] == work.token_ids[position - work.start]
                    and np.isfinite(rows[i].max())
                ):
                    break
                computed = position + 1
                reason = self.accept(rows[i], largest[i] if i < len(largest) else None)
                # Reject the remaining draft tokens rather than wait for a slow mask.
                if reason is not None or not self.grammar.is_ready:
                    break
        self.drafting.count(work.num_drafted, computed - work.certain_stop)
        self.move_to(computed)
        return reason

    def move_to(self, position: int) -> None:
        """Count all tokens before `position` as computed, and skip spans that begin there."""
        self.num_computed_tokens = self.spans.pass_over(position)

    def look_up(self) -> None:
        """Record the time of a cache lookup. The last one before the first admission counts."""
        if not self.was_admitted:
            self.marks.looked_up_at = time.perf_counter()

    def admit(self, table: BlockTable, missed: MissReason) -> None:
        """Start or resume on a new block table. Its cached tokens count as computed.

        If a feature raises an error, the sequence keeps waiting without the table.

        Args:
            missed: reason why no further tokens were cached.
        """
        for feature in self.features:
            feature.admit(table)
        self.move_to(table.num_cached_tokens)
        self.blocked_at = self.awaited_hash = None
        if not self.was_admitted:
            self.marks.admitted_at = time.perf_counter()
            self.handle.cached_tokens = self.num_cached_tokens = table.num_cached_tokens
            self.num_matched_tokens = table.num_matched_tokens
            bypassed = not self.uses_cache or self.logits_from is not None
            self.missed = MissReason("bypassed") if bypassed else missed
        self.table = table
        self.status = SequenceStatus.RUNNING

    @property
    def was_admitted(self) -> bool:
        """True after the first admission, even while the sequence waits after a preemption."""
        return self.marks.admitted_at is not None

    def forget_computed(self) -> None:
        """Reset progress after blocks are freed. KV and requested logits will be recomputed."""
        self.num_computed_tokens = 0
        for feature in self.features:
            feature.forget()
        self.scores.logits.clear()  # cleared in place, because the caller holds this list

    def accept(self, logits: Floats, largest: int | None) -> str | None:
        """Sample a token, append it and send it to the handle.

        Args:
            logits: float32 [vocab_size].
            largest: index of the largest logit, if known.

        Returns:
            The finish reason, or None if the sequence continues.
        """
        request = self.request
        possible, largest = self.grammar.constrain(logits, largest)
        token_id = self._sample(possible, self.token_ids, request.num_prompt_tokens, largest)
        logprobs = self.scores.note_chosen(logits, token_id)
        self.token_ids.append(token_id)
        is_whole = self.grammar.advance(token_id)
        is_last = len(self.token_ids) >= request.max_tokens
        text, reason = self._output.push(token_id, is_whole=is_whole, is_last=is_last)
        self.marks.token_times.append(now := time.perf_counter())
        self.handle._push(TokenEvent(token_id, text, (now - request.entered_at) * 1e3, logprobs))
        return reason

    def answer(self) -> tuple[str, list[int]]:
        """Return the output's text and its token ids without a final stop token."""
        ids = self.token_ids[self.request.num_prompt_tokens :]
        return self._output.text, ids[:-1] if ids and ids[-1] in self.request.stop_ids else ids

    def result(self, finish_reason: str) -> GenerationResult:
        """Return the result so far, with the text that was sent to the handle.

        The text of a cancelled request lacks the part that could still have changed.
        """
        request = self.request
        output_ids = tuple(self.token_ids[request.num_prompt_tokens :])
        phases = self.marks.phases(time.perf_counter(), self.features)
        total_ms = sum(phases.values())
        times = tuple((t - request.entered_at) * 1e3 for t in self.marks.token_times)
        cached = self.num_cached_tokens + self.spans.num_shared
        added: dict[str, Any] = {"mode": request.mode, "approximations": request.approximations}
        for feature in self.features:
            added.update(feature.result_fields())
        return GenerationResult(
            prompt=request.prompt,
            output_text=self._output.text,
            output_token_ids=output_ids,
            generated_tokens=len(output_ids),
            finish_reason=finish_reason,
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=cached,
            kv_reuse_ratio=cached / request.num_prompt_tokens,
            matched_tokens=self.num_matched_tokens,
            **self.missed._asdict(),
            ttft_ms=times[0] if times else total_ms,
            total_ms=total_ms,
            tokens_per_sec=len(output_ids) / total_ms * 1e3,
            token_times_ms=times,
            phases=phases,
            logprobs=self.scores.chosen,
            seed=request.seed,
            preemptions=self.preemptions,
            step_share=self.marks.step_share,
            prompt_logprobs=self.scores.prompt,
            **added,
        )
