"""Recurrent states on their way to tiers: each is saved once, none that must stay in memory, and
only as many bytes as the steps leave time for.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from engine.schedule.test_state_schedules import bench_of, computed_by
from helpers.engine.fake_runner import ROOT, Bench
from helpers.engine.hand_io_thread import DictTier, HandIOThread
from kvboost_edge.engine.offload.state_saving import SavedStates

PROMPT = list(range(100))
SIZE = 64  # bytes of a state


class Saving(NamedTuple):
    """Engine without tiers of its own, and the saver of its states, which works on request."""

    bench: Bench
    saved: SavedStates
    io_thread: HandIOThread
    tier: DictTier

    def save(self, most_bytes):
        """Save the next states and return how many were written."""
        before = self.tier.num_written
        self.saved.save_next(most_bytes)
        self.io_thread.pump()
        return self.tier.num_written - before


def saving():
    bench = bench_of()
    tier = DictTier()
    spec = bench.parts.backend.spec
    assert spec.bytes_per_state == SIZE
    io_thread = HandIOThread([tier], spec.bytes_per_block, spec.bytes_per_state)
    io_thread.start(lambda piece: None)
    return Saving(
        bench, SavedStates(bench.manager, bench.parts.backend, io_thread), io_thread, tier
    )


def test_a_stored_state_is_not_copied_again(monkeypatch):
    one = saving()
    computed_by(one.bench, PROMPT)
    assert one.save(None) == 1
    states = one.bench.manager.states
    for block_id in states.slots.snapshots():
        states.slots.drop(block_id)
    assert computed_by(one.bench, PROMPT)[0] == 100, (
        "the prompt must be recomputed, so that its state is stored again"
    )
    assert len(states.slots.snapshots()) == 1
    pool = one.bench.parts.backend.states
    monkeypatch.setattr(
        pool, "read_slots", lambda slots: pytest.fail("a stored state was copied again")
    )
    assert one.save(None) == 0


def test_states_of_blocks_kept_inside_are_not_stored():
    one = saving()
    one.bench.manager.content.keep_inside(ROOT)
    computed_by(one.bench, PROMPT)
    assert len(one.bench.manager.states.slots.snapshots()) == 1
    assert one.save(None) == 0


def test_a_state_is_written_once_enough_write_budget_accumulated():
    one = saving()
    computed_by(one.bench, PROMPT)
    assert [one.save(20) for _ in range(5)] == [0, 0, 0, 1, 0]


def test_unused_write_budget_accumulates_up_to_one_state():
    one = saving()
    assert [one.save(40) for _ in range(9)] == [0] * 9
    for first in (0, 100):
        computed_by(one.bench, list(range(first, first + 50)))
    assert [one.save(0), one.save(0)] == [1, 0]
    assert [one.save(40), one.save(40)] == [0, 1]


def test_an_empty_queue_accepts_one_record_of_any_size():
    one = saving()
    assert one.io_thread.room_for(1 << 40) == 1
    computed_by(one.bench, PROMPT)
    one.saved.save_next(None)
    assert one.io_thread.room_for(1 << 40) == 0
    assert one.io_thread.room_for(SIZE) > 1
    one.io_thread.pump()
    assert one.io_thread.room_for(1 << 40) == 1
