"""State slots on their own: references, snapshots and the order of eviction."""

import pytest

from helpers.raising import assert_raises
from kvboost_edge.errors import CacheCorruption, ConfigError
from kvboost_edge.kvcache.recurrent.slots import (
    ANSWER,
    BRANCH_POINT,
    CHECKPOINT,
    HINT,
    PROMPT,
    REASONS,
    StateSlots,
)


def kept(slots, block_id, reason, owner=b""):
    """Attach a snapshot to the end of a block and return its slot."""
    slot = slots.take(reason, owner)
    assert slot is not None
    assert slots.attach(slot, block_id, reason, owner)
    return slot


def blocks(slots):
    return set(slots.snapshots())


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "3"])
def test_the_number_of_slots_must_be_positive(wrong):
    assert_raises(ConfigError, "num_state_slots", StateSlots, wrong)


def test_slots_are_allocated_once_and_released():
    slots = StateSlots(3)
    taken = [slots.take() for _ in range(3)]
    assert sorted(slot for slot in taken if slot is not None) == [0, 1, 2]
    assert (slots.take(), slots.num_available, slots.num_used) == (None, 0, 3)
    slots.release(taken[1])
    assert slots.take() == taken[1]
    with pytest.raises(CacheCorruption, match="is empty"):
        StateSlots(1).release(0)
    with pytest.raises(CacheCorruption, match="is empty"):
        StateSlots(1).share(0)


def test_a_snapshot_in_use_is_not_evicted():
    slots = StateSlots(2)
    first = kept(slots, 10, PROMPT)
    second = kept(slots, 11, PROMPT)
    slots.share(first)
    slots.share(second)
    slots.release(second)  # makes the first one the older
    assert slots.num_available == 1
    assert slots.take() == second
    assert slots.take() is None
    assert blocks(slots) == {10}
    slots.release(first)
    assert slots.take() == first
    assert blocks(slots) == set()


def test_a_dropped_snapshot_stays_while_it_is_read():
    slots = StateSlots(1)
    slot = kept(slots, 10, PROMPT)
    slots.share(slot)
    slots.drop(10)
    assert slots.of_block(10) is None
    assert slots.take() is None
    assert slots.is_own(slot), "a dropped snapshot must not be shared again"
    slots.check([slot])
    slots.release(slot)
    assert slots.take() == slot


def test_the_least_recently_used_snapshot_of_a_class_is_evicted_first():
    slots = StateSlots(3)
    for block_id in (10, 11, 12):
        kept(slots, block_id, BRANCH_POINT)
    reader = slots.of_block(10)
    assert reader is not None
    slots.share(reader)
    slots.release(reader)
    kept(slots, 13, HINT)
    assert blocks(slots) == {10, 12, 13}


def test_keeping_a_snapshot_again_renews_it():
    """An equal prompt ends at the same block: its slot is not needed, but the snapshot counts as
    used.
    """
    slots = StateSlots(3)
    kept(slots, 10, PROMPT)
    kept(slots, 11, PROMPT)
    again = slots.take(PROMPT)
    assert again is not None
    assert not slots.attach(again, 10, PROMPT)
    for block_id in (12, 13):
        kept(slots, block_id, PROMPT)
    assert blocks(slots) == {10, 12, 13}


def test_eviction_order_of_snapshot_kinds():
    slots = StateSlots(4)
    kept(slots, 10, ANSWER)
    kept(slots, 11, BRANCH_POINT)
    kept(slots, 12, PROMPT)
    kept(slots, 13, CHECKPOINT)
    for expected in ({10, 11, 12}, {10, 11}, {10}, set()):
        assert slots.take() is not None
        assert blocks(slots) == expected


def test_less_valuable_snapshots_do_not_evict_more_valuable_ones():
    slots = StateSlots(2)
    kept(slots, 10, HINT)
    kept(slots, 11, ANSWER)
    assert slots.take(CHECKPOINT) is None
    assert slots.take(PROMPT) is None
    assert blocks(slots) == {10, 11}
    assert kept(slots, 12, BRANCH_POINT) is not None
    assert blocks(slots) == {11, 12}


def test_unused_snapshots_age_and_are_evicted():
    """An answer snapshot that no prompt resumes is evicted when the eighth branch point is kept."""
    slots = StateSlots(4)
    kept(slots, 10, ANSWER)
    for count in range(1, 20):
        kept(slots, 100 + count, BRANCH_POINT)
        if 10 not in blocks(slots):
            break
    assert count == 8, "the eighth branch point must evict the answer snapshot"


def test_checkpoints_and_moving_answers_do_not_age_others():
    """A long prompt or answer may have a checkpoint after each block. If these counted, message
    boundaries would soon be evicted.
    """
    slots = StateSlots(4)
    kept(slots, 10, HINT)
    kept(slots, 11, PROMPT)
    tail = 11
    for block_id in range(100, 200):
        kept(slots, block_id, CHECKPOINT)
        slot = slots.take(ANSWER)
        assert slot is not None
        slots.attach(slot, 1000 + block_id, ANSWER, moved=tail > 1000)
        if tail > 1000:
            slots.demote(tail)
        tail = 1000 + block_id
    assert blocks(slots) == {10, 11, 1198, 1199}, (
        "the latest answer and the one before it, as a checkpoint, must stay"
    )
    assert slots.counts() == {"prompt": 1, "answer": 1, "junction": 0, "hint": 1, "backbone": 1}
    slots.check(())


@pytest.mark.parametrize("reason", [BRANCH_POINT, HINT])
def test_use_renews_shorter_snapshots_of_the_chain(reason):
    slots = StateSlots(4)
    kept(slots, 1, CHECKPOINT)
    for block_id in (2, 3, 4):
        kept(slots, block_id, reason)
    slots.use_first([1, 2, 3])
    slots.use_first([7, 8])
    for expected in ({2, 3, 4}, {2, 4}, {2}, set()):
        assert slots.take() is not None
        assert blocks(slots) == expected


def test_pinned_snapshots_are_evicted_only_for_running_sequences():
    slots = StateSlots(4, pinned={10, 11})
    kept(slots, 10, PROMPT)
    kept(slots, 11, CHECKPOINT)
    for block_id in (12, 13, 14):
        kept(slots, block_id, PROMPT)
    assert blocks(slots) == {10, 12, 13, 14}, "checkpoints of a pinned prompt may be evicted"
    kept(slots, 15, PROMPT)
    assert blocks(slots) == {10, 13, 14, 15}
    assert [slots.take(PROMPT) is None for _ in range(4)] == [False, False, False, True]
    assert [slots.take() is None, slots.take() is None] == [False, True]


def test_pins_use_at_most_half_the_slots():
    slots = StateSlots(4, pinned={0, 1, 2})
    for block_id in (0, 1, 2, 10, 11, 12, 13):
        kept(slots, block_id, PROMPT)
    assert blocks(slots) == {1, 2, 12, 13}
    slots.check(())


def test_a_flood_leaves_other_owners_their_share():
    slots = StateSlots(8)
    for block_id in range(4):
        kept(slots, block_id, PROMPT, b"quiet")
    for block_id in range(100, 140):
        kept(slots, block_id, PROMPT, b"loud")
    assert {block_id for block_id in blocks(slots) if block_id < 100} == {2, 3}, (
        "each of two owners must keep a quarter of the slots"
    )
    slots.check(())
    for _ in range(8):
        assert slots.take(owner=b"loud") is not None, (
            "a running sequence must get a slot of any owner"
        )
    assert blocks(slots) == set()


def test_a_new_owner_gets_its_share():
    slots = StateSlots(8)
    for block_id in range(8):
        kept(slots, block_id, PROMPT, b"old")
    taken = [slots.take(PROMPT, b"new") for _ in range(8)]
    assert [slot is None for slot in taken] == [False] * 6 + [True] * 2
    assert blocks(slots) == {6, 7}


def test_an_equal_snapshot_is_merged_with_the_better_reason():
    slots = StateSlots(3)
    first = kept(slots, 10, CHECKPOINT)
    second = slots.take()
    assert second is not None
    assert not slots.attach(second, 10, PROMPT)
    assert (slots.of_block(10), slots.num_used) == (first, 1)
    assert slots.counts() == {**dict.fromkeys(REASONS, 0), "prompt": 1}
    third = slots.take()
    assert third is not None
    assert not slots.attach(third, 10, ANSWER), "the end of a prompt must keep its reason"
    assert slots.counts()["prompt"] == 1
    slots.check([])


def test_a_superseded_answer_snapshot_is_dropped_unless_read():
    slots = StateSlots(4)
    slot = kept(slots, 10, ANSWER)
    kept(slots, 11, PROMPT)
    assert [slots.is_passed(block_id) for block_id in (10, 11, 12)] == [True, False, False]
    slots.share(slot)
    slots.release(slot)
    assert not slots.is_passed(10)


def test_a_shared_slot_does_not_become_a_snapshot():
    slots = StateSlots(2)
    slot = slots.take()
    assert slot is not None
    slots.share(slot)
    assert_raises(CacheCorruption, "cannot become a snapshot", slots.attach, slot, 10, PROMPT)


def test_check_detects_a_lost_reference():
    slots = StateSlots(3)
    slot = slots.take()
    assert slot is not None
    slots.check([slot])
    assert_raises(CacheCorruption, "count", slots.check, [])
    kept(slots, 10, PROMPT)
    slots._num_idle = 0
    assert_raises(CacheCorruption, "count of idle snapshots", slots.check, [slot])
