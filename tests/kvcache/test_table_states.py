"""The states of tables: which slot a pass reads and writes, and where snapshots are kept."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from kvboost_edge.errors import CacheCorruption, CapacityError
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.kvcache.snapshot_points import backbone_points, hint_points
from kvboost_edge.kvcache.table_states import PassSlots, StateSizes, TableStates
from kvcache_cases import OTHER, ROOT, B


def manager_of(
    num_blocks: int = 40, num_slots: int = 12, interval: int = 1024, every_block: bool = False
) -> KVCacheManager:
    return KVCacheManager(num_blocks, B, state_sizes=StateSizes(num_slots, interval, every_block))


def states_of(manager: KVCacheManager) -> TableStates:
    assert manager.states is not None
    return manager.states


class Kept(NamedTuple):
    """What a pass did, and between which positions."""

    plan: PassSlots
    start: int
    stop: int

    @property
    def slots(self) -> dict[int, int]:
        """Of each state that is kept, by how many rows it is behind."""
        inside = dict(self.plan.saves)
        return {**inside, self.stop - self.start: self.plan.write} if self.plan.keeps else inside


def run_pass(manager: KVCacheManager, table: BlockTable, tokens: list[int], stop: int | None = None) -> Kept:
    """One pass up to `stop`, all there are without one."""
    stop = len(tokens) if stop is None else stop
    manager.extend(table, stop)
    start = table.num_computed_tokens
    plan = states_of(manager).plan(table, start, stop)
    manager.commit(table, tokens, stop)
    return Kept(plan, start, stop)


def cold(manager: KVCacheManager, tokens: list[int], *others: BlockTable, hints: tuple[int, ...] = ()) -> Kept:
    """A whole prompt in one pass, and its table freed; `others` are live."""
    table = manager.open_table(tokens, ROOT, hints=hints)
    plan = run_pass(manager, table, tokens)
    manager.free(table)
    manager.check_invariants(others)
    return plan


def rows(kept: Kept) -> list[int]:
    return list(kept.slots)


def test_a_first_pass_reads_zeros_and_later_ones_their_own_slot() -> None:
    manager, tokens = manager_of(), list(range(3 * B))
    table = manager.open_table(tokens, ROOT)
    first = run_pass(manager, table, tokens, 5).plan
    second = run_pass(manager, table, tokens, 9).plan
    assert first.read == -1
    assert first.write == second.read == second.write


def test_a_hit_reads_the_snapshot_and_writes_another_slot() -> None:
    manager, tokens = manager_of(), list(range(2 * B + 1))
    kept = cold(manager, tokens)
    assert rows(kept) == [2 * B]
    table = manager.open_table(tokens, ROOT)
    assert (table.num_cached_tokens, table.num_matched_tokens, table.miss_reason) == (2 * B, 2 * B, "")
    manager.extend(table, len(tokens))
    again = states_of(manager).plan(table, 2 * B, len(tokens))
    assert again.read == kept.slots[2 * B]
    assert again.write != again.read


@pytest.mark.parametrize(("length", "expected"), [(1, []), (B, [B]), (B + 1, [B]), (2 * B, [B, 2 * B])])
def test_the_end_of_a_prompt_is_kept_for_itself_and_for_what_goes_on(length: int, expected: list[int]) -> None:
    assert rows(cold(manager_of(), list(range(length)))) == expected


def test_hints_are_kept_at_the_border_before_them() -> None:
    assert rows(cold(manager_of(), list(range(41)), hints=(0, 3, 9, 21, 22, 44, 999))) == [8, 20, 40]


def test_a_backbone_is_thinned_where_slots_are_few() -> None:
    assert rows(cold(manager_of(num_slots=80, interval=8), list(range(83)))) == [*range(8, 81, 8)]
    assert rows(cold(manager_of(num_slots=40, interval=8), list(range(83)))) == [8, 24, 56, 72, 80]
    assert rows(cold(manager_of(num_slots=40, every_block=True), list(range(41)))) == [*range(B, 41, B)]
    assert rows(cold(manager_of(num_slots=8, every_block=True), list(range(67)))) == [4, 20, 36, 52, 64]


def test_of_many_borders_the_first_and_those_at_doubling_distances_are_kept() -> None:
    """A long conversation that comes for the first time leaves others their states."""
    borders = tuple(range(5, 81, 5))
    kept = rows(cold(manager_of(num_slots=80), list(range(83)), hints=borders))
    assert kept == [n // B * B for n in borders]
    assert rows(cold(manager_of(num_slots=16), list(range(83)), hints=borders)) == [4, 64, 72, 80]


@pytest.mark.parametrize(
    ("num_slots", "expected"), [(1, [5, 80]), (8, [5, 80]), (12, [5, 75, 80]), (28, [5, 45, 65, 75, 80]), (64, None)]
)
def test_hints_are_a_part_of_the_slots(num_slots: int, expected: list[int] | None) -> None:
    borders = list(range(5, 81, 5))
    assert list(hint_points(borders, num_slots)) == (expected or borders)
    assert list(hint_points([], num_slots)) == []


@pytest.mark.parametrize("num_slots", [1, 2, 3, 16, 999])
@pytest.mark.parametrize("stop", [0, 1, 8, 9, 100, 4097])
def test_a_backbone_is_a_part_of_the_slots(num_slots: int, stop: int) -> None:
    small = list(backbone_points(3, stop, 8, num_slots, small=True))
    assert len(small) <= max(1, num_slots // 2)
    assert set(small) <= set(range(8, stop, 8))
    assert bool(small) == (stop > 8)
    if stop > 8:
        assert small[0] == 8
        large = list(backbone_points(3, stop, 8, num_slots, small=False))
        assert len(large) <= max(num_slots // 8, 2 + len(range(8, stop, 8)).bit_length())
        assert {large[0], large[-1]} >= {8}


def test_a_snapshot_is_found_once_its_pass_has_ended_and_not_before() -> None:
    manager, tokens = manager_of(), list(range(2 * B + 1))
    table = manager.open_table(tokens, ROOT)
    manager.extend(table, len(tokens))
    states_of(manager).plan(table, 0, len(tokens))
    assert manager.peek(tokens, ROOT) == 0
    manager.commit(table, tokens, len(tokens))
    assert manager.peek(tokens, ROOT) == 2 * B
    assert manager.peek(tokens, OTHER) == 0


def test_a_pass_that_failed_leaves_no_snapshot() -> None:
    manager, tokens = manager_of(), list(range(4 * B))
    table = manager.open_table(tokens, ROOT)
    run_pass(manager, table, tokens, 2 * B)
    manager.extend(table, 3 * B)
    states_of(manager).plan(table, 2 * B, 3 * B)
    manager.free(table)  # its slot holds what the failed pass wrote
    manager.check_invariants([])
    assert states_of(manager).slots.num_used == 0
    assert manager.peek(tokens, ROOT) == 0


def test_a_preempted_table_leaves_its_state_where_a_block_ends() -> None:
    manager, tokens = manager_of(), list(range(4 * B))
    table = manager.open_table(tokens, ROOT)
    run_pass(manager, table, tokens, 2 * B)
    manager.free(table)
    manager.check_invariants([])
    assert manager.open_table(tokens, ROOT).num_cached_tokens == 2 * B


def test_a_junction_is_kept_where_the_keys_and_values_end() -> None:
    manager, tokens = manager_of(), list(range(5 * B + 1))
    cold(manager, tokens)
    branch = [*tokens[: 3 * B], 7, 7, 7, 7, 7, 7]
    table = manager.open_table(branch, ROOT)
    assert (table.num_cached_tokens, table.num_matched_tokens, table.miss_reason) == (0, 3 * B, "state")
    assert rows(run_pass(manager, table, branch)) == [3 * B, 4 * B]
    assert states_of(manager).num_replayed == 3 * B
    assert manager.peek([*tokens[: 3 * B], 8], ROOT) == 3 * B, "behind the published block, not its equal"
    manager.free(table)
    manager.check_invariants([])


def test_who_waits_asks_for_the_state_behind_what_it_waits_for() -> None:
    manager, tokens = manager_of(), list(range(5 * B + 1))
    first = manager.open_table(tokens, ROOT)
    branch = [*tokens[: 3 * B], 7, 7, 7]
    assert manager.is_in_flight(manager.awaited_hash(branch, ROOT))
    assert rows(run_pass(manager, first, tokens)) == [3 * B, 5 * B]
    assert manager.awaited_hash(branch, ROOT) is None
    assert manager.open_table(branch, ROOT).num_cached_tokens == 3 * B


def test_where_a_pass_ends_its_own_slot_is_kept_and_the_next_writes_another() -> None:
    manager, tokens = manager_of(), list(range(3 * B))
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


def test_a_state_that_another_kept_meanwhile_is_not_kept_twice() -> None:
    manager, tokens = manager_of(), list(range(2 * B))
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


def test_an_answer_leaves_one_snapshot_that_moves() -> None:
    manager, tokens = manager_of(), list(range(6))
    table = manager.open_table(tokens, ROOT)
    run_pass(manager, table, tokens)
    kept, used = [], 0
    for token in range(30):
        tokens.append(token)
        kept += [len(tokens) for _ in run_pass(manager, table, tokens).slots]
        used = max(used, states_of(manager).slots.num_used)
        manager.check_invariants([table])
    assert kept == [*range(8, 37, B)]
    assert states_of(manager).slots.counts()["answer"] == 1
    assert used == 3, "the prompt's, the answer's, and the one that is written"
    manager.free(table)
    assert manager.peek([*tokens, 1], ROOT) == 36


def test_what_conversations_begin_with_outlasts_a_long_one() -> None:
    """Each turn goes on from the end of the answer before, and so uses what the system message ends with."""
    manager, tokens = manager_of(num_blocks=200, num_slots=6), list(range(2 * B))
    for turn in range(1, 20):
        tokens += range(1000 * turn, 1000 * turn + 2 * B)
        table = manager.open_table(tokens, ROOT, hints=(2 * B, len(tokens) - 2 * B))
        run_pass(manager, table, tokens)
        tokens += range(1000 * turn + 500, 1000 * turn + 500 + B)
        run_pass(manager, table, tokens)
        manager.free(table)
        assert manager.peek([*tokens, 1], ROOT) == len(tokens)
    assert manager.peek([*tokens[: 2 * B], 7], ROOT) == 2 * B


def test_of_an_answer_with_small_states_all_but_the_last_are_a_backbone() -> None:
    """Long answers drive out no ends and borders of others; what is between them is there while there is room."""
    manager, tokens = manager_of(num_slots=12, every_block=True), list(range(6))
    states = states_of(manager)
    cold(manager, [99] * 9, hints=(5,))
    table = manager.open_table(tokens, ROOT)
    run_pass(manager, table, tokens)
    states.drain_kept()
    for stop in range(7, 26):  # a token at a time
        tokens.append(stop)
        run_pass(manager, table, tokens)
        manager.check_invariants([table])
    assert states.slots.counts() == {"prompt": 2, "hint": 1, "junction": 0, "answer": 1, "backbone": 4}
    tokens += range(100, 111)  # drafts that were right
    run_pass(manager, table, tokens)
    assert states.slots.counts() == {"prompt": 2, "hint": 1, "junction": 0, "answer": 1, "backbone": 7}
    assert manager.peek([*tokens, 1], ROOT) == 36
    assert manager.peek(tokens[:26], ROOT) == 24
    assert not states.drain_kept()
    for _ in range(10):
        tokens += range(B)
        run_pass(manager, table, tokens)
    assert states.slots.counts() == {"prompt": 2, "hint": 1, "junction": 0, "answer": 1, "backbone": 7}
    assert manager.peek([99] * 9, ROOT) == 8
    last = table.block_ids[len(tokens) // B - 1]
    manager.free(table)
    assert states.drain_kept() == [last], "of an answer one state goes to tiers"
    manager.check_invariants(())


def test_what_somebody_went_on_from_stays_when_the_answer_goes_on() -> None:
    manager, tokens = manager_of(), list(range(6))
    table = manager.open_table(tokens, ROOT)
    tokens += range(4)
    run_pass(manager, table, tokens)
    other = manager.open_table([*tokens[:8], 9], ROOT)
    assert other.num_cached_tokens == 8
    tokens += range(8)
    run_pass(manager, table, tokens)
    assert manager.peek([*tokens[:8], 9], ROOT) == 8


def test_an_answer_keeps_its_snapshot_moving_where_no_slot_is_free() -> None:
    manager, tokens = manager_of(num_slots=2), list(range(6))
    table = manager.open_table(tokens, ROOT)
    for token in range(20):
        run_pass(manager, table, tokens)
        tokens.append(token)
    assert manager.peek(tokens, ROOT) == 24


@pytest.mark.parametrize("num_slots", [12, 2])
def test_the_pass_that_moves_an_answers_snapshot_may_fail(num_slots: int) -> None:
    """Until the next one is there the one before is, where no slot is free too."""
    manager, tokens = manager_of(num_slots=num_slots), list(range(6))
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
def test_drafts_that_move_an_answers_snapshot_may_fail(num_slots: int, found: int) -> None:
    """Inside a pass a slot is needed before: where none is free the one before gives its own."""
    manager, tokens = manager_of(num_slots=num_slots), list(range(6))
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
def test_drafts_leave_an_answers_snapshot_that_gives_no_slot(fails: bool) -> None:
    """The pass reads it: without it there would be no slot more for the next one."""
    manager, tokens = manager_of(num_slots=2), list(range(6))
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
        assert manager.peek(tokens, ROOT) == 4 * B, "it moves on once the pass has another slot"
    manager.free(table)
    manager.check_invariants([])
    assert manager.peek(tokens, ROOT) == (2 if fails else 4) * B


def test_nobody_evicts_a_snapshot_between_lookup_and_pass() -> None:
    manager, tokens = manager_of(num_slots=3), list(range(2 * B + 1))
    slot = cold(manager, tokens).slots[2 * B]
    reader = manager.open_table(tokens, ROOT)
    manager.reset()
    for number in range(3):
        cold(manager, [100 + number] * (2 * B + 1), reader)
    manager.extend(reader, len(tokens))
    assert states_of(manager).plan(reader, 2 * B, len(tokens)).read == slot
    assert slot not in states_of(manager).unwritten()


def test_a_snapshot_goes_with_its_block() -> None:
    manager, tokens = manager_of(num_blocks=4), list(range(2 * B + 1))
    cold(manager, tokens)
    assert states_of(manager).slots.num_used == 1
    cold(manager, [7] * (4 * B))
    assert set(states_of(manager).slots.snapshots()) <= set(manager.content.under(ROOT))
    assert manager.reset() == 4
    assert states_of(manager).slots.num_used == 0


def test_a_table_without_a_slot_fails_and_changes_nothing() -> None:
    manager = manager_of(num_slots=1)
    first, second = (manager.open_table([number] * B, ROOT) for number in (1, 2))
    manager.extend(first, B)
    assert not states_of(manager).has_room(second)
    with pytest.raises(CapacityError, match="max_state_bytes"):
        manager.extend(second, B)
    assert second.block_ids == []
    progress = manager.progress
    manager.free(first)
    assert manager.progress > progress
    assert states_of(manager).has_room(second)


def test_a_fork_reads_what_its_parent_had_and_neither_writes_it() -> None:
    manager, tokens = manager_of(), list(range(B + 2))
    table = manager.open_table(tokens, ROOT)
    before = run_pass(manager, table, tokens).plan
    child = manager.fork(table)
    manager.check_invariants([table, child])
    tokens.append(1)
    plans = []
    for one in (table, child):
        manager.extend(one, len(tokens))
        plans.append(states_of(manager).plan(one, B + 2, B + 3))
    assert [plan.read for plan in plans] == [before.write] * 2
    assert len({before.write, plans[0].write, plans[1].write}) == 3
    for one in (table, child):
        manager.commit(one, tokens, len(tokens))
    manager.check_invariants([table, child])


def test_passes_that_do_not_go_on_from_the_state_are_refused() -> None:
    manager, tokens = manager_of(), list(range(3 * B))
    table = manager.open_table(tokens, ROOT)
    manager.extend(table, len(tokens))
    with pytest.raises(CacheCorruption, match="does not go on"):
        states_of(manager).plan(table, 1, 4)
    with pytest.raises(CacheCorruption, match="are committed"):
        manager.commit(table, tokens, 4)
    states_of(manager).plan(table, 0, 5)
    with pytest.raises(CacheCorruption, match="does not go on"):
        states_of(manager).plan(table, 0, 5)
    with pytest.raises(CacheCorruption, match="are committed"):
        manager.commit(table, tokens, 4)
    with pytest.raises(CacheCorruption, match="being computed"):
        manager.fork(table)


def test_check_finds_a_snapshot_of_a_block_that_is_gone() -> None:
    manager = manager_of()
    cold(manager, list(range(B + 1)))
    slots = states_of(manager).slots
    (block_id, slot) = next(iter(slots.snapshots().items()))
    slots.drop(block_id)
    other = slots.take()
    assert other == slot
    slots.attach(other, 39, "prompt")
    with pytest.raises(CacheCorruption, match="is not published"):
        manager.check_invariants([])


def test_where_slots_lack_the_best_reason_gets_one() -> None:
    manager, tokens = manager_of(num_slots=2), list(range(3 * B + 1))
    kept = cold(manager, tokens, hints=(B,))
    assert rows(kept) == [3 * B], "one slot is the sequence's own; the other one is for the prompt's end"
    kept = cold(manager_of(num_slots=3, interval=2 * B), list(range(3 * B + 1)), hints=(B,))
    assert rows(kept) == [B, 3 * B], "none for the backbone at 2 * B"


def test_an_answers_snapshot_goes_to_tiers_when_it_moves_no_more() -> None:
    manager, tokens = manager_of(), list(range(5 * B))
    states, prompt = states_of(manager), 2 * B + 1
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
