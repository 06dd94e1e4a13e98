"""Drafts that were right, on their way into the states of models that keep some.

What a pass was given as a guess no slot has seen: it leaves the state behind the last certain token of each sequence,
and apart from that what its drafts bring to a state. Once it is known which of them are right the states take those in.
So a slot never holds a wrong guess, and between two steps it holds the state of exactly the tokens that are computed.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kvboost_edge.backends.base import BatchLayout, PassStates
from kvboost_edge.engine.sequence import Sequence
from kvboost_edge.engine.work import ScheduledTokens
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.runners.base import Runner

__all__ = ["AcceptedDrafts", "End"]


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """Of a sequence: why it is done, or what failed."""

    sequence: Sequence
    reason: str = ""
    error: Exception | None = None


class AcceptedDrafts:
    """Of one pass after another: `commit` for each sequence of it, then `take_in`. Where the model keeps no states
    nothing is left to do."""

    def __init__(self, runner: Runner, manager: KVCacheManager) -> None:
        self._runner, self._manager = runner, manager
        self._waiting: dict[int, str] = {}  # by a sequence's number: why it ends then, if it does

    def commit(self, work: ScheduledTokens[Sequence], reason: str | None) -> str | None:
        """Commit what is computed; with states and right drafts only what is certain, and then the sequence must not
        end yet: None instead of the reason that it ends for."""
        sequence = work.sequence
        if self._manager.states is None or sequence.num_computed_tokens <= work.certain_stop:
            self._commit(sequence, sequence.num_computed_tokens)
            return reason
        self._commit(sequence, work.certain_stop)
        self._waiting[sequence.index] = reason or ""
        return None

    def take_in(self, works: list[ScheduledTokens[Sequence]], layout: BatchLayout) -> list[End]:
        """Let the states take in what waits of the pass of these works, and commit that. Returns who ends with it; an
        error of the runner ends all whose drafts they are, and is none to those that were done with them."""
        waiting, self._waiting, states = self._waiting, {}, self._manager.states
        if states is None or not waiting:
            return []
        sequences = {i: work.sequence for i, work in enumerate(works) if work.sequence.index in waiting}
        accepted, read, written = (np.zeros(len(works), np.int32) for _ in range(3))
        saves = []
        for i, sequence in sequences.items():
            start, stop = works[i].certain_stop, sequence.num_computed_tokens
            plan = states.plan(sequence.blocks, start, stop)
            accepted[i], read[i], written[i] = stop - start, plan.read, plan.write
            saves += [(i, rows, slot) for rows, slot in plan.saves]
        slots = PassStates(read, written, np.array(saves, np.int32).reshape(-1, 3))
        try:
            self._runner.accept_drafts(layout, accepted, slots)
        except Exception as error:
            reasons = [(sequence, waiting[sequence.index]) for sequence in sequences.values()]
            return [End(one, reason) if reason else End(one, error=error) for one, reason in reasons]
        for sequence in sequences.values():
            self._commit(sequence, sequence.num_computed_tokens)
        return [End(one, reason) for one in sequences.values() if (reason := waiting[one.index])]

    def _commit(self, sequence: Sequence, num_computed: int) -> None:
        publish = sequence.request.publishes
        self._manager.commit(sequence.blocks, sequence.token_ids, num_computed, publish=publish)
