"""A sequence: the progress of one request, with its tokens, blocks, text and times."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.handle import RequestHandle, TokenEvent
from kvboost_edge.engine.request.request import Request
from kvboost_edge.engine.request.results import GenerationResult, Missed
from kvboost_edge.engine.sampling import make_sampler
from kvboost_edge.engine.schedule.feature import SequenceFeatures
from kvboost_edge.engine.schedule.output import OutputText, PhaseMarks, TokenScores
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens

if TYPE_CHECKING:
    from kvboost_edge.kvcache.block_table import BlockTable
    from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["Sequence", "SequenceStatus"]

Floats = npt.NDArray[np.float32]

_MAX_LOGPROB_ROWS = 64  # of a large vocabulary they are tens of megabytes


class SequenceStatus(enum.Enum):
    """WAITING holds no block (new or preempted), RUNNING has a block table, FINISHED holds none."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One request on its way. Its counter `num_computed_tokens` (KV in the pool) catches up with
    `num_tokens`.

    Example: a prompt of 40 tokens with 32 cached starts at num_computed_tokens 32. The step that
    computes tokens 32..39 samples token 40; num_tokens becomes 41, and the next step computes that
    token. Preemption sets the counter back to what the cache still holds when the sequence is
    admitted again; sampled tokens stay.

    Attributes:
        index, rank: the request's.
        table: the blocks, None unless RUNNING.
        num_charged_tokens: up to where its tokens count as served to its tenant (fairness).
        last_turn: when it was last chosen to compute its one pending token, counted over all
            sequences (fairness).
        blocked_at: the cache's `progress` at the last failed try to let it in; None: not tried.
        awaited_hash: the block it waits for, which another sequence computes.
        features: the features that take part in it, see `Feature`.
        drafting, grammar, spans: three of them.

    Where the table shares spans from other positions, the counter passes over each of them when it
    reaches it.
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
        self.missed = Missed("not_started")
        self.features = features or SequenceFeatures()
        # The ones that each step asks.
        self.drafting = self.features.drafting
        self.grammar = self.features.grammar
        self.spans = self.features.spans
        self.marks = PhaseMarks(request)
        self.scores = TokenScores(request)
        self._sample = make_sampler(request.params, request.seed, request.suppressed)
        self._output = OutputText(request, tokenizer)

    @property
    def tenant(self) -> bytes:
        return self.request.tenant

    @property
    def priority(self) -> int:
        return self.request.terms.priority

    @property
    def is_ready(self) -> bool:
        """True if it may take part in the next step, as far as its features know."""
        return self.grammar.is_ready and self.spans.is_ready

    @property
    def prepares(self) -> bool:
        """True if a feature computes something before the sequence's next tokens."""
        return self.spans.prepares

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens - self.spans.num_ahead

    @property
    def uses_cache(self) -> bool:
        return self.request.uses_cache

    @property
    def most_at_once(self) -> int:
        """Most tokens that one step may compute: fewer than pending where each needs logits."""
        wants_logprobs = (
            self.request.params.prompt_logprobs is not None and self.logits_from is not None
        )
        return min(self.num_pending, _MAX_LOGPROB_ROWS) if wants_logprobs else self.num_pending

    @property
    def logits_from(self) -> int | None:
        """The first token whose logits are still wanted; None: only those to sample from."""
        if self.request.logits_start is not None:
            return self.request.logits_start
        if self.request.params.prompt_logprobs is not None:
            return self.scores.prompt_logits_from
        return None

    @property
    def cacheable_ids(self) -> list[int]:
        """Tokens that the cache may serve when the sequence is admitted."""
        start = self.logits_from
        return self.token_ids if start is None else self.token_ids[: start + 1]

    @property
    def blocks(self) -> BlockTable:
        """The block table of a running sequence."""
        assert self.table is not None, "only a running sequence has blocks"
        return self.table

    def next_work(self, limit: int) -> list[ScheduledTokens[Sequence]]:
        """Return the next tokens to compute, at most `limit` (at least 1), an item for each stretch
        between spans.
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

    def finish(self) -> None:
        """End, and free what the features hold."""
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
        """Take the logits [num_rows, vocab_size] of computed tokens; return the finish reason, or
        None to go on.

        Rows whose next token is known are kept where they were asked for. Each other row samples a
        token, as long as the draft token after it is the same; tokens after a rejected draft token
        are ignored and do not count as computed.

        Args:
            largest: index of the largest logit of the first rows, as far as it is known.
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
                # A draft whose logits are not finite is computed once more as a certain token, and
                # refused then.
                if position >= certain and not (
                    self.token_ids[position] == work.token_ids[position - work.start]
                    and np.isfinite(rows[i].max())
                ):
                    break
                computed = position + 1
                reason = self.accept(rows[i], largest[i] if i < len(largest) else None)
                # Where the next mask takes long, the draft tokens that are left count as rejected.
                if reason is not None or not self.grammar.is_ready:
                    break
        self.drafting.count(work.num_drafted, computed - work.certain_stop)
        self.move_to(computed)
        return reason

    def move_to(self, position: int) -> None:
        """Take all before `position` as computed, and the spans that begin there."""
        self.num_computed_tokens = self.spans.pass_over(position)

    def look_up(self) -> None:
        """Note that the cache is asked now; the last time before the first admission counts."""
        if not self.was_admitted:
            self.marks.looked_up_at = time.perf_counter()

    def admit(self, table: BlockTable, missed: Missed) -> None:
        """Start or resume on a fresh table: what the cache served counts as computed.

        Args:
            missed: why the cache served no more.
        """
        self.table = table
        self.status = SequenceStatus.RUNNING
        for feature in self.features:
            feature.admit(table)
        self.move_to(table.num_cached_tokens)
        self.blocked_at = self.awaited_hash = None
        if not self.was_admitted:
            self.marks.admitted_at = time.perf_counter()
            self.handle.cached_tokens = self.num_cached_tokens = table.num_cached_tokens
            self.num_matched_tokens = table.num_matched_tokens
            bypassed = not self.uses_cache or self.logits_from is not None
            self.missed = Missed("bypassed") if bypassed else missed

    @property
    def was_admitted(self) -> bool:
        """Whether it was admitted before; after a preemption it may be waiting again."""
        return self.marks.admitted_at is not None

    def forget_computed(self) -> None:
        """Start over without blocks: KV is recomputed, and with it the requested logits.

        The list of logits stays the same object, because the caller holds it.
        """
        self.num_computed_tokens = 0
        for feature in self.features:
            feature.forget()
        self.scores.logits.clear()

    def accept(self, logits: Floats, largest: int | None) -> str | None:
        """Sample a token from the logits [vocab_size], append it and hand it out; return the
        finish reason, or None.
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
        """Return the output's text and its token ids without the one that ended it."""
        ids = self.token_ids[self.request.num_prompt_tokens :]
        return self._output.text, ids[:-1] if ids and ids[-1] in self.request.stop_ids else ids

    def result(self, finish_reason: str) -> GenerationResult:
        """Return the outcome as of now. The text is what was handed out: that of a cancelled
        request lacks the uncertain end.
        """
        request = self.request
        output_ids = tuple(self.token_ids[request.num_prompt_tokens :])
        phases = self.marks.phases(time.perf_counter(), self.features)
        total_ms = sum(phases.values())
        times = tuple((t - request.entered_at) * 1e3 for t in self.marks.token_times)
        cached = self.num_cached_tokens + self.spans.num_shared
        added: dict[str, Any] = {"mode": request.mode}
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
