"""Speculative decoding: how many draft tokens each sequence gets, and their outcome.

The tokens of a draft are rows of the next pass behind the certain one. Each row samples its own
token, as it would alone; the drafts are accepted as far as they are those tokens. A row's logits do
not depend on what else is in the batch, so text, tokens and log probabilities are those without
drafts, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from typing import Any

from kvboost_edge.engine.request.request import Request
from kvboost_edge.engine.schedule.feature import Drafting
from kvboost_edge.engine.schedule.planners import DraftPlanner
from kvboost_edge.engine.schedule.sequence import Sequence
from kvboost_edge.engine.spec_decode.drafting import (
    Drafter,
    DraftProposal,
    TenantHistory,
    most_drafted,
)

__all__ = ["Speculation"]

_FORCED = 0.98  # a grammar leaves one text, and the model may cut it into other tokens


class DraftTokens(Drafting):
    """The draft tokens of one sequence, and who proposes them."""

    proposes = True

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter
        self._num_drafted = 0
        self._num_accepted = 0

    def count(self, num_drafted: int, num_accepted: int) -> None:
        self.tokens = []
        if num_drafted:
            self._num_drafted += num_drafted
            self._num_accepted += num_accepted

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        self.drafter.learn(num_drafted, num_accepted)

    def release(self) -> None:
        self.drafter.release()

    def result_fields(self) -> dict[str, Any]:
        return {"drafted_tokens": self._num_drafted, "accepted_tokens": self._num_accepted}


class Speculation(DraftPlanner):
    """Drafts of all sequences of an engine: who gets how many, and what became of them."""

    def __init__(self, *, closes_blocks: bool, history_bytes: int | None = None) -> None:
        """closes_blocks: a block is quantized once its last slot is written, which only a certain
        token may do then. history_bytes: bound of what drafts are found in; None: the default.
        """
        self.memory = (
            TenantHistory() if history_bytes is None else TenantHistory.within(history_bytes)
        )
        self.num_drafted = self.num_accepted = 0
        self._closes_blocks = closes_blocks

    def room(self, sequence: Sequence, block_size: int) -> int:
        """Most drafts that a sequence with one token to compute may have."""
        request = sequence.request
        known = sequence.num_tokens
        most = min(request.max_draft_tokens, request.max_tokens - known - 1)
        if not self._closes_blocks:
            return most
        # Of a table that shares spans the last part may begin anywhere.
        offset = (known - sequence.blocks.segments[-1].first_position) % block_size
        return min(most, block_size - 1 - offset)

    def drafter(self, request: Request) -> Drafter | None:
        """Return the drafter of a request; None if it takes no drafts."""
        return (
            Drafter(
                request.root,
                self.memory,
                request.max_tokens,
                reads_history=request.uses_cache,
            )
            if request.max_draft_tokens
            else None
        )

    def drafting(self, request: Request) -> Drafting:
        """Return the draft tokens of a new sequence; the null object where it wants none."""
        drafter = self.drafter(request)
        return Drafting() if drafter is None else DraftTokens(drafter)

    def draft(
        self, running: Several[Sequence], wanted: Mapping[int, int], budget: int, block_size: int
    ) -> list[Sequence]:
        """Give draft tokens to sequences that compute one token; return those that have some.

        Args:
            wanted: tokens that the step computes, by the sequence's index.
            budget: rows that the step has room for besides those; while others wait, no sequence
                gets more than an equal part of them.
        """
        num_rows = sum(wanted.values())
        proposed: list[tuple[Sequence, DraftProposal]] = []
        for sequence in running:
            if (
                sequence.drafting.proposes
                and wanted.get(sequence.index) == sequence.num_pending == 1
            ):
                most = self.room(sequence, block_size)
                draft = _propose(sequence, most) if most > 0 else None
                if draft is not None:
                    proposed.append((sequence, draft))
        weighed = [draft for sequence, draft in proposed if not sequence.request.always_drafts]
        level = most_drafted(weighed, num_rows) if weighed else 0
        for waiting, (sequence, draft) in zip(range(len(proposed), 0, -1), proposed, strict=True):
            count = min(
                len(draft.token_ids) if sequence.request.always_drafts else level,
                -(-budget // waiting),
            )
            sequence.drafting.tokens = draft.token_ids[:count]
            budget -= len(sequence.drafting.tokens)
        return [sequence for sequence, _ in proposed if sequence.drafting.tokens]

    @property
    def memory_bytes(self) -> int:
        return self.memory.nbytes

    def forget_all(self) -> None:
        self.memory.forget()

    def remember(self, sequence: Sequence) -> None:
        """A request is done: what was new in its prompt, and its answer, may come again."""
        if sequence.drafting.proposes and sequence.uses_cache:
            self.memory.keep(
                sequence.request.root, sequence.token_ids[sequence.num_cached_tokens :]
            )

    def settle(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """What became of a step's draft."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        sequence.drafting.learn(num_drafted, num_accepted)


def _propose(sequence: Sequence, most: int) -> DraftProposal | None:
    """Return what is sure to follow by the sequence's grammar, else what its drafter proposes."""
    forced = sequence.grammar.forced()[:most]
    if forced:
        return DraftProposal(forced, _FORCED)
    assert isinstance(sequence.drafting, DraftTokens), "others are not asked"
    return sequence.drafting.drafter.propose(sequence.token_ids, most)
