"""Advancing the recurrent state of hybrid models over accepted draft tokens.

A forward pass does not apply draft tokens to a recurrent state. It writes the state after each
sequence's last certain token and stores the inputs of the draft tokens separately. Once the
accepted tokens are known, the state advances over their inputs. A slot therefore never holds the
state of a rejected token. Between two steps, the slot holds the state of exactly the computed
tokens.
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
    """A finished sequence, with its finish reason or the error that ended it."""

    sequence: Sequence
    reason: str = ""
    error: Exception | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _PendingAdvance:
    """The arguments of `Runner.accept_drafts` and the sequences of the draft tokens."""

    layout: BatchLayout
    accepted: npt.NDArray[np.int32]
    slots: PassStates
    sequences: list[Sequence]


class AcceptedDrafts:
    """The step that advances recurrent state over a pass's accepted draft tokens.

    After a pass, call `commit` for each sequence, then `plan_slots`, then `advance` if it returned
    True, and finally `ends`. Models without recurrent state skip `advance`.

    `advance` reads and writes KV and state memory but no bookkeeping. Other threads may read the
    bookkeeping or reset the cache while it runs.
    """

    def __init__(self, runner: Runner, manager: KVCacheManager) -> None:
        self._runner = runner
        self._manager = manager
        # Finish reason by sequence index, or "" if the sequence continues.
        self._waiting: dict[int, str] = {}
        self._pending: _PendingAdvance | None = None
        self._error: Exception | None = None

    def commit(self, work: ScheduledTokens[Sequence], reason: str | None) -> str | None:
        """Commit the computed blocks of a sequence.

        If the recurrent state must still advance over accepted draft tokens, the sequence is
        committed by `ends`.

        Returns:
            The reason if the sequence ends now, else None.
        """
        sequence = work.sequence
        if self._manager.states is None or sequence.num_computed_tokens <= work.certain_stop:
            self._commit(sequence, sequence.num_computed_tokens)
            return reason
        self._commit(sequence, work.certain_stop)
        self._waiting[sequence.index] = reason or ""
        return None

    def plan_slots(self, works: list[ScheduledTokens[Sequence]], layout: BatchLayout) -> bool:
        """Plan the state slots for `advance`.

        Returns:
            False if no recurrent state has to advance.
        """
        recurrent_states = self._manager.states
        if recurrent_states is None or not self._waiting:
            return False
        accepted, read, written = (np.zeros(len(works), np.int32) for _ in range(3))
        sequences = []
        saves = []
        for i, work in enumerate(works):
            if work.sequence.index not in self._waiting:
                continue
            start = work.certain_stop
            stop = work.sequence.num_computed_tokens
            plan = recurrent_states.plan(work.sequence.blocks, start, stop)
            accepted[i] = stop - start
            read[i] = plan.read
            written[i] = plan.write
            saves += [(i, rows, slot) for rows, slot in plan.saves]
            sequences.append(work.sequence)
        slots = PassStates(read, written, np.array(saves, np.int32).reshape(-1, 3))
        self._pending = _PendingAdvance(layout, accepted, slots, sequences)
        return True

    def advance(self) -> None:
        """Advance the recurrent state over the accepted draft tokens."""
        pending = self._pending
        assert pending is not None  # `plan_slots` must have returned True
        try:
            self._runner.accept_drafts(pending.layout, pending.accepted, pending.slots)
        except Exception as error:
            self._error = error

    def ends(self) -> list[End]:
        """Commit the sequences of `advance` and return those that end.

        If the runner failed, all of the sequences end. Those that were already finished keep their
        finish reason.
        """
        if self._pending is None:
            return []
        sequences = self._pending.sequences
        waiting = self._waiting
        error = self._error
        self._waiting = {}
        self._pending = None
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
        table = sequence.blocks
        shareable = sequence.request.num_shareable
        if table.num_computed_tokens < shareable < num_computed:
            self._manager.commit(table, sequence.token_ids, shareable)
        publish = num_computed <= shareable
        self._manager.commit(table, sequence.token_ids, num_computed, publish=publish)
