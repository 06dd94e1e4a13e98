"""Draft tokens from a draft model or an MTP head, and the filling of its KV.

A step plans how many tokens the draft model proposes for each sequence, and reserves their slots.
Before the step's pass, `ModelDrafts.complete` runs the draft model: a first pass computes the
tokens of all sequences that it has not seen yet, and each further pass adds a token to each draft.

The draft model samples like the engine's model, with the same random number for each position, so
that sampled requests accept its tokens almost as often as greedy ones.

Most ids of a large vocabulary are rare, and their logits take much of a small model's time. The
draft model can therefore have a short vocabulary of the lowest ids, which tokenizers give to
frequent tokens. A step drafts from all ids if higher ones are frequent in one of its sequences, as
in Chinese and Russian texts.

An MTP head is a draft model that needs the hidden states of the engine's model. It can fill its KV
only while these are known, so `ModelDrafts.keep_hidden_states` fills that of prompts after each
pass. An assistant needs the hidden states too, but fills nothing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Several

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.request.request import Request
from kvboost_edge.engine.samplers.sampling import Sampler, make_sampler
from kvboost_edge.engine.schedule.feature import Lookahead
from kvboost_edge.engine.schedule.sequence import Sequence
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens
from kvboost_edge.engine.spec_decode.draft_chances import AcceptanceCounts, DraftChances
from kvboost_edge.engine.spec_decode.draft_lengths import (
    LEAST_GAIN,
    DraftProposal,
    StepCosts,
    least_chances,
)
from kvboost_edge.engine.spec_decode.draft_model import DraftModel, DraftRows
from kvboost_edge.engine.spec_decode.hidden_states import HiddenStates
from kvboost_edge.engine.spec_decode.pass_costs import PassCosts
from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.block_table import CopyOp
from kvboost_edge.runners.base import PassAbandoned

__all__ = ["DraftStep", "ModelDrafts", "SequenceDraft"]

_LOG = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]

_MOST = 8  # draft tokens of a sequence in a step
_CATCH_UP = 8  # tokens that the first pass of a draft computes at no notable cost
_PASS_TOKENS = 256  # tokens in a pass that fills
_DENSE_ROWS = 64  # rows of a pass whose time for each row is that of a longer one
# Longest time of filling in a step, relative to a pass of the engine's model with one row.
_FILL_COST = 1.0
_FILL_COST_ALONE = 4.0
_LEAST_FILL = 32  # tokens of a pass that measures the time of filling
_FILL_RATE = 0.3  # share of a new measurement in that time
_TRIALS = 3
_EXPECTED_TOKENS = 64  # tokens that a request generates besides as many as it has generated
_ANSWER_RATE = 0.1  # share of a new answer in the average length of answers
# A step drafts from the short vocabulary if at most so many of the recent tokens of each sequence
# have ids outside it. The tokens that it cannot draft then cost less than its passes save.
_MOST_RARE = 12
_RECENT = 128
_KEPT_HIDDEN_STATES = 32  # tokens of a sequence whose hidden states wait for a draft
_MOST_HIDDEN_STATES = 128  # tokens of a sequence that drafts whose hidden states are kept


class SequenceDraft:
    """The part of the draft model in one sequence's drafts.

    Args:
        request: request of the sequence.
        of_all: counts of the engine's sequences that choose their tokens in the same way.
        hidden_states: hidden states of the sequence for an MTP head, or None for a draft model.

    Attributes:
        chances: probabilities that the tokens are accepted.
        count: number of tokens to draft in this step.
        num_fill: number of tokens before the last one to fill in this step.
        stop: position after the last draft token that has KV.
        is_off: True if the draft model's logits were not finite.
        least: float64 [most], least probabilities of draft tokens, by place, and all tokens before
            them. A draft ends before a less likely token, whose row is not worth its time.
        least_more: the same for tokens after which another one is drafted.
        is_cut: True if the draft of this step ended before an unlikely token.
        hidden_states: see above.
        fills_prompt: whether an MTP head computes KV of the prompt, or None before that is decided.
            An assistant computes none.
        only_fills: whether the sequence drafts nothing. Hidden states then wait for no draft.
    """

    def __init__(
        self, request: Request, of_all: AcceptanceCounts, hidden_states: HiddenStates | None = None
    ) -> None:
        self.hidden_states = hidden_states
        self.fills_prompt: bool | None = None
        self.only_fills = False
        self.chances = DraftChances(_MOST, of_all)
        self.count = self.num_fill = self.stop = 0
        self.is_off = self.is_cut = False
        self.least = self.least_more = np.zeros(_MOST)
        self._request = request
        self._sampler: Sampler | None = None

    @property
    def runs(self) -> bool:
        """True if the draft model runs for the sequence in this step."""
        return self.count > 0 or self.num_fill > 0

    def clear(self) -> None:
        """End the draft of this step."""
        self.count = self.num_fill = self.stop = 0
        self.is_cut = False

    @property
    def num_hidden_states(self) -> int:
        """Number of tokens whose hidden states are kept, without those of draft tokens."""
        return (
            0 if self.hidden_states is None else self.hidden_states.stop - self.hidden_states.first
        )

    def drop_filled(self) -> None:
        """Drop all hidden states but the last one, after the KV of their tokens was computed."""
        if self.hidden_states is not None:
            self.hidden_states.drop_before(self.hidden_states.stop - 1)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Record the outcome of a draft. Both numbers are 0 for a step without a draft.

        A token before which the draft was cut counts as rejected, because it was computed in vain.
        """
        was_rejected = self.is_cut or num_accepted < num_drafted
        self.chances.learn(num_accepted + was_rejected, num_accepted)

    def sample(self, logits: Floats, token_ids: Several[int], largest: int) -> int:
        """Return the token that the request's sampler draws from the draft model's logits."""
        request = self._request
        # The sequence's own sampler must not see drafts, because mirostat's keeps a state.
        if self._sampler is None:
            self._sampler = make_sampler(
                request.params,
                request.seed,
                request.suppressed,
                stop_ids=request.stop_ids,
                words=request.words,
            )
        return self._sampler(logits, token_ids, request.num_prompt_tokens, largest)


class DraftStep:
    """The draft of one sequence while the draft model runs.

    Attributes:
        token_ids: the tokens of the sequence, followed by those drafted so far.
        num_known: number of tokens of the sequence.
        fill_stop: position after the last token that may be filled without a draft.
        chance: probability of the tokens drafted so far, by the draft model.
    """

    def __init__(
        self, sequence: Sequence, draft: SequenceDraft, fill_stop: int | None = None
    ) -> None:
        self.sequence = sequence
        self.draft = draft
        self.token_ids = list(sequence.token_ids)
        self.num_known = len(self.token_ids)
        self.fill_stop = self.num_known - 1 if fill_stop is None else fill_stop
        self.is_done = draft.count == 0
        self.chance = 1.0
        self._grammar: Lookahead | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens drafted so far."""
        return self.token_ids[self.num_known :]

    def next_row(self) -> DraftRows:
        """Return the last token, whose logits give the next one."""
        start = len(self.token_ids) - 1
        return self.rows(start, len(self.token_ids), wants_logits=True)

    def rows(self, start: int, stop: int, *, wants_logits: bool) -> DraftRows:
        """Return the rows of the tokens [start, stop)."""
        tokens = self.token_ids[start:stop]
        return DraftRows(
            self.sequence.blocks, start, tokens, wants_logits, self.draft.hidden_states
        )

    def push(self, logits: Floats, padded: Floats) -> None:
        """Sample the next token.

        The draft ends before a token that ends the output, before a token that is too unlikely, at
        logits with NaN, and where all ids are forbidden.

        Args:
            logits: logits that the draft model computed, of the first ids.
            padded: the same with -inf for all other ids.
        """
        self.is_done = True
        largest = int(logits.argmax())
        if not np.isfinite(logits[largest]):
            self.draft.is_off = True
            return
        if self._grammar is None:
            self._grammar = self.sequence.grammar.lookahead()
        allowed = self._grammar.masked(padded)
        if allowed is not padded:
            largest = int(allowed.argmax())
        token_id = self._sampled(allowed, largest)
        # The row before a token that ends the output samples it. Its own row would be computed in
        # vain.
        if token_id is None or token_id in self.sequence.request.stop_ids:
            return
        place = len(self.token_ids) - self.num_known
        self.draft.is_cut = self._is_too_unlikely(allowed[: len(logits)], token_id, place)
        if self.draft.is_cut or self._grammar.advance(token_id):
            return
        self.token_ids.append(token_id)
        self.is_done = (
            len(self.token_ids) == self.num_known + self.draft.count
            or self.chance < self.draft.least_more[place]
        )

    def _sampled(self, allowed: Floats, largest: int) -> int | None:
        """Return the next token, or None if all ids of the draft model are forbidden.

        Args:
            allowed: logits [vocab_size], with -inf for other and forbidden ids.
            largest: index of the largest one.
        """
        if allowed[largest] == -np.inf:
            return None
        try:
            token_id = self.draft.sample(allowed, self.token_ids, largest)
        except RequestError:  # the model's files suppress all of these ids
            return None
        return token_id if allowed[token_id] > -np.inf else None

    def _is_too_unlikely(self, logits: Floats, token_id: int, place: int) -> bool:
        """Return whether a token is less likely than the engine or the request allows.

        Args:
            logits: logits of the first ids, without those that the grammar forbids.
        """
        request = self.sequence.request
        least = request.terms.draft_p_min
        if request.params.samples:  # the engine's model often draws the same unlikely token
            return least is not None and _probability(logits, token_id) < least
        probability = _probability(logits, token_id)
        self.chance *= probability
        return bool(self.chance < self.draft.least[place]) or (
            least is not None and probability < least
        )


class ModelDrafts:
    """The drafts of a draft model for all sequences of an engine.

    Args:
        model: the draft model.
        vocab_size: number of logits of the engine's model. The draft model's are cut or padded.
        weight_bytes: size of the weights of the engine's model.

    Attributes:
        is_on: False after an error of the draft model, which turns it off for this engine.
        is_short: whether this step drafts from the short vocabulary.
    """

    def __init__(self, model: DraftModel, vocab_size: int, weight_bytes: int) -> None:
        self.model = model
        self.is_on = True
        self.is_short = model.short_vocabulary > 0
        self._vocab_size = vocab_size
        self._padded: dict[int, Floats] = {}  # by the number of computed logits
        # Times of passes, without and with the short vocabulary.
        self._costs = PassCosts(), PassCosts()
        self._weight_ratio = model.weight_bytes / weight_bytes
        # Counts of all sequences, apart for greedy and sampled ones.
        self._counts = AcceptanceCounts(_MOST), AcceptanceCounts(_MOST)
        self._fill_seconds: float | None = None  # measured time of a token while filling
        self._answer_tokens: float | None = None  # decaying average length of answers

    def draft_of(self, request: Request) -> SequenceDraft:
        """Return the part of the draft model in the drafts of a new sequence."""
        counts = self._counts[request.params.samples]
        draft = SequenceDraft(request, counts, self.model.new_hidden_states())
        if not self.model.has_kv:
            draft.fills_prompt = False
        return draft

    def filling_of(self, request: Request) -> SequenceDraft | None:
        """Return the part of an MTP head in a sequence of which it only computes KV, or None.

        Later requests cannot compute that KV, because the hidden states are gone. A draft model
        needs none.
        """
        is_wanted = request.fills_drafter and request.prefill_only and request.uses_cache
        draft = self.draft_of(request) if is_wanted and self.model.has_kv else None
        if draft is None or draft.hidden_states is None:
            return None
        draft.fills_prompt = draft.only_fills = True
        return draft

    @property
    def costs(self) -> PassCosts:
        """Times of its passes with the vocabulary of this step.

        Before `measure`, they are the engine's times by the size of the weights.
        """
        return self._costs[self.is_short]

    def measure(self) -> None:
        """Measure passes with one row, so that the first drafts are worth their time.

        Call it before the engine starts.
        """
        with self._off_after_error():
            for is_short in (False, True)[: 1 + self.is_short]:
                times = []
                for _ in range(_TRIALS):
                    began = time.perf_counter()
                    self.model.trial(is_short=is_short)
                    times.append(time.perf_counter() - began)
                self._costs[is_short].observe(1, 0.0, min(times))

    def choose_vocabulary(self, sequences: Iterable[Sequence]) -> None:
        """Choose the vocabulary of a step for the sequences that may draft.

        Call it before anything is proposed for the step.
        """
        short = self.model.short_vocabulary
        self.is_short = short > 0 and all(
            sum(token_id >= short for token_id in sequence.token_ids[-_RECENT:]) <= _MOST_RARE
            for sequence in sequences
        )

    @contextlib.contextmanager
    def _off_after_error(self) -> Iterator[None]:
        """Turn the draft model off after an error, and log the error."""
        try:
            yield
        except PassAbandoned:
            pass  # all sequences of the draft are ending, or a later step computes the KV again
        except Exception:
            self.is_on = False
            self.model.stop()
            _LOG.exception(
                "drafts of source %s failed and are turned off until the engine is created again; "
                "answers do not change",
                self.model.source,
            )

    def propose(
        self,
        sequence: Sequence,
        draft: SequenceDraft,
        most: int,
        costs: StepCosts,
        other: DraftProposal | None,
        match_length: int,
    ) -> DraftProposal | None:
        """Plan a draft, whose tokens are 0 until `complete`, or the filling for later drafts.

        Args:
            sequence: a sequence that decodes.
            draft: its part of the draft model, which is updated.
            most: maximum number of draft tokens. If the request wants longer drafts, there is none.
            costs: costs of adding draft tokens to the step.
            other: proposal of another source.
            match_length: number of last tokens that occur earlier in the sequence.

        Returns:
            The draft of the draft model, or `other` if more tokens per second are expected of it.
        """
        draft.clear()
        known = sequence.num_tokens
        most = min(most, _MOST, self.model.max_context - known + 1)
        least_tokens = max(1, sequence.request.min_draft_tokens)
        if (
            most < least_tokens
            or not self._runs_for(sequence, draft)
            or not self.model.can_draft(sequence.blocks, known, draft.hidden_states)
        ):
            return other
        if self.model.awaits(sequence.blocks):
            return other  # a tier has what would be computed here
        if not self.costs.is_known:
            self.costs.guess(self._weight_ratio * costs.passes.seconds(1, 0.0))
        always = sequence.request.always_drafts
        ends_early = not (always or sequence.request.params.samples)
        planned = DraftProposal(
            [0] * most, draft.chances.values[:most], self.model.source, ends_early
        )
        rates = costs.rates(planned)
        count = least_tokens + int(rates[least_tokens:].argmax())
        least = 0.0 if always else LEAST_GAIN * rates[0]
        if other is not None:
            least = max(least, costs.rates(other)[least_tokens:].max(initial=0.0))
        if rates[count] <= least:
            return other
        gaps = self.model.missing(sequence.blocks, known - 1, draft.hidden_states)
        gap = sum(end - first for first, end in gaps)
        if gap > _CATCH_UP:
            generated = known - sequence.request.num_prompt_tokens
            if not always and gap > _LEAST_FILL and 0 < generated <= match_length:
                return other  # the answer is a copy so far, which prompt lookup drafts for less
            draft.num_fill = gap if always else self._num_fill(sequence, gap, costs, rates[count])
            if draft.num_fill < gap:
                return other
        self._limit(draft, costs, 0.0 if always else rates[count])
        if not always:
            return planned
        return DraftProposal([0] * count, planned.chances[:count], self.model.source)

    def _runs_for(self, sequence: Sequence, draft: SequenceDraft) -> bool:
        """Return whether the draft model may run for a sequence."""
        return self.is_on and not draft.is_off and len(sequence.blocks.segments) == 1

    def _limit(self, draft: SequenceDraft, costs: StepCosts, rate: float) -> None:
        """Set the least probabilities of a sequence's draft tokens.

        Args:
            rate: tokens per second of the step with the draft, which another token should reach.
        """
        draft.least, draft.least_more = least_chances(costs, rate, _MOST)

    def _num_fill(self, sequence: Sequence, gap: int, costs: StepCosts, rate: float) -> int:
        """Return the number of tokens to fill in this step, or 0 if filling does not pay.

        Args:
            gap: number of tokens that the draft model has not computed.
            rate: tokens per second of the step with the draft.
        """
        request = sequence.request
        generated = sequence.num_tokens - request.num_prompt_tokens
        expected = min(request.max_tokens - sequence.num_tokens, generated + _EXPECTED_TOKENS)
        plain = costs.passes.seconds(costs.num_rows, costs.depth)
        saved = expected * (plain - costs.num_rows / rate)
        each = self._fill_seconds_at(sequence.num_tokens / 2)
        if gap * each > saved:
            return 0
        most = _FILL_COST_ALONE if costs.num_rows == 1 else _FILL_COST
        seconds = most * costs.passes.seconds(1, sequence.num_tokens)
        return min(gap, max(1, int(seconds / each)))

    def _fill_seconds_at(self, depth: float) -> float:
        """Return the expected seconds that filling takes for each token, at an average depth."""
        if self._fill_seconds is not None:
            return self._fill_seconds
        return self.costs.seconds(_DENSE_ROWS, _DENSE_ROWS * depth) / _DENSE_ROWS

    def num_hidden_states(
        self, work: ScheduledTokens[Sequence], draft: SequenceDraft, passes: PassCosts
    ) -> int:
        """Return the number of last tokens whose hidden states an MTP head needs.

        It needs those of a prompt if drafts are expected to save more time than its KV takes. An
        assistant needs those of the last known token and of the draft tokens after it.

        Args:
            work: the tokens.
            draft: the sequence's part of the head.
            passes: times of the engine's passes.
        """
        if draft.hidden_states is None or not self._runs_for(work.sequence, draft):
            return 0
        if not self.model.has_kv:
            is_last = work.certain_stop == work.sequence.num_tokens
            return work.stop - work.certain_stop + 1 if is_last else 0
        count = len(work.token_ids)
        if work.certain_stop - work.start <= _KEPT_HIDDEN_STATES:
            return count
        if draft.fills_prompt is None:
            draft.fills_prompt = self._fills_prompt(work.sequence, draft, passes)
        return count if draft.fills_prompt else 0

    def _fills_prompt(self, sequence: Sequence, draft: SequenceDraft, passes: PassCosts) -> bool:
        request = sequence.request
        if request.always_drafts or not passes.is_known:
            return True
        depth = float(sequence.num_tokens)
        chances = draft.chances.values
        planned = DraftProposal([0] * len(chances), chances, self.model.source)
        rates = StepCosts(1, depth, passes, self.costs).rates(planned)
        if rates.max() <= LEAST_GAIN * rates[0]:
            return False
        saved = self._expected_tokens(sequence) * (1 / rates[0] - 1 / rates.max())
        return float(saved) > sequence.num_pending * self._fill_seconds_at(depth / 2)

    def _expected_tokens(self, sequence: Sequence) -> float:
        """Return the number of tokens that a sequence is expected to generate.

        Before any answer, it is the most that the sequence may generate.
        """
        most = float(sequence.request.max_tokens - sequence.num_tokens)
        if self._answer_tokens is None:
            return most
        return min(most, max(self._answer_tokens, _EXPECTED_TOKENS))

    def note_answer(self, num_tokens: int) -> None:
        """Record the length of a finished answer."""
        before = num_tokens if self._answer_tokens is None else self._answer_tokens
        self._answer_tokens = before + _ANSWER_RATE * (num_tokens - before)

    def keep_hidden_states(
        self,
        found: Several[tuple[ScheduledTokens[Sequence], SequenceDraft, Floats]],
        is_ending: Callable[[Sequence], bool],
    ) -> None:
        """Keep hidden states for an MTP head, and fill its KV where many states are known.

        Args:
            found: tokens of the step, their part of the head, and the hidden states of the last
                ones.
            is_ending: function that returns whether a sequence is about to end.
        """
        steps: list[DraftStep] = []
        for work, draft, rows in found:
            hidden_states = draft.hidden_states
            assert hidden_states is not None
            table = work.sequence.blocks
            start = work.stop - len(rows)
            hidden_states.keep(table, start, rows, work.certain_stop - start)
            most = 0 if draft.only_fills else _KEPT_HIDDEN_STATES
            if draft.count == 0 and hidden_states.stop - hidden_states.first > most:
                steps.append(DraftStep(work.sequence, draft, hidden_states.stop))
                if draft.fills_prompt is not False:
                    draft.num_fill = hidden_states.stop  # all that is missing
        if steps:
            with self._off_after_error():
                self._run(steps, is_ending)
            for step in steps:
                step.draft.num_fill = 0
                step.draft.drop_filled()

    def complete(
        self,
        steps: Several[DraftStep],
        copies: Several[CopyOp],
        is_ending: Callable[[Sequence], bool],
    ) -> None:
        """Copy blocks, compute the tokens of drafts, and fill what was planned.

        An error of the draft model is logged, and turns it off.

        Args:
            steps: the drafts of the step.
            copies: blocks that the step copies.
            is_ending: function that returns whether a sequence is about to end.
        """
        if not self.is_on:
            return
        with self._off_after_error():
            self.model.copy_blocks(copies)
            self._run(steps, is_ending)

    def _run(self, steps: Several[DraftStep], is_ending: Callable[[Sequence], bool]) -> None:
        def is_abandoned() -> bool:
            return all(is_ending(step.sequence) for step in steps)

        for rows in self._first_passes(steps):
            if is_abandoned():
                return
            self._pass(rows, is_abandoned)
            for step, one in rows:
                self.model.note_filled(one.table, one.start, one.stop)
                if one.wants_logits and step.draft.num_hidden_states > _MOST_HIDDEN_STATES:
                    step.draft.drop_filled()  # all tokens before this one have KV
                if step.draft.is_off:
                    self.model.forget(one.table)
        while active := [one for one in steps if not (one.is_done or is_ending(one.sequence))]:
            self._pass([(step, step.next_row()) for step in active], is_abandoned)
            for step in active:
                step.draft.stop = len(step.token_ids) - 1

    def _pass(
        self, rows: Several[tuple[DraftStep, DraftRows]], is_abandoned: Callable[[], bool]
    ) -> None:
        """Run one pass, and sample the next token of each draft whose last token it computes."""
        began = time.perf_counter()
        wanted = [step for step, one in rows if one.wants_logits]
        is_short = self.is_short and bool(wanted)
        logits = self.model.forward([one for _, one in rows], is_abandoned, is_short=is_short)
        for step, row in zip(wanted, logits[:, : self._vocab_size], strict=True):
            step.push(row, self._fitted(row))
        seconds = time.perf_counter() - began
        num_tokens = sum(len(one.token_ids) for _, one in rows)
        if num_tokens == len(rows):
            depth = float(sum(one.start for _, one in rows))
            self.costs.observe(len(rows), depth, seconds)
        elif num_tokens >= _LEAST_FILL:
            each = seconds / num_tokens
            before = each if self._fill_seconds is None else self._fill_seconds
            self._fill_seconds = before + _FILL_RATE * (each - before)

    def _first_passes(
        self, steps: Several[DraftStep]
    ) -> Iterator[list[tuple[DraftStep, DraftRows]]]:
        """Yield the rows of passes that compute what the draft model has not seen.

        The passes end with the last token of each sequence that drafts. If two sequences lack the
        same block, the second one drafts nothing in this step, or leaves the block out if it only
        fills.
        """
        # Blocks that these passes compute. False stands for those whose last tokens are left out.
        taken: dict[int, bool] = {}
        rows: list[tuple[DraftStep, DraftRows]] = []
        size = 0
        for step in steps:
            runs = self._runs(step)
            if step.is_done:
                runs = self._without(step, runs, taken)
            blocks = [block_id for run in runs for block_id in self._blocks(step, run)]
            if not taken.keys().isdisjoint(blocks):
                step.is_done = True
                continue
            for run in runs:
                own = self._blocks(step, run)
                taken.update(dict.fromkeys(own, True))
                taken[own[-1]] = run[1] % self.model.block_size == 0
            for first, end in runs:
                while first < end:
                    stop = min(end, first + _PASS_TOKENS - size)
                    is_last = stop == step.num_known and not step.is_done
                    rows.append((step, step.rows(first, stop, wants_logits=is_last)))
                    size += stop - first
                    first = stop
                    if size == _PASS_TOKENS:
                        yield rows
                        rows = []
                        size = 0
        if rows:
            yield rows

    def _blocks(self, step: DraftStep, run: tuple[int, int]) -> list[int]:
        """Return the blocks of a run of positions."""
        size = self.model.block_size
        return step.sequence.blocks.block_ids[run[0] // size : -(-run[1] // size)]

    def _without(
        self, step: DraftStep, runs: Several[tuple[int, int]], taken: Mapping[int, bool]
    ) -> list[tuple[int, int]]:
        """Return runs of positions without those in the blocks `taken`.

        They end before a block of which tokens are left out, because later tokens attend to all of
        it.
        """
        size = self.model.block_size
        found: list[tuple[int, int]] = []
        for first, end in runs:
            for block_id in self._blocks(step, (first, end)):
                stop = min(end, (first // size + 1) * size)
                if not taken.get(block_id, True):
                    return found
                if block_id not in taken:
                    found.append((first, stop))
                first = stop
        return found

    def _runs(self, step: DraftStep) -> list[tuple[int, int]]:
        """Return the runs of positions to compute before the first token is drafted."""
        last = step.num_known - 1
        stop = step.fill_stop if step.is_done else last
        runs = self.model.missing(step.sequence.blocks, stop, step.draft.hidden_states)
        if not step.is_done:
            first = runs.pop()[0] if runs and runs[-1][1] == last else last
            return [*runs, (first, step.num_known)]
        left = step.draft.num_fill
        found = []
        for first, end in runs:
            end = min(end, first + left)
            left -= end - first
            if first < end:
                found.append((first, end))
        return found

    def settle(self, work: ScheduledTokens[Sequence], draft: SequenceDraft) -> None:
        """Record which accepted draft tokens have KV of the draft model."""
        table = work.sequence.blocks
        computed = work.sequence.num_computed_tokens
        stop = min(draft.stop, computed)
        if stop > work.certain_stop:
            self.model.settle(table, work.certain_stop, stop)
        if draft.hidden_states is not None:
            draft.hidden_states.confirm(table, computed)

    def _fitted(self, logits: Floats) -> Floats:
        """Return logits [vocab_size], with -inf for ids without one, valid until the next call."""
        size = len(logits)
        if size == self._vocab_size:
            return logits
        if size not in self._padded:
            self._padded[size] = np.full(self._vocab_size, -np.inf, np.float32)
        self._padded[size][:size] = logits
        return self._padded[size]


def _probability(logits: Floats, token_id: int) -> float:
    """Return the probability of a token by its logits, before sampling options apply."""
    with np.errstate(over="ignore"):  # the token of a penalized request may be very unlikely
        return float(1 / np.exp(logits - logits[token_id]).sum())
