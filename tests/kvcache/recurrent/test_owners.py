"""Snapshots of several owners in one manager: no owner loses its share to another."""

import pytest

from helpers.kvcache.manager_cases import OTHER, ROOT, B
from helpers.kvcache.recurrent_snapshots import manager_of, run_pass, states_of

LOUD = b"loud"


def ends_of_prompts(manager, number):
    table = manager.open_table([number] * (2 * B + 1), OTHER, owner=LOUD)
    run_pass(manager, table, [number] * (2 * B + 1))
    manager.free(table)


def answers(manager, number):
    """Generate one answer token by token. Its snapshot moves to the end of its last full block."""
    table = manager.open_table([number], OTHER, owner=LOUD)
    for stop in range(1, 2 * B + 2):
        run_pass(manager, table, [number] * stop)
    manager.free(table)


def preempted(manager, number):
    """Free a table after the first block of its prompt, where its state stays."""
    table = manager.open_table([number] * (3 * B), OTHER, owner=LOUD)
    run_pass(manager, table, [number] * (3 * B), B)
    manager.free(table)


def arrivals(manager, number):
    """Load two blocks from elsewhere, and a state for the end of the first one."""
    tokens = [number] * (2 * B)
    table = manager.open_load(tokens, OTHER, owner=LOUD)
    manager.extend(table, 2 * B)
    manager.commit(table, tokens, 2 * B)
    states_of(manager).arrive(table, 1, lambda slot: None)
    manager.free(table)


@pytest.mark.parametrize("flood", [ends_of_prompts, answers, preempted, arrivals])
def test_one_owner_cannot_evict_anothers_share_of_slots(
    flood,
):
    manager = manager_of(num_blocks=200, num_slots=12)
    quiet = [
        [100 + number] * (2 * B + 1) for number in range(3)
    ]  # a quarter of the slots for each of the two
    for tokens in quiet:
        table = manager.open_table(tokens, ROOT, owner=b"quiet")
        run_pass(manager, table, tokens)
        manager.free(table)
    for number in range(20):
        flood(manager, number)
        manager.check_invariants([])
    assert [manager.peek(tokens, ROOT) for tokens in quiet] == [2 * B] * 3
    assert states_of(manager).slots.num_free <= 1, (
        "the other owner must get all other slots except its running one"
    )


def test_pinned_snapshots_are_taken_last_by_running_sequences():
    manager = manager_of(num_slots=8)
    tokens = [list(range(n, n + B + 1)) for n in (0, 100)]
    for one in tokens:
        table = manager.open_table(one, ROOT, owner=b"one")
        run_pass(manager, table, one)
        manager.free(table)
    manager.pins.add(tokens[0][:B], ROOT, until=1)
    running = [manager.open_table([200 + number], ROOT, owner=b"one") for number in range(7)]
    for table in running:
        manager.extend(table, 1)
    assert [manager.peek(one, ROOT) for one in tokens] == [B, 0]
