"""Driver of a runner with recurrent state, without an engine. Tests choose the state slots in
addition to the KV blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from helpers.runners.paged_driver import DrivenSequence, PagedDriver
from kvboost_edge.backends.base import Backend, PassStates
from kvboost_edge.runners.base import Runner


class StateDriver(PagedDriver):
    """Driver in which each sequence has a slot that it reads and writes. Slots are poisoned first,
    so that reads of unwritten ones show.

    Attributes:
        wanted: slots for snapshots, by sequence id and by position.
        drafts: number of a sequence's last tokens that are drafts in its next pass, by
            sequence id.
    """

    def __init__(self, runner: Runner, backend: Backend) -> None:
        super().__init__(runner, backend)
        assert backend.states is not None
        self.pool = backend.states
        self.pool.poison(range(self.pool.num_slots))
        self.free = list(range(self.pool.num_slots))
        self.slots: dict[int, tuple[int, int]] = {}
        self.wanted: dict[int, dict[int, int]] = {}
        self.drafts: dict[int, int] = {}

    def open(self, token_ids: Sequence[int], read: int = -1) -> DrivenSequence:
        """Open a sequence whose first pass reads the slot `read`; with -1 it starts from an empty
        state.
        """
        sequence = super().open(token_ids)
        self.slots[id(sequence)] = (read, self.free.pop())
        return sequence

    def save(self, sequence: DrivenSequence, position: int) -> int:
        """Reserve a slot for the snapshot at a position, and return it."""
        slot = self.free.pop()
        self.wanted.setdefault(id(sequence), {})[position] = slot
        return slot

    def states(self, work: Sequence[tuple[DrivenSequence, int]]) -> PassStates:
        saves = []
        for index, (sequence, count) in enumerate(work):
            start = sequence.table.num_computed_tokens
            for position, slot in sorted(self.wanted.get(id(sequence), {}).items()):
                if start < position <= start + count:
                    saves.append((index, position - start, slot))
        both = [self.slots[id(sequence)] for sequence, _ in work]
        for sequence, _ in work:
            own = self.slots[id(sequence)][1]
            self.slots[id(sequence)] = (own, own)
        read, written = (np.array(each, np.int32) for each in zip(*both, strict=True))
        certain = np.array(
            [count - self.drafts.pop(id(sequence), 0) for sequence, count in work], np.int32
        )
        return PassStates(read, written, np.array(saves, np.int32).reshape(-1, 3), certain)
