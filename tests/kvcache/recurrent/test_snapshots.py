"""Recurrent states of tables: the slots that a pass reads and writes, and their later reuse."""

import pytest

from helpers.kvcache.manager_cases import ROOT, B
from helpers.kvcache.recurrent_snapshots import cold, manager_of, rows, run_pass, states_of
from helpers.raising import assert_raises
from kvboost_edge.errors import CacheCorruption, CapacityError


def test_a_failed_pass_leaves_no_snapshot():
    manager = manager_of()
    tokens = list(range(4 * B))
    table = manager.open_table(tokens, ROOT)
    run_pass(manager, table, tokens, 2 * B)
    manager.extend(table, 3 * B)
    states_of(manager).plan(table, 2 * B, 3 * B)
    manager.free(table)  # its slot holds what the failed pass wrote
    manager.check_invariants([])
    assert states_of(manager).slots.num_used == 0
    assert manager.peek(tokens, ROOT) == 0


def test_a_preempted_table_leaves_a_snapshot_at_a_block_end():
    manager = manager_of()
    tokens = list(range(4 * B))
    table = manager.open_table(tokens, ROOT)
    run_pass(manager, table, tokens, 2 * B)
    manager.free(table)
    manager.check_invariants([])
    assert manager.open_table(tokens, ROOT).num_cached_tokens == 2 * B


def test_a_snapshot_takes_the_slot_and_the_next_pass_uses_another():
    manager = manager_of()
    tokens = list(range(3 * B))
    table = manager.open_table(tokens, ROOT)
    first = run_pass(manager, table, tokens)
    assert (first.plan.saves, first.plan.keeps) == (((2 * B, first.slots[2 * B]),), True)
    assert states_of(manager).slots.of_block(table.block_ids[2]) == first.plan.write
    tokens.append(1)
    second = run_pass(manager, table, tokens).plan
    assert second.read == first.plan.write
    assert second.write not in first.slots.values()
    assert not second.keeps
    tokens.append(2)
    third = run_pass(manager, table, tokens).plan
    assert third.read == third.write == second.write
    manager.free(table)
    manager.check_invariants([])


def test_a_concurrently_kept_state_is_not_duplicated():
    manager = manager_of()
    tokens = list(range(2 * B))
    first, second = (manager.open_table(tokens, ROOT) for _ in range(2))
    for one in (first, second):
        run_pass(manager, one, tokens)
        manager.check_invariants([first, second])
    assert states_of(manager).slots.of_block(first.block_ids[1]) is not None
    tokens.append(1)
    plans = [run_pass(manager, one, tokens).plan for one in (first, second)]
    assert (plans[0].read == plans[0].write, plans[1].read == plans[1].write) == (False, True)
    for one in (first, second):
        manager.free(one)
    manager.check_invariants([])


def test_a_snapshot_is_dropped_with_its_block():
    manager = manager_of(num_blocks=4)
    tokens = list(range(2 * B + 1))
    cold(manager, tokens)
    assert states_of(manager).slots.num_used == 1
    cold(manager, [7] * (4 * B))
    assert set(states_of(manager).slots.snapshots()) <= set(manager.content.under(ROOT))
    assert manager.reset() == 4
    assert states_of(manager).slots.num_used == 0


def test_a_table_without_a_slot_fails_and_changes_nothing():
    manager = manager_of(num_slots=1)
    first, second = (manager.open_table([number] * B, ROOT) for number in (1, 2))
    manager.extend(first, B)
    assert not states_of(manager).has_room(second)
    assert_raises(CapacityError, "max_state_bytes", manager.extend, second, B)
    assert second.block_ids == []
    progress = manager.progress
    manager.free(first)
    assert manager.progress > progress
    assert states_of(manager).has_room(second)


def test_a_fork_keeps_its_parents_planned_snapshots():
    manager = manager_of()
    tokens = list(range(3 * B + 1))
    table = manager.open_table(tokens, ROOT, hints=(2 * B,))
    run_pass(manager, table, tokens, 2)
    child = manager.fork(table)
    manager.free(table)
    assert rows(run_pass(manager, child, tokens)) == [2 * B - 2, 3 * B - 2]
    assert manager.peek([*tokens[: 2 * B], 7], ROOT) == 2 * B


def test_recomputed_tokens_count_once():
    """A fork that takes another slot for the same tokens does not count them twice."""
    manager = manager_of()
    tokens = list(range(3 * B + 2))
    cold(manager, tokens)
    branch = [*tokens[: 2 * B], 7, 7]
    table = manager.open_table(branch, ROOT)
    run_pass(manager, table, branch)
    child = manager.fork(table)
    branch.append(7)
    for one in (table, child):
        run_pass(manager, one, branch)
    assert states_of(manager).num_replayed == 2 * B
    manager.check_invariants([table, child])


def test_passes_that_do_not_continue_the_state_are_refused():
    manager = manager_of()
    tokens = list(range(3 * B))
    table = manager.open_table(tokens, ROOT)
    manager.extend(table, len(tokens))
    with pytest.raises(CacheCorruption, match="cannot continue"):
        states_of(manager).plan(table, 1, 4)
    assert_raises(CacheCorruption, "commit of", manager.commit, table, tokens, 4)
    states_of(manager).plan(table, 0, 5)
    with pytest.raises(CacheCorruption, match="cannot continue"):
        states_of(manager).plan(table, 0, 5)
    assert_raises(CacheCorruption, "commit of", manager.commit, table, tokens, 4)
    assert_raises(CacheCorruption, "being computed", manager.fork, table)


def test_check_detects_a_snapshot_of_a_dropped_block():
    manager = manager_of()
    cold(manager, list(range(B + 1)))
    slots = states_of(manager).slots
    (block_id, slot) = next(iter(slots.snapshots().items()))
    slots.drop(block_id)
    other = slots.take()
    assert other == slot
    slots.attach(other, 39, "prompt")
    assert_raises(CacheCorruption, "is not published", manager.check_invariants, [])
