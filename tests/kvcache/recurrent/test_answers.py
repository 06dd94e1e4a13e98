"""Snapshots of answers: one moving snapshot per answer, also with draft tokens and failed passes."""

import pytest

from helpers.kvcache.manager_cases import ROOT, B
from helpers.kvcache.recurrent_snapshots import cold, manager_of, run_pass, states_of


def test_an_answer_leaves_one_snapshot_that_moves():
    manager = manager_of()
    tokens = list(range(6))
    table = manager.open_table(tokens, ROOT)
    run_pass(manager, table, tokens)
    kept = []
    used = 0
    for token in range(30):
        tokens.append(token)
        kept += [len(tokens) for _ in run_pass(manager, table, tokens).slots]
        used = max(used, states_of(manager).slots.num_used)
        manager.check_invariants([table])
    assert kept == [*range(8, 37, B)]
    assert states_of(manager).slots.counts()["answer"] == 1
    assert used == 3, "slots must be used only for the prompt, the answer and the running state"
    manager.free(table)
    assert manager.peek([*tokens, 1], ROOT) == 36


def test_small_states_of_an_answer_are_checkpoints_except_the_last():
    """A long answer evicts neither prompt ends nor message boundaries of other requests. Its own
    checkpoints stay as long as there is room.
    """
    manager = manager_of(num_slots=12, every_block=True)
    tokens = list(range(6))
    states = states_of(manager)
    cold(manager, [99] * 9, hints=(5,))
    table = manager.open_table(tokens, ROOT)
    run_pass(manager, table, tokens)
    states.drain_kept()
    for stop in range(7, 26):  # one token at a time
        tokens.append(stop)
        run_pass(manager, table, tokens)
        manager.check_invariants([table])
    assert states.slots.counts() == {
        "prompt": 2,
        "hint": 1,
        "junction": 0,
        "answer": 1,
        "backbone": 4,
    }
    tokens += range(100, 111)  # accepted draft tokens
    run_pass(manager, table, tokens)
    assert states.slots.counts() == {
        "prompt": 2,
        "hint": 1,
        "junction": 0,
        "answer": 1,
        "backbone": 7,
    }
    assert manager.peek([*tokens, 1], ROOT) == 36
    assert manager.peek(tokens[:26], ROOT) == 24
    assert not states.drain_kept()
    for _ in range(10):
        tokens += range(B)
        run_pass(manager, table, tokens)
    assert states.slots.counts() == {
        "prompt": 2,
        "hint": 1,
        "junction": 0,
        "answer": 1,
        "backbone": 7,
    }
    assert manager.peek([99] * 9, ROOT) == 8
    last = table.block_ids[len(tokens) // B - 1]
    manager.free(table)
    assert states.drain_kept() == [last], "only one state of an answer must be stored in tiers"
    manager.check_invariants(())


def test_a_snapshot_in_use_stays_when_the_answer_continues():
    manager = manager_of()
    tokens = list(range(6))
    table = manager.open_table(tokens, ROOT)
    tokens += range(4)
    run_pass(manager, table, tokens)
    other = manager.open_table([*tokens[:8], 9], ROOT)
    assert other.num_cached_tokens == 8
    tokens += range(8)
    run_pass(manager, table, tokens)
    assert manager.peek([*tokens[:8], 9], ROOT) == 8


def test_an_answers_snapshot_moves_without_free_slots():
    manager = manager_of(num_slots=2)
    tokens = list(range(6))
    table = manager.open_table(tokens, ROOT)
    for token in range(20):
        run_pass(manager, table, tokens)
        tokens.append(token)
    assert manager.peek(tokens, ROOT) == 24


@pytest.mark.parametrize("num_slots", [12, 2])
def test_a_failed_pass_keeps_the_previous_answer_snapshot(num_slots):
    """The previous snapshot stays until the next one is written, even if no slot is free."""
    manager = manager_of(num_slots=num_slots)
    tokens = list(range(6))
    table = manager.open_table(tokens, ROOT)
    for token in range(6):
        run_pass(manager, table, tokens)
        tokens.append(token)
    assert manager.peek([*tokens, 1], ROOT) == 2 * B
    manager.extend(table, 3 * B)
    states_of(manager).plan(table, 3 * B - 1, 3 * B)
    manager.free(table)
    manager.check_invariants([])
    assert manager.peek([*tokens, 1], ROOT) == 2 * B


@pytest.mark.parametrize(("num_slots", "found"), [(12, 2 * B), (2, 0)])
def test_failed_drafts_keep_the_previous_answer_snapshot(num_slots, found):
    """A snapshot inside a pass needs its slot before the pass runs. If none is free, the previous
    snapshot gives up its slot.
    """
    manager = manager_of(num_slots=num_slots)
    tokens = list(range(6))
    table = manager.open_table(tokens, ROOT)
    for token in range(4):
        run_pass(manager, table, tokens)
        tokens.append(token)
    assert manager.peek([*tokens, 1], ROOT) == 2 * B
    tokens += range(4)
    manager.extend(table, 3 * B + 2)
    assert len(states_of(manager).plan(table, 2 * B + 1, 3 * B + 2).saves) == 1
    manager.free(table)
    manager.check_invariants([])
    assert manager.peek([*tokens, 1], ROOT) == found


@pytest.mark.parametrize("fails", [True, False])
def test_drafts_keep_an_answer_snapshot_that_frees_no_slot(fails):
    """The pass itself reads that snapshot, so evicting it would not free a slot for the next one."""
    manager = manager_of(num_slots=2)
    tokens = list(range(6))
    table = manager.open_table(tokens, ROOT)
    for token in range(3):
        run_pass(manager, table, tokens)
        tokens.append(token)
    assert manager.peek(tokens, ROOT) == 2 * B
    tokens += range(6)
    manager.extend(table, 3 * B + 2)
    assert states_of(manager).plan(table, 2 * B, 3 * B + 2).saves == ()
    if not fails:
        manager.commit(table, tokens, 3 * B + 2)
        manager.check_invariants([table])
        assert manager.peek(tokens, ROOT) == 2 * B
        tokens += range(6)
        run_pass(manager, table, tokens[: 4 * B])
        assert manager.peek(tokens, ROOT) == 4 * B, (
            "the snapshot must move once the pass has another slot"
        )
    manager.free(table)
    manager.check_invariants([])
    assert manager.peek(tokens, ROOT) == (2 if fails else 4) * B


def test_the_final_answer_snapshot_is_stored_in_tiers():
    manager = manager_of()
    tokens = list(range(5 * B))
    states = states_of(manager)
    prompt = 2 * B + 1
    table = manager.open_table(tokens[:prompt], ROOT)
    run_pass(manager, table, tokens[:prompt])
    assert states.drain_kept() == [table.block_ids[1]]
    for stop in range(prompt + 1, 4 * B + 2):
        run_pass(manager, table, tokens[:stop])
        assert not states.drain_kept()
    last = table.block_ids[3]
    manager.free(table)
    assert states.drain_kept() == [last]
    manager.check_invariants(())


@pytest.mark.parametrize("ends", [False, True])
def test_a_snapshot_shared_with_another_prompt_stays(
    ends,
):
    """The answer's snapshot belongs to an equal published block that no table holds."""
    manager = manager_of(num_blocks=8)
    tokens = list(range(4 * B + 1))
    states = states_of(manager)
    equal = manager.open_table(tokens, ROOT)
    run_pass(manager, equal, tokens)
    table = manager.open_table(tokens[:6], ROOT, use_cache=False)
    sequence = tokens[:6]
    for token in tokens[6 : 2 * B + 1]:
        run_pass(manager, table, sequence)
        sequence.append(token)
    block_id = equal.block_ids[1]
    assert states.slots.of_block(block_id) is not None
    manager.free(equal)
    other = manager.open_table([200], ROOT)
    answer = [200]
    while block_id not in other.block_ids or states.slots.of_block(block_id) is None:
        run_pass(manager, other, answer)
        answer.append(len(answer))
    states.drain_kept()
    if ends:
        manager.free(table)
        assert block_id not in states.drain_kept(), "the snapshot of the other prompt must move on"
    else:
        sequence += range(B - 1)
        run_pass(manager, table, sequence)
    assert states.slots.of_block(block_id) is not None
