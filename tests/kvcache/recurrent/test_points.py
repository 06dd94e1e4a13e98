"""Positions of prompt snapshots, and the choice among them when slots are scarce."""

import pytest

from helpers.kvcache.manager_cases import ROOT, B
from helpers.kvcache.recurrent_snapshots import cold, manager_of, rows, run_pass, states_of
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.kvcache.recurrent.slots import REASONS
from kvboost_edge.kvcache.recurrent.snapshots import (
    StateSizes,
    boundary_positions,
    checkpoint_positions,
)


@pytest.mark.parametrize(
    ("length", "expected"), [(1, []), (B, [B]), (B + 1, [B]), (2 * B, [B, 2 * B])]
)
def test_snapshots_at_the_end_of_a_prompt(length, expected):
    assert rows(cold(manager_of(), list(range(length)))) == expected


def test_hints_are_rounded_down_to_blocks():
    assert rows(cold(manager_of(), list(range(41)), hints=(0, 3, 9, 21, 22, 44, 999))) == [
        8,
        20,
        40,
    ]


def test_a_hint_at_the_prompts_end_replaces_no_other():
    assert rows(cold(manager_of(num_slots=8), list(range(20)), hints=(5, 9, 20))) == [4, 8, 16, 20]


def test_checkpoints_are_thinned_if_slots_are_few():
    assert rows(cold(manager_of(num_slots=80, interval=8), list(range(83)))) == [*range(8, 81, 8)]
    assert rows(cold(manager_of(num_slots=40, interval=8), list(range(83)))) == [8, 24, 56, 72, 80]
    assert rows(cold(manager_of(num_slots=40, every_block=True), list(range(41)))) == [
        *range(B, 41, B)
    ]
    assert rows(cold(manager_of(num_slots=8, every_block=True), list(range(67)))) == [
        4,
        20,
        36,
        52,
        64,
    ]


def test_many_hints_are_kept_at_doubling_distances():
    """If slots are scarce, a new long conversation keeps few snapshots and leaves those of other
    requests.
    """
    borders = tuple(range(5, 81, 5))
    kept = rows(cold(manager_of(num_slots=80), list(range(83)), hints=borders))
    assert kept == [n // B * B for n in borders]
    assert rows(cold(manager_of(num_slots=16), list(range(83)), hints=borders)) == [
        4,
        60,
        68,
        72,
        80,
    ]


@pytest.mark.parametrize(
    ("num_slots", "expected"),
    [(1, [5, 80]), (8, [5, 80]), (12, [5, 75, 80]), (28, [5, 45, 65, 75, 80]), (64, None)],
)
def test_hints_use_a_share_of_the_slots(num_slots, expected):
    borders = list(range(5, 81, 5))
    assert list(boundary_positions(borders, num_slots)) == (expected or borders)
    assert list(boundary_positions([], num_slots)) == []


@pytest.mark.parametrize("num_slots", [1, 2, 3, 16, 999])
@pytest.mark.parametrize("stop", [0, 1, 8, 9, 100, 4097])
def test_checkpoints_use_a_share_of_the_slots(num_slots, stop):
    small = list(checkpoint_positions(3, stop, 8, num_slots, small=True))
    assert len(small) <= max(1, num_slots // 2)
    assert set(small) <= set(range(8, stop, 8))
    assert bool(small) == (stop > 8)
    if stop > 8:
        assert small[0] == 8
        large = list(checkpoint_positions(3, stop, 8, num_slots, small=False))
        assert len(large) <= max(num_slots // 8, 2 + len(range(8, stop, 8)).bit_length())
        assert {large[0], large[-1]} >= {8}


def test_a_branch_point_is_kept_where_the_cached_kv_ends():
    manager = manager_of()
    tokens = list(range(5 * B + 1))
    cold(manager, tokens)
    branch = [*tokens[: 3 * B], 7, 7, 7, 7, 7, 7]
    table = manager.open_table(branch, ROOT)
    assert (table.num_cached_tokens, table.num_matched_tokens, table.miss_reason) == (
        0,
        3 * B,
        "state",
    )
    assert rows(run_pass(manager, table, branch)) == [3 * B, 4 * B]
    assert states_of(manager).num_replayed == 3 * B
    assert manager.peek([*tokens[: 3 * B], 8], ROOT) == 3 * B, (
        "the state must belong to the published block, not to its duplicate"
    )
    manager.free(table)
    manager.check_invariants([])


def test_waiting_requests_ask_for_the_state_they_need():
    manager = manager_of()
    tokens = list(range(5 * B + 1))
    first = manager.open_table(tokens, ROOT)
    branch = [*tokens[: 3 * B], 7, 7, 7]
    assert manager.is_in_flight(manager.awaited_hash(branch, ROOT))
    assert rows(run_pass(manager, first, tokens)) == [3 * B, 5 * B]
    assert manager.awaited_hash(branch, ROOT) is None
    assert manager.open_table(branch, ROOT).num_cached_tokens == 3 * B


@pytest.mark.parametrize(("hints", "reason"), [((3 * B,), "hint"), ((), "junction")])
def test_waiting_requests_turn_a_prompt_end_into_a_branch_point(hints, reason):
    manager = manager_of()
    tokens = list(range(5 * B + 1))
    length = 5 * B + 1 if hints else 3 * B + 1
    table = manager.open_table(tokens[:length], ROOT, hints=hints)
    assert manager.is_in_flight(manager.awaited_hash([*tokens[: 3 * B], 7, 7], ROOT))
    run_pass(manager, table, tokens[:length])
    assert states_of(manager).slots.counts() == {
        **dict.fromkeys(REASONS, 0),
        "prompt": len(hints),
        reason: 1,
    }


def test_checkpoints_are_1024_tokens_apart_by_default():
    manager = KVCacheManager(600, B, state_sizes=StateSizes(40))
    assert rows(cold(manager, list(range(2100)))) == [1024, 2048, 2096, 2100]


def test_the_state_of_a_common_beginning_survives_a_long_conversation():
    """Each turn resumes after the previous answer. That also counts as a use of the snapshot after
    the system message.
    """
    manager = manager_of(num_blocks=200, num_slots=6)
    tokens = list(range(2 * B))
    for turn in range(1, 20):
        tokens += range(1000 * turn, 1000 * turn + 2 * B)
        table = manager.open_table(tokens, ROOT, hints=(2 * B, len(tokens) - 2 * B))
        run_pass(manager, table, tokens)
        tokens += range(1000 * turn + 500, 1000 * turn + 500 + B)
        run_pass(manager, table, tokens)
        manager.free(table)
        assert manager.peek([*tokens, 1], ROOT) == len(tokens)
    assert manager.peek([*tokens[: 2 * B], 7], ROOT) == 2 * B


def test_the_most_valuable_snapshot_gets_a_scarce_slot():
    manager = manager_of(num_slots=2)
    tokens = list(range(3 * B + 1))
    kept = cold(manager, tokens, hints=(B,))
    assert rows(kept) == [3 * B], "the only spare slot must be used for the end of the prompt"
    kept = cold(manager_of(num_slots=3, interval=2 * B), list(range(3 * B + 1)), hints=(B,))
    assert rows(kept) == [B, 3 * B], "the checkpoint at 2 * B must not get a slot"
