"""Speculative decoding, which chooses the number of draft tokens and records their outcome.

Draft tokens are extra rows of the next pass, after the certain token. Each row samples a token as
it would without drafts. Draft tokens are accepted up to the first one that differs from the sampled
token. The logits of a row do not depend on the rest of the batch. Text, tokens and log
probabilities are therefore bit-identical to those without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.memory.state_budget import most_draft_tokens, speculation_refusal
from kvboost_edge.engine.request.request import Request, RequestFeature, RequestInputs
from kvboost_edge.engine.request.results import DraftCounts
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.schedule.feature import Constraint, Drafting
from kvboost_edge.engine.schedule.planners import DraftPlanner
from kvboost_edge.engine.schedule.sequence import Sequence
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens
from kvboost_edge.engine.spec_decode.draft_lengths import (
    DraftCredit,
    DraftProposal,
    StepCosts,
    choose_lengths,
    observe_pass,
)
from kvboost_edge.engine.spec_decode.model_drafts import DraftStep, ModelDrafts, SequenceDraft
from kvboost_edge.engine.spec_decode.pass_costs import PassCosts
from kvboost_edge.engine.spec_decode.prompt_lookup import (
    PromptLookup,
    TenantHistory,
    prepare_drafts,
)
from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.block_table import CopyOp
from kvboost_edge.kvcache.manager import KVCacheManager

__all__ = ["DraftFields", "Speculation"]

Floats = npt.NDArray[np.float32]

_FORCED = 0.98  # chance that the model tokenizes a text forced by the grammar in the same way
_MEASURED_EVERY = 4  # passes without draft tokens; they are frequent, and measuring takes 15 us


class DraftTokens(Drafting):
    """The draft tokens of one sequence, made by prompt lookup or by a draft model.

    Attributes:
        lookup: prompt lookup of the sequence.
        model: part of the draft model in these drafts, or None without one.
        source: source of the draft in this step, see `DraftProposal`.
        counts: counts of the verified drafts by source.
        passed_over: tokens that prompt lookup proposed in this step, if the draft model drafts.
    """

    proposes = True

    def __init__(self, lookup: PromptLookup, model: SequenceDraft | None = None) -> None:
        super().__init__()
        self.lookup = lookup
        self.model = model
        self.source = ""
        self.counts: dict[str, DraftCounts] = {}
        self.passed_over: list[int] = []

    def count(self, num_drafted: int, num_accepted: int) -> None:
        self.tokens = []
        if num_drafted:
            _count(self.counts, self.source, num_drafted, num_accepted)

    def learn(self, num_drafted: int, num_accepted: int, token_ids: Several[int]) -> None:
        outcome = num_drafted, num_accepted
        if self.source == "lookup":
            self.lookup.learn(*outcome)
        else:
            self.lookup.learn_unverified(self.passed_over, token_ids)
        self.passed_over = []
        if self.model is not None:
            self.model.learn(*(outcome if self.model.count > 0 else (0, 0)))
            self.model.clear()

    def release(self) -> None:
        self.lookup.release()

    def result_fields(self) -> dict[str, Any]:
        counts = self.counts
        return {
            "drafted_tokens": sum(one.drafted_tokens for one in counts.values()),
            "accepted_tokens": sum(one.accepted_tokens for one in counts.values()),
            "drafts": dict(counts),
        }


class DrafterFilling(Drafting):
    """The KV that an MTP head computes of a prompt without an answer. Nothing is drafted.

    Attributes:
        model: part of the head in the sequence.
    """

    def __init__(self, model: SequenceDraft) -> None:
        super().__init__()
        self.model = model


class DraftFields(RequestFeature):
    """The request fields for speculative decoding.

    Args:
        is_native: True on the native runner. On other runners results depend on the batch, so only
            requests with speculation="on" use draft tokens.
        has_drafter: True with a draft model or MTP head.
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        *,
        is_native: bool,
        has_drafter: bool = False,
    ) -> None:
        self._has_drafter = has_drafter
        self._config = config
        self._manager = manager
        self._is_native = is_native

    @property
    def speculates(self) -> bool:
        """True if requests use draft tokens unless they set `speculation`."""
        refusal = speculation_refusal(self._config, self._manager.states)
        return refusal is None and self._uses(self._config.speculation)

    def prepare(self, inputs: RequestInputs) -> dict[str, Any]:
        """Return the maximum number of draft tokens per step, and how a drafter is used.

        Raises:
            RequestError: speculation="on" is set, but the model's recurrent state leaves no room,
                or draft_p_min is set without a draft model and MTP head.
        """
        if inputs.terms.draft_p_min is not None and not self._has_drafter:
            raise RequestError(
                f"draft_p_min={inputs.terms.draft_p_min:g} has no effect without a draft model or "
                "multi-token prediction head; leave it out, or start the engine with a draft_model"
            )
        chosen = inputs.terms.speculation or self._config.speculation
        most = self._most(inputs.terms, chosen) if inputs.generates else 0
        refusal = speculation_refusal(self._config, self._manager.states)
        fills = self._has_drafter and refusal is None and self._uses(chosen)
        return {
            "max_draft_tokens": most,
            "always_drafts": chosen == "on",
            "fills_drafter": fills and not inputs.generates,
        }

    def _most(self, terms: Terms, chosen: str) -> int:
        recurrent_states = self._manager.states
        refusal = speculation_refusal(self._config, recurrent_states)
        if refusal is not None:
            if chosen == "on":
                raise RequestError(f"speculation='on' is refused: {refusal}")
            return 0
        if not self._uses(chosen):
            return 0
        prepare_drafts()
        most = most_draft_tokens(self._config, recurrent_states)
        asked = terms.max_draft_tokens or most
        return asked if recurrent_states is None else min(asked, most)

    def _uses(self, chosen: str) -> bool:
        """Return whether this value of `speculation` turns on speculative decoding."""
        return chosen == "on" or (chosen == "auto" and self._is_native)


class Speculation(DraftPlanner):
    """The draft tokens of all sequences of an engine.

    Args:
        closes_blocks: True if a block is quantized when its last slot is written. Draft tokens then
            stay within the block.
        history_bytes: Byte limit of the draft history, or None for the default.
        models: Drafts of a draft model, or None without one.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        closes_blocks: bool,
        history_bytes: int | None = None,
        models: ModelDrafts | None = None,
    ) -> None:
        self._manager = manager
        self._models = models
        self.memory = (
            TenantHistory() if history_bytes is None else TenantHistory.within(history_bytes)
        )
        self.num_drafted = self.num_accepted = 0
        self.counts: dict[str, DraftCounts] = {}
        self.costs = PassCosts()
        self.credit = DraftCredit()
        self._accepted: list[int] = []  # accepted draft tokens of this step that spent credit
        self._num_plain = 0  # passes without draft tokens
        self._closes_blocks = closes_blocks

    def room(self, sequence: Sequence) -> int:
        """Return the maximum number of draft tokens for a sequence that decodes."""
        request = sequence.request
        known = sequence.num_tokens
        most = min(request.max_draft_tokens, request.max_tokens - known - 1)
        if not self._closes_blocks:
            return most
        block_size = self._manager.block_size
        # With reused spans, the last segment of the table may start at any position.
        offset = (known - sequence.blocks.segments[-1].first_position) % block_size
        return min(most, block_size - 1 - offset)

    def prompt_lookup(self, request: Request) -> PromptLookup | None:
        """Return prompt lookup for the request, or None if it uses no draft tokens."""
        return (
            PromptLookup(
                request.root,
                self.memory,
                request.max_tokens,
                reads_history=request.uses_cache,
            )
            if request.max_draft_tokens
            else None
        )

    def drafting(self, request: Request) -> Drafting:
        """Return the drafting feature of a new sequence, or its null implementation."""
        lookup = self.prompt_lookup(request)
        models = self._models
        if lookup is None:
            filling = None if models is None else models.filling_of(request)
            return Drafting() if filling is None else DrafterFilling(filling)
        return DraftTokens(lookup, None if models is None else models.draft_of(request))

    def draft(
        self,
        running: Several[Sequence],
        wanted: Mapping[int, int],
        budget: int,
        reserve: Callable[[Sequence, int], bool],
    ) -> None:
        """Assign draft tokens to sequences that decode.

        A sequence gets at most an equal share of the budget that remains for it and the sequences
        after it. If no spare block is left, its draft is cut to the room in its own blocks.

        Args:
            running: The running sequences.
            wanted: Number of tokens that the step computes, by sequence index.
            budget: Maximum number of rows to add to the step.
            reserve: Function that reserves a sequence's slots up to a position. It returns False if
                too few spare blocks are left.
        """
        budget = min(budget, self._manager.recurrent.num_draft_rows)
        drafting = [
            one
            for one in running
            if one.drafting.proposes and wanted.get(one.index) == one.num_pending == 1
        ]
        if self._models is not None:
            self._models.choose_vocabulary(drafting)
        costs = self._costs_of(running, wanted)
        proposed: list[tuple[Sequence, DraftProposal]] = []
        for sequence in drafting:
            most = self.room(sequence)
            draft = self._propose(sequence, most, costs) if most > 0 else None
            if draft is not None:
                proposed.append((sequence, draft))
        weighed = [
            draft._replace(least_tokens=max(1, sequence.request.min_draft_tokens))
            for sequence, draft in proposed
            if not sequence.request.always_drafts
        ]
        chosen = iter(choose_lengths(weighed, costs, self.credit) if weighed else ())
        for waiting, (sequence, draft) in zip(range(len(proposed), 0, -1), proposed, strict=True):
            always = sequence.request.always_drafts
            count = min(len(draft.token_ids) if always else next(chosen), -(-budget // waiting))
            sequence.drafting.tokens = _long_enough(sequence.request, draft.token_ids[:count])
            budget -= len(sequence.drafting.tokens)
        for sequence, draft in proposed:
            tokens = sequence.drafting.tokens
            if tokens and not reserve(sequence, sequence.num_tokens + len(tokens)):
                num_slots = sequence.blocks.num_slots(self._manager.block_size)
                room = num_slots - sequence.num_tokens
                tokens[:] = _long_enough(sequence.request, tokens[:room])
            drafts = _drafts_of(sequence)
            drafts.source = draft.source
            if drafts.model is not None and draft.is_modeled:
                drafts.model.count = len(tokens)

    def _costs_of(self, running: Several[Sequence], wanted: Mapping[int, int]) -> StepCosts:
        """Return the costs of adding draft tokens to a step."""
        depth = sum(wanted.get(one.index, 0) * one.num_computed_tokens for one in running)
        drafter = None if self._models is None else self._models.costs
        return StepCosts(sum(wanted.values()), float(depth), self.costs, drafter)

    def _propose(self, sequence: Sequence, most: int, costs: StepCosts) -> DraftProposal | None:
        """Return the tokens that the grammar forces, or else the most promising proposal.

        Forced tokens that are fewer than the request's minimum are not proposed. Proposals of
        prompt lookup are cut before the first token that the grammar forbids.

        Args:
            most: Maximum number of draft tokens.
            costs: Costs of adding draft tokens to the step.
        """
        drafts = _drafts_of(sequence)
        drafts.passed_over = []
        forced = _long_enough(sequence.request, sequence.grammar.forced()[:most])
        if forced:
            return DraftProposal(forced, np.full(len(forced), _FORCED), "grammar")
        proposed = drafts.lookup.propose(sequence.token_ids, most)
        found = _allowed(proposed, sequence.grammar)
        if proposed is not None and found is None:
            drafts.lookup.note_forbidden()
        if self._models is None or drafts.model is None:
            return found
        chosen = self._models.propose(
            sequence, drafts.model, most, costs, found, drafts.lookup.match_length
        )
        if found is not None and chosen is not found:
            drafts.passed_over = found.token_ids
        return chosen

    def complete(
        self,
        work: list[ScheduledTokens[Sequence]],
        copies: Several[CopyOp],
        is_ending: Callable[[Sequence], bool],
    ) -> None:
        models = self._models
        if models is None:
            return
        steps = {
            index: DraftStep(one.sequence, draft)
            for index, one in enumerate(work)
            if (draft := _model_draft_of(one.sequence)) is not None and draft.runs
        }
        models.complete(list(steps.values()), copies, is_ending)
        for index, step in steps.items():
            if step.draft.count:
                tokens = _long_enough(step.sequence.request, step.tokens)
                # The token before which a dropped draft was cut says nothing about acceptance.
                step.draft.is_cut &= len(tokens) == len(step.tokens)
                step.sequence.drafting.tokens = tokens
                work[index] = work[index].with_drafts(tokens)

    def num_hidden_states(self, work: ScheduledTokens[Sequence]) -> int:
        draft = _model_draft_of(work.sequence)
        if self._models is None or draft is None:
            return 0
        return self._models.num_hidden_states(work, draft, self.costs)

    def keep_hidden_states(
        self,
        work: Several[ScheduledTokens[Sequence]],
        states: Several[Floats],
        is_ending: Callable[[Sequence], bool],
    ) -> None:
        if self._models is None:
            return
        found = [
            (one, draft, rows)
            for one, rows in zip(work, states, strict=True)
            if len(rows) and (draft := _model_draft_of(one.sequence)) is not None
        ]
        self._models.keep_hidden_states(found, is_ending)

    def observe(self, work: Several[ScheduledTokens[Sequence]], seconds: float) -> None:
        """Settle the draft tokens of a step, and measure its pass if all sequences decode."""
        if not any(one.sequence.drafting.proposes for one in work):
            return
        num_certain = sum(one.certain_stop - one.start for one in work)
        self.credit.settle(self._accepted, num_certain)
        self._accepted.clear()
        if num_certain > len(work):
            return
        num_rows = sum(len(one.token_ids) for one in work)
        if num_rows == len(work):
            self._num_plain += 1
            is_known = self._num_plain > _MEASURED_EVERY and not self.credit.num_drafting
            if is_known and self._num_plain % _MEASURED_EVERY:
                return
        depth = float(sum(len(one.token_ids) * one.start for one in work))
        observe_pass(self.costs, self.credit, len(work), num_rows, depth, seconds)

    @property
    def draft_vocabulary(self) -> int:
        return 0 if self._models is None else self._models.model.num_ids

    @property
    def draft_failed(self) -> bool:
        return self._models is not None and not self._models.is_on

    @property
    def memory_bytes(self) -> int:
        return self.memory.nbytes

    def forget_all(self) -> None:
        self.memory.forget()

    def close(self) -> None:
        if self._models is not None:
            self._models.model.close()

    def remember(self, sequence: Sequence) -> None:
        """Add a finished request's uncached prompt tokens and answer to the tenant's history.

        A draft model or head also learns the length of the answer.
        """
        generated = sequence.num_tokens - sequence.request.num_prompt_tokens
        if self._models is not None and generated:
            self._models.note_answer(generated)
        if sequence.drafting.proposes and sequence.uses_cache:
            self.memory.keep(
                sequence.request.root, sequence.token_ids[sequence.num_cached_tokens :]
            )

    def settle(self, work: ScheduledTokens[Sequence], num_accepted: int) -> None:
        """Record the outcome of a step's draft tokens and free the blocks of rejected ones.

        Blocks reserved for tokens that the draft model did not draft are freed as well.
        """
        sequence = work.sequence
        self.num_drafted += work.num_drafted
        self.num_accepted += num_accepted
        if num_accepted and not sequence.request.always_drafts:
            self._accepted.append(num_accepted)
        num_reserved = work.num_drafted
        drafting = sequence.drafting
        if work.num_drafted and isinstance(drafting, DraftTokens):
            _count(self.counts, drafting.source, work.num_drafted, num_accepted)
        draft = _model_draft_of(sequence)
        if self._models is not None and draft is not None:
            num_reserved = max(num_reserved, draft.count)
            self._models.settle(work, draft)
        drafting.learn(work.num_drafted, num_accepted, sequence.token_ids[work.certain_stop :])
        if num_reserved > num_accepted:
            self._manager.shrink(sequence.blocks, sequence.num_tokens)


def _allowed(draft: DraftProposal | None, grammar: Constraint) -> DraftProposal | None:
    """Return the tokens of a draft before the first one that the grammar forbids, or None."""
    count = 0 if draft is None else grammar.lookahead().num_allowed(draft.token_ids)
    if draft is None or not count:
        return None
    return draft._replace(token_ids=draft.token_ids[:count], chances=draft.chances[:count])


def _long_enough(request: Request, tokens: list[int]) -> list[int]:
    """Return the tokens of a draft, or none if the request wants longer drafts."""
    return tokens if len(tokens) >= request.min_draft_tokens else []


def _model_draft_of(sequence: Sequence) -> SequenceDraft | None:
    """Return the part of the draft model in a sequence's drafts, or None without one."""
    drafting = sequence.drafting
    return drafting.model if isinstance(drafting, DraftTokens | DrafterFilling) else None


def _drafts_of(sequence: Sequence) -> DraftTokens:
    drafting = sequence.drafting
    assert isinstance(drafting, DraftTokens), "the sequence does not draft"
    return drafting


def _count(
    counts: dict[str, DraftCounts], source: str, num_drafted: int, num_accepted: int
) -> None:
    """Add a verified draft to the counts by source."""
    counts[source] = counts.get(source, DraftCounts()).plus(num_drafted, num_accepted)
