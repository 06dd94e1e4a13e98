"""Reasoning budgets, which end a model's reasoning after a number of tokens.

When the budget is used up, the only token that may follow is the next one of the closing marker.
Forced tokens are ordinary tokens of the sequence: they are sampled from masked logits, stored in
the KV cache and hashed. A budget advances with accepted tokens only, so it depends neither on the
batch nor on draft tokens or preemptions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.request.request import RequestFeature, RequestInputs
from kvboost_edge.engine.request.requested_grammar import KINDS, MadeGrammar
from kvboost_edge.engine.schedule.feature import Constraint, Lookahead
from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.thinking import (
    ReasoningLimit,
    ReasoningTracker,
    reasoning_end,
    reasoning_state,
)

__all__ = ["ReasoningBudget", "ReasoningFields"]

Floats = npt.NDArray[np.float32]

_LEAST_ANSWER = 1  # tokens of an answer's text for which a thought leaves room


class ReasoningFields(RequestFeature):
    """The request field for reasoning budgets.

    Args:
        suppressed: token ids that the model never generates.
    """

    def __init__(self, tokenizer: Tokenizer, suppressed: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._suppressed = frozenset(suppressed)

    def prepare(self, inputs: RequestInputs) -> dict[str, Any]:
        """Return the limit of the request's reasoning, or None without a budget.

        Raises:
            RequestError: the model's reasoning cannot be limited, or the request has none.
        """
        params = inputs.params
        budget = params.reasoning_budget
        if budget is None or budget < 0:
            return {}
        if not inputs.generates:
            raise RequestError(
                f"reasoning_budget={budget} needs generated text, but this request generates none; "
                "leave it out",
                option="reasoning_budget",
            )
        end = reasoning_end(self._tokenizer, params.reasoning_budget_message or "")
        if banned := self._suppressed.intersection(end.with_message):
            raise RequestError(
                f"reasoning_budget={budget} needs token {min(banned)}, which the model's files "
                "suppress; leave it out",
                option="reasoning_budget",
            )
        state = reasoning_state(self._tokenizer, inputs.token_ids)
        if state == "closed":
            return {}
        given = {kind: getattr(params, kind) for kind in KINDS}
        for kind, value in given.items():
            if value is not None and not isinstance(value, MadeGrammar):
                raise RequestError(
                    f"reasoning_budget={budget} and {kind} are both given, but {kind} applies from "
                    "the first token, so there is no reasoning to limit; leave one of them out",
                    option="reasoning_budget",
                )
        return {"reasoning": ReasoningLimit(budget, self._tokenizer.turn_format, state, end)}


class ReasoningBudget(Constraint):
    """The reasoning budget of one sequence, around its other constraint.

    The thought also ends early enough for the closing marker and an answer, if the output is
    limited. A grammar that forbids the closing marker takes precedence. Inside a tool call nothing
    is counted or forced.

    Args:
        limit: limit of the request.
        max_new_tokens: maximum number of output tokens.
        tokenizer: tokenizer of the model.
        inner: structured output, or a null constraint.
        room: float32 [vocab_size], the buffer for masked logits. All sequences of an engine share
            it.
    """

    def __init__(
        self,
        limit: ReasoningLimit,
        max_new_tokens: int,
        tokenizer: Tokenizer,
        inner: Constraint,
        room: Floats,
    ) -> None:
        self._inner = inner
        self._room = room
        self._budget = limit.budget
        self._end = limit.end
        self._has_channels = limit.format.channels is not None
        # None once nothing can be reasoning any more.
        self._tracker: ReasoningTracker | None = ReasoningTracker(
            tokenizer, limit.format, limit.state
        )
        self._num_left = max_new_tokens
        self._num_thought = 0
        self._recent: list[int] = []  # last tokens of the thought
        self._last: int | None = None
        self._closing: tuple[int, ...] = ()  # tokens to force
        self._begun = 0  # tokens of the closing marker that the model wrote before
        self._was_cut = False
        self._close_if_due()

    @property
    def is_ready(self) -> bool:
        return self._inner.is_ready

    @property
    def prepares(self) -> bool:
        return self._inner.prepares

    def admit(self, table: BlockTable) -> None:
        self._inner.admit(table)

    def forget(self) -> None:
        self._inner.forget()

    def release(self) -> None:
        self._inner.release()

    def result_fields(self) -> dict[str, Any]:
        return {**self._inner.result_fields(), "reasoning_tokens": self._num_thought}

    def constrain(self, logits: Floats, largest: int | None) -> tuple[Floats, int | None]:
        """Return the masked logits, and the index of the largest one or None if unknown."""
        allowed, largest = self._inner.constrain(logits, largest)
        if self._closing:
            token_id = self._closing[0]
            if allowed[token_id] > -np.inf:
                self._room.fill(-np.inf)
                self._room[token_id] = 0.0
                return self._room, token_id
            self._closing = ()
        if barred := self._barred():
            np.copyto(self._room, allowed)
            self._room[list(barred)] = -np.inf
            if self._room.max() > -np.inf:
                return self._room, None
        return allowed, largest

    def advance(self, token_id: int) -> bool:
        """Accept the chosen token and return whether the output is complete."""
        is_whole = self._inner.advance(token_id)
        self._num_left -= 1
        if self._tracker is not None:
            self._follow(self._tracker, token_id)
        self._last = token_id
        return is_whole

    def forced(self) -> list[int]:
        """Return the tokens that must follow."""
        return list(self._closing) or self._inner.forced()

    def lookahead(self) -> Lookahead:
        """Return the other constraint's. Forced tokens are drafts of their own."""
        return self._inner.lookahead()

    def _barred(self) -> tuple[int, ...]:
        """Return the tokens that would open or close another block after one was cut."""
        if not self._was_cut or self._tracker is None:
            return ()
        after = self._end.barred_after
        return self._end.barred if after is None or after == self._last else ()

    def _follow(self, tracker: ReasoningTracker, token_id: int) -> None:
        """Update the state after a token."""
        was_inside = tracker.inside
        is_forced = token_id in self._closing[:1]
        self._closing = self._closing[1:] if is_forced else ()
        tracker.push(token_id)
        if self._closing:
            return
        ended = was_inside and not tracker.inside
        self._was_cut |= is_forced or (ended and self._num_thought >= self._budget)
        if is_forced and tracker.inside:  # the tokens do not read as the marker
            self._tracker = None
            return
        if tracker.inside:
            self._recent = [*self._recent, token_id][-len(self._end.marker) :] if was_inside else []
            self._num_thought += was_inside and not tracker.in_call
        elif is_forced:
            self._num_thought -= self._begun
        elif ended:
            self._num_thought -= self._num_begun()
        # A turn that is one text has its reasoning at the beginning.
        is_over = tracker.answered or (ended and not is_forced)
        if is_over and not self._has_channels:
            self._tracker = None
        else:
            self._close_if_due()

    def _close_if_due(self) -> None:
        """Force the end of the thought if the budget, or the room for an answer, is used up."""
        tracker = self._tracker
        if tracker is None or not tracker.inside or tracker.in_call:
            return
        begun = self._num_begun()
        # What the model began is completed, without the message.
        end = self._end
        ways = [end.marker[begun:] + end.behind] if begun else [end.closing, end.with_message]
        least = end.num_lead + _LEAST_ANSWER
        for way in ways:
            room = self._num_left - len(way)
            is_due = self._num_thought >= self._budget and (way is ways[0] or room >= least)
            if is_due or 0 <= room <= least:
                self._closing = way
                self._begun = begun

    def _num_begun(self) -> int:
        """Return the number of tokens at the end of the thought that begin the closing marker."""
        marker = self._end.marker
        counts = range(len(marker) - 1, 0, -1)
        return next((n for n in counts if self._recent[-n:] == list(marker[:n])), 0)
