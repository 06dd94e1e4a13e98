"""Accepted draft tokens on their way into the recurrent state of hybrid models.

What a pass was given as a guess no slot has seen: it leaves the state behind the last certain token
of each sequence, and apart from that what its drafts bring to a state. Once it is known which of
them are right the states take those in. So a slot never holds a wrong guess, and between two steps
it holds the state of exactly the tokens that are computed.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import BatchLayout, PassStates
from kvboost_edge.engine.schedule.sequence import Sequence
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.runners.base import Runner

__all__ = ["AcceptedDrafts", "End"]


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """Of a sequence: why it is done, or what failed."""

    sequence: Sequence
    reason: str = ""
    error: Exception | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Turn:
    """What the runner has to do: the arguments of `Runner.accept_drafts`, and whose drafts they
    are.
    """

    layout: BatchLayout
    accepted: npt.NDArray[np.int32]
    slots: PassStates
    sequences: list[Sequence]


class AcceptedDrafts:
    """Of one pass after another: `commit` for each sequence of it, then `plan`, where that says so
    `take_in`, and `ends`. Where the model keeps no states nothing is left to do.

    `take_in` reads and writes memory as a pass does, and nothing of the bookkeeping: as long as it
    takes anybody may read that, and reset the cache.
    """

    def __init__(self, runner: Runner, manager: KVCacheManager) -> None:
        self._runner = runner
        self._manager = manager
        self._waiting: dict[int, str] = {}  # by a sequence's number: why it ends then, if it does
        self._turn: _Turn | None = None
        self._error: Exception | None = None

    def commit(self, work: ScheduledTokens[Sequence], reason: str | None) -> str | None:
        """Commit what is computed; with states and right drafts only what is certain, and then the
        sequence must not end yet: None instead of the reason that it ends for.
        """
        sequence = work.sequence
        if self._manager.states is None or sequence.num_computed_tokens <= work.certain_stop:
            self._commit(sequence, sequence.num_computed_tokens)
            return reason
        self._commit(sequence, work.certain_stop)
        self._waiting[sequence.index] = reason or ""
        return None

    def plan(self, works: list[ScheduledTokens[Sequence]], layout: BatchLayout) -> bool:
        """Which slots what waits of the pass of these works goes to; whether anything does."""
        states = self._manager.states
        if states is None or not self._waiting:
            return False
        accepted, read, written = (np.zeros(len(works), np.int32) for _ in range(3))
        sequences = []
        saves = []
        for i, work in enumerate(works):
            if work.sequence.index not in self._waiting:
                continue
            start = work.certain_stop
            stop = work.sequence.num_computed_tokens
            plan = states.plan(work.sequence.blocks, start, stop)
            accepted[i] = stop - start
            read[i] = plan.read
            written[i] = plan.write
            saves += [(i, rows, slot) for rows, slot in plan.saves]
            sequences.append(work.sequence)
        slots = PassStates(read, written, np.array(saves, np.int32).reshape(-1, 3))
        self._turn = _Turn(layout, accepted, slots, sequences)
        return True

    def take_in(self) -> None:
        """Let the states take that in."""
        assert self._turn is not None  # there is a plan
        try:
            self._runner.accept_drafts(self._turn.layout, self._turn.accepted, self._turn.slots)
        except Exception as error:
            self._error = error

    def ends(self) -> list[End]:
        """Commit what was taken in; who ends with it. An error of the runner ends all whose drafts
        they are, and is none to those that were done with them.
        """
        if self._turn is None:
            return []
        sequences = self._turn.sequences
        waiting = self._waiting
        error = self._error
        self._waiting = {}
        self._turn = None
        self._error = None
        if error is not None:
            reasons = [(sequence, waiting[sequence.index]) for sequence in sequences]
            return [
                End(one, reason) if reason else End(one, error=error) for one, reason in reasons
            ]
        for sequence in sequences:
            self._commit(sequence, sequence.num_computed_tokens)
        return [End(one, reason) for one in sequences if (reason := waiting[one.index])]

    def _commit(self, sequence: Sequence, num_computed: int) -> None:
        self._manager.commit(sequence.blocks, sequence.token_ids, num_computed)
