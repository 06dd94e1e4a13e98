"""The running state of one request: its tokens, its blocks, its text, its clock."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.handle import RequestHandle, TokenEvent
from kvboost_edge.engine.request.request import Request
from kvboost_edge.engine.request.results import GenerationResult, Missed, TokenLogprobs
from kvboost_edge.engine.sampling import make_sampler, token_logprobs
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens
from kvboost_edge.reuse.probe import Probe
from kvboost_edge.reuse.remembered import Chain
from kvboost_edge.text.detokenizer import IncrementalDetokenizer
from kvboost_edge.text.stop_strings import StopChecker

if TYPE_CHECKING:
    from kvboost_edge.engine.grammar.constraint import Structure
    from kvboost_edge.engine.spec_decode.drafting import Drafter
    from kvboost_edge.kvcache.block_table import BlockTable
    from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["Loaded", "Sequence", "SequenceStatus", "phase_times"]

Floats = npt.NDArray[np.float32]

_MAX_LOGPROB_ROWS = 64  # of a large vocabulary they are tens of megabytes


def phase_times(
    request: Request,
    now: float,
    *,
    looked_up: float | None,
    admitted: float | None,
    repaired: float | None,
    first_token: float | None,
    load_seconds: float,
    probe_seconds: float,
) -> dict[str, float]:
    """Milliseconds between the marks of a request's life, seconds of `time.perf_counter`; a mark
    that was never reached takes the next one's time.
    """
    first = now if first_token is None else first_token
    let_in = first if admitted is None else admitted
    looked = let_in if admitted is None or looked_up is None else looked_up
    probed = let_in + probe_seconds
    whole = min(max(repaired or probed, probed), max(first, probed))
    return {
        "tokenize": (request.tokenized_at - request.entered_at) * 1e3,
        "queue": (looked - request.tokenized_at - load_seconds) * 1e3,
        "lookup": (let_in - looked) * 1e3,
        "load": load_seconds * 1e3,
        "probe": probe_seconds * 1e3,
        "repair": (whole - probed) * 1e3,
        "prefill": (first - whole) * 1e3,
        "decode": (now - first) * 1e3,
    }


class Loaded:
    """Tokens by tier, and how long that took.

    seconds   of all loads, one after another
    """

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self.seconds = 0.0

    def note(self, tokens: Mapping[str, int], seconds: float) -> None:
        """So many tokens came from tiers, by name."""
        self._tokens.update(tokens)
        self.seconds += seconds

    def split(self, num_cached: int) -> dict[str, int]:
        """Cached tokens by the tier that had them. Of a block that was cached to its end the last
        token may have to be computed, and what arrived may have been dropped again before it was
        taken.
        """
        rest = num_cached
        found = {}
        for tier, count in self._tokens.items():
            found[tier] = min(count, rest)
            rest -= found[tier]
        return {"pool": rest, **found}


class SequenceStatus(enum.Enum):
    """WAITING holds no block (new or preempted), RUNNING holds a block table, FINISHED holds
    none.
    """

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One counter drives everything: `num_computed_tokens` (KV in the pool) catches up with
    `num_tokens`.

    Example: a prompt of 40 tokens with 32 cached starts at num_computed_tokens 32; the step that
    computes tokens 32..39 samples token 40, num_tokens becomes 41, and the next step computes that
    one. Preemption sets the counter back to what the cache still holds when the sequence is let in
    again; sampled tokens stay.

    index, tenant, priority, rank    the request's
    table           the blocks, None unless RUNNING
    num_charged_tokens    up to where its tokens count as served to its tenant (fairness)
    last_turn       when it was last chosen to compute its one pending token, counted over all
                    sequences (fairness)
    blocked_at      the cache's `progress` at the last failed try to let it in; None: not tried
    awaited_hash    the block it waits for, which another sequence computes
    has_loaded      tiers were asked since it last lost its blocks
    lost_runs       what they are still to be asked for of its runs, last first; None: not looked
                    for yet
    found           [start, stop) of the runs found at other positions, when it was let in
    num_span_tokens, num_found_tokens   prompt tokens shared there, and in all those runs
    drafter         proposes drafts; None: it has none
    structure       what its answer has to fit; None: nothing
    drafted         what the next step computes behind its last token
    probe           looks at its spans first: until it is done nothing else is computed

    Where its table shares spans at other positions the counter passes over each of them when it
    gets there.
    """

    def __init__(
        self,
        request: Request,
        handle: RequestHandle,
        tokenizer: Tokenizer,
        drafter: Drafter | None = None,
        structure: Structure | None = None,
    ) -> None:
        self.request = request
        self.index = request.index
        self.tenant = request.tenant
        self.priority = request.priority
        self.rank = request.rank
        self.drafter = drafter
        self.structure = structure
        self.drafted: list[int] = []
        self.num_drafted = self.num_accepted = 0
        self.handle = handle
        self.status = SequenceStatus.WAITING
        self.token_ids = list(request.prompt_ids)
        self.table: BlockTable | None = None
        self.num_computed_tokens = self.num_cached_tokens = self.num_charged_tokens = (
            self.num_matched_tokens
        ) = 0
        self.preemptions = 0
        self.last_turn = -1
        self.blocked_at: int | None = None
        self.awaited_hash: bytes | None = None
        self.has_loaded = False
        self.lost_runs: list[Chain] | None = None
        self.num_span_tokens = self.num_found_tokens = 0
        self.found: list[tuple[int, int]] = []
        self.probe: Probe | None = None
        self._probe_seconds = 0.0
        self._repaired_at: float | None = None
        self._spans: list[tuple[int, int]] = []  # [start, stop) of those ahead, last first
        self._num_shared = 0  # their tokens
        self.looked_up_at: float | None = None
        self.admitted_at: float | None = None
        self.missed = Missed("not_started")
        self.logits: list[Floats] = []
        self._sample = make_sampler(request.params, request.seed, request.suppressed)
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopChecker(request.params.stop)
        self._text: list[str] = []
        self._token_times: list[float] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._loaded = Loaded()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens - self._num_shared

    @property
    def uses_cache(self) -> bool:
        return self.request.uses_cache

    @property
    def most_at_once(self) -> int:
        """Most tokens one step may compute: all pending ones, fewer where each needs logits of its
        own.
        """
        wants_logprobs = (
            self.request.params.prompt_logprobs is not None and self.logits_from is not None
        )
        return min(self.num_pending, _MAX_LOGPROB_ROWS) if wants_logprobs else self.num_pending

    @property
    def logits_from(self) -> int | None:
        """The first token whose logits are still wanted; None: only those that the next token is
        sampled from.
        """
        if self.request.logits_start is not None:
            return self.request.logits_start
        if self.request.params.prompt_logprobs is not None:
            known = len(self._prompt_logprobs)
            return known - 1 if known < self.request.num_prompt_tokens else None
        return None

    @property
    def cacheable_ids(self) -> list[int]:
        """Tokens that may be served by the cache when the sequence is let in."""
        start = self.logits_from
        return self.token_ids if start is None else self.token_ids[: start + 1]

    @property
    def blocks(self) -> BlockTable:
        """The block table of a running sequence."""
        assert self.table is not None, "only a running sequence has blocks"
        return self.table

    def next_work(self, limit: int) -> list[ScheduledTokens[Sequence]]:
        """The next tokens to compute, `limit` at most (at least 1); an item for each stretch
        between spans.
        """
        start = self.num_computed_tokens
        left = min(limit, self.most_at_once)
        found = []
        wanted = self.logits_from
        for first, end in (*reversed(self._spans), (len(self.token_ids), 0)):
            stop = min(first, start + left)
            if stop > start:
                rows = 1 if wanted is None else max(1, stop - max(start, wanted))
                drafted = self.drafted if stop == len(self.token_ids) else []
                ids = self.token_ids[start:stop] + drafted
                found.append(ScheduledTokens(self, start, ids, rows + len(drafted), len(drafted)))
            left -= stop - start
            if left == 0:
                break
            start = end
        return found

    def stop_after(self, count: int) -> int:
        """The position behind the next `count` tokens to compute, as many as there are at least."""
        if not self._spans:
            return self.num_computed_tokens + count
        return self.next_work(count)[-1].stop

    def take(
        self, work: ScheduledTokens[Sequence], rows: Floats, largest: Several[int] = ()
    ) -> str | None:
        """Take the logits [num_rows, vocab_size] of computed tokens: the finish reason, or None to
        go on.

        A row whose next token is known is kept where it was asked for. Of the others each samples
        one token, as long as the work had that same token next: what was computed behind another
        one is ignored, and not counted as computed. largest: where the largest logit is in the
        first of the rows, as far as that is known.
        """
        computed = work.stop
        reason = None
        first = computed - len(rows)
        self._keep(first, rows)
        self.read_prompt(first, rows)
        if self.request.prefill_only or self.request.logits_start is not None:
            reason = "length" if computed == len(self.token_ids) else None
        else:
            certain = computed - work.num_drafted
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
                if reason is not None:
                    break
        self.drafted = []
        if work.num_drafted:
            self.num_drafted += work.num_drafted
            self.num_accepted += computed - work.certain_stop
        self._move_to(computed)
        return reason

    def end_probe(self, seconds: float) -> None:
        """Its spans are what they are now; go on."""
        self.probe = None
        self._probe_seconds += seconds
        self._take_spans(self.blocks)

    def _take_spans(self, table: BlockTable) -> None:
        self._spans = [(span.start, span.stop) for span in reversed(table.spans)]
        self._num_shared = sum(stop - start for start, stop in self._spans)
        shared = self._num_in_prompt(self._spans)
        # One token that leans on a span makes the answer approximate: what was shared before a
        # preemption counts.
        if self.probe is None and shared > self.num_span_tokens:
            self.num_span_tokens, self.num_found_tokens = shared, self._num_in_prompt(self.found)
        self._move_to(table.num_cached_tokens)

    def _num_in_prompt(self, ranges: Iterable[tuple[int, int]]) -> int:
        last = self.request.num_prompt_tokens
        return sum(max(0, min(stop, last) - start) for start, stop in ranges)

    def _move_to(self, position: int) -> None:
        """All before `position` is in the pool; the spans that begin there are too."""
        while self._spans and self._spans[-1][0] == position:
            start, position = self._spans.pop()
            self._num_shared -= position - start
            self._repaired_at = time.perf_counter()
        self.num_computed_tokens = position

    def _keep(self, first: int, rows: Floats) -> None:
        """Keep the rows of a request for logits; they belong to positions first, first + 1, ..."""
        if self.request.logits_start is not None:
            wanted = rows[max(0, self.request.logits_start - first) :]
            if len(wanted):
                self.logits.append(wanted.copy())

    def look_up(self) -> None:
        """The cache is asked for the tokens now; the last time before the sequence is let in
        counts.
        """
        if self.admitted_at is None:
            self.looked_up_at = time.perf_counter()

    def admit(self, table: BlockTable, missed: Missed) -> None:
        """Start or resume on a fresh table; what the cache served counts as computed, `missed` is
        why no more was.
        """
        self.table = table
        self.status = SequenceStatus.RUNNING
        self._take_spans(table)
        self.blocked_at = self.awaited_hash = None
        if self.admitted_at is None:
            self.admitted_at = time.perf_counter()
            self.handle.cached_tokens = self.num_cached_tokens = table.num_cached_tokens
            self.num_matched_tokens = table.num_matched_tokens
            bypassed = not self.uses_cache or self.logits_from is not None
            self.missed = Missed("bypassed") if bypassed else missed

    def forget_computed(self) -> None:
        """The blocks are gone: KV is computed anew, and with it the logits that were asked for. The
        list itself stays, the caller holds it.
        """
        self.num_computed_tokens = self._num_shared = 0
        self._spans.clear()
        self.probe = None
        self.has_loaded = False
        self.logits.clear()

    def note_loaded(self, tokens: Mapping[str, int], seconds: float) -> None:
        """So many tokens came from tiers, by name, while the sequence waited."""
        if self.admitted_at is None:
            self._loaded.note(tokens, seconds)

    def read_prompt(self, first: int, logits: Floats) -> None:
        """Take the logits [num_tokens, vocab_size] of tokens first, first + 1, ...: each predicts
        the one after it.
        """
        count = self.request.params.prompt_logprobs
        if count is None:
            return
        known = self._prompt_logprobs
        for row in logits[len(known) - 1 - first :]:
            if len(known) == self.request.num_prompt_tokens:
                break
            known.append(token_logprobs(row, self.token_ids[len(known)], count))
        if len(known) == self.request.num_prompt_tokens and self.handle.prompt_logprobs is None:
            self.handle.prompt_logprobs = tuple(known)

    def accept(self, logits: Floats, largest: int | None) -> str | None:
        """Take the logits [vocab_size] of the last token: sample, append, hand out. The finish
        reason, or None.
        """
        request = self.request
        possible = logits
        if self.structure is not None:
            possible = self.structure.masked(logits)
            largest = None
        token_id = self._sample(possible, self.token_ids, request.num_prompt_tokens, largest)
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = token_logprobs(logits, token_id, request.params.logprobs)
            self._logprobs.append(logprobs)
        self.token_ids.append(token_id)
        is_whole = self.structure is not None and self.structure.advance(token_id)
        text, reason = self._read(token_id, is_whole)
        now = time.perf_counter()
        self._token_times.append(now)
        self._text.append(text)
        self.handle._push(TokenEvent(token_id, text, (now - request.entered_at) * 1e3, logprobs))
        return reason

    def _read(self, token_id: int, is_whole: bool) -> tuple[str, str | None]:
        """The text that is certain now, and why the output ends with this token (None: it goes on).
        is_whole: nothing can follow.
        """
        if token_id in self.request.stop_ids:
            text, stopped = self._stops.push(self._detokenizer.flush())
            return (text if stopped else text + self._stops.flush()), "stop"
        text, stopped = self._stops.push(self._detokenizer.push(token_id))
        if stopped:
            return text, "stop"
        if len(self.token_ids) < self.request.max_tokens and not is_whole:
            return text, None
        rest, stopped = self._stops.push(self._detokenizer.flush())
        if stopped:
            return text + rest, "stop"
        return text + rest + self._stops.flush(), "stop" if is_whole else "length"

    def answer(self) -> tuple[str, list[int]]:
        """The output's text, and the ids it was written with: without the token that ended it."""
        ids = self.token_ids[self.request.num_prompt_tokens :]
        return "".join(self._text), ids[:-1] if ids and ids[-1] in self.request.stop_ids else ids

    def result(self, finish_reason: str) -> GenerationResult:
        """The outcome as of now. The text is what was handed out: a cancelled request keeps back
        what was uncertain.
        """
        request = self.request
        output_ids = tuple(self.token_ids[request.num_prompt_tokens :])
        phases = phase_times(
            request,
            time.perf_counter(),
            looked_up=self.looked_up_at,
            admitted=self.admitted_at,
            repaired=self._repaired_at,
            first_token=self._token_times[0] if self._token_times else None,
            load_seconds=self._loaded.seconds,
            probe_seconds=self._probe_seconds,
        )
        total_ms = sum(phases.values())
        times = tuple((t - request.entered_at) * 1e3 for t in self._token_times)
        return GenerationResult(
            mode=self._mode(),
            prompt=request.prompt,
            output_text="".join(self._text),
            output_token_ids=output_ids,
            generated_tokens=len(output_ids),
            finish_reason=finish_reason,
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            kv_reuse_ratio=(self.num_cached_tokens + self.num_span_tokens)
            / request.num_prompt_tokens,
            hit_tokens=self._loaded.split(self.num_cached_tokens),
            matched_tokens=self.num_matched_tokens,
            **self.missed._asdict(),
            ttft_ms=times[0] if times else total_ms,
            total_ms=total_ms,
            tokens_per_sec=len(output_ids) / total_ms * 1e3,
            token_times_ms=times,
            phases=phases,
            logprobs=None if request.params.logprobs is None else tuple(self._logprobs),
            seed=request.seed,
            preemptions=self.preemptions,
            prompt_logprobs=None
            if request.params.prompt_logprobs is None
            else tuple(self._prompt_logprobs),
            reused_span_tokens=self.num_span_tokens,
            recomputed_tokens=self.num_found_tokens - self.num_span_tokens,
            gate=request.gate if self.num_span_tokens else "",
            drafted_tokens=self.num_drafted,
            accepted_tokens=self.num_accepted,
        )

    def _mode(self) -> GenerationMode:
        """What ran: without a span shared, what was asked for as approximate is exact."""
        is_exact = self.request.repair is not None and not self.num_span_tokens
        return GenerationMode.PREFIX_CACHE if is_exact else self.request.mode
