"""Tables that wait for blocks and a state from elsewhere: shared blocks, and the destination of the
state.
"""

import pytest

from helpers.kvcache.manager_cases import ROOT, B
from helpers.kvcache.recurrent_snapshots import cold, manager_of, states_of


def test_a_state_that_failed_to_load_is_not_a_snapshot():
    manager = manager_of()
    tokens = list(range(2 * B))
    states = states_of(manager)
    table = manager.open_load(tokens, ROOT)
    manager.extend(table, 2 * B)
    manager.commit(table, tokens, 2 * B)

    def fail(slot):
        raise MemoryError

    with pytest.raises(MemoryError):
        states.arrive(table, 2, fail)
    manager.free(table)
    assert not states.slots.snapshots()
    manager.check_invariants(())


def test_a_state_from_a_tier_is_not_recomputed():
    manager = manager_of()
    tokens = list(range(3 * B + 1))
    cold(manager, tokens)
    states = states_of(manager)
    for block_id in states.slots.snapshots():
        states.slots.drop(block_id)
    table = manager.open_load(tokens[: 3 * B], ROOT)
    assert (table.num_computed_tokens, manager.blocks_needed(table, 3 * B)) == (3 * B, 0)
    states.arrive(table, 2, lambda slot: None)
    assert states.num_replayed == 0
    manager.free(table)
    manager.check_invariants(())
    assert manager.peek(tokens, ROOT) == 2 * B


def test_waiting_for_a_deeper_state_keeps_the_present_one():
    manager = manager_of(num_slots=2)
    tokens = list(range(3 * B))
    kept = cold(manager, tokens[: B + 1])
    table = manager.open_load(tokens, ROOT)
    for number in range(3):
        cold(manager, [100 + number] * (2 * B + 1), table)
    assert states_of(manager).slots.of_block(table.block_ids[0]) == kept.slots[B]
    other = manager.open_table([7] * B, ROOT)
    manager.extend(other, B)
    assert not states_of(manager).has_room(table)
    for one in (table, other):
        manager.free(one)
    manager.check_invariants(())
