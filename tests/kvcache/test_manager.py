"""The manager's promises one by one; test_state_machine.py holds them together under random operations."""

from __future__ import annotations

import copy
import random

import pytest

from kvboost_edge.errors import CacheCorruption, CapacityError, ConfigError, RequestError
from kvboost_edge.kvcache.block_table import BlockTable, CopyOp
from kvboost_edge.kvcache.hashing import chain_hash
from kvboost_edge.kvcache.manager import BLOCK_CACHED, BLOCK_FREE, BLOCK_REFERENCED, BLOCK_SHARED, KVCacheManager

ROOT, OTHER = b"r" * 32, b"o" * 32
B = 4


def prefill(manager: KVCacheManager, tokens: list[int], root: bytes = ROOT, *, use_cache: bool = True) -> BlockTable:
    """Open, extend, compute and commit a whole prompt."""
    table = manager.open_table(tokens, root, use_cache=use_cache)
    manager.extend(table, len(tokens))
    manager.commit(table, tokens, len(tokens))
    return table


# ---- sharing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, B - 1, B, 2 * B + 3])
def test_a_prefix_is_shared_in_full_blocks(cut: int) -> None:
    manager = KVCacheManager(16, B)
    first = prefill(manager, list(range(13)))
    tokens = list(range(cut)) + [99] * (20 - cut)
    full = cut // B
    assert manager.peek(tokens, ROOT) == full * B
    second = manager.open_table(tokens, ROOT)
    assert second.block_ids == first.block_ids[:full]
    assert second.num_cached_tokens == second.num_computed_tokens == full * B
    manager.extend(second, 20)
    assert not set(second.block_ids[full:]) & set(first.block_ids)
    manager.check_invariants([first, second])


def test_a_partial_block_is_never_shared() -> None:
    manager = KVCacheManager(16, B)
    prefill(manager, list(range(7)))
    assert manager.peek(list(range(8)), ROOT) == B


def test_other_roots_share_nothing() -> None:
    manager = KVCacheManager(16, B)
    prefill(manager, list(range(12)))
    assert manager.peek(list(range(12)), OTHER) == 0
    assert manager.open_table(list(range(12)), OTHER).block_ids == []


def test_equal_tokens_after_different_parents_are_different() -> None:
    manager = KVCacheManager(16, B)
    prefill(manager, [1] * 4 + [7] * 4)
    prefill(manager, [2] * 4 + [8] * 4)
    assert manager.peek([2] * 4 + [7] * 4 + [0], ROOT) == 4
    assert manager.peek([7] * 4 + [0], ROOT) == 0


def test_generated_tokens_are_published_too() -> None:
    manager = KVCacheManager(16, B)
    running = list(range(6))
    table = prefill(manager, running)
    for token in (50, 51, 52, 53, 54, 55, 56):
        running.append(token)
        assert manager.extend(table, len(running)) == []
        manager.commit(table, running, len(running))
    manager.free(table)
    turn = [*running, 1, 2, 3]
    assert manager.peek(turn, ROOT) == len(running) // B * B == 12


def test_without_the_cache_nothing_is_shared_or_counted_but_the_blocks_are_published_once() -> None:
    manager = KVCacheManager(16, B)
    first = prefill(manager, list(range(8)))
    second = prefill(manager, list(range(8)), use_cache=False)
    assert not set(first.block_ids) & set(second.block_ids)
    assert (manager.hit_tokens, manager.miss_tokens) == (0, 8)
    assert manager.published_block_count == 2
    assert manager.peek(list(range(9)), ROOT) == 8
    manager.check_invariants([first, second])
    manager.free(second)
    assert manager.cached_block_count == 0  # the private copies hold nothing to match


# ---- a prompt cached to its end --------------------------------------------------------------------------------------


def test_a_fully_cached_prompt_recomputes_its_last_token_in_a_copy() -> None:
    manager = KVCacheManager(16, B)
    tokens = list(range(8))
    first = prefill(manager, tokens)
    second = manager.open_table(tokens, ROOT)
    assert second.block_ids == first.block_ids
    assert second.num_cached_tokens == 7
    assert manager.blocks_needed(second, 8) == 1
    ops = manager.extend(second, 8)
    assert ops == [CopyOp(first.block_ids[1], second.block_ids[1])]
    assert manager.slots(second, 7, 8) == [second.block_ids[1] * B + 3]
    manager.commit(second, tokens, 8)
    manager.check_invariants([first, second])
    assert manager.cow_copies == 1
    assert manager.published_block_count == 2


def test_a_fully_cached_prompt_that_nobody_else_holds_is_rewritten_in_place() -> None:
    manager = KVCacheManager(2, B)  # no room for a copy, and none is needed
    tokens = list(range(8))
    manager.free(prefill(manager, tokens))
    again = manager.open_table(tokens, ROOT)
    assert (again.num_cached_tokens, manager.free_block_count) == (7, 0)
    assert manager.extend(again, 8) == []
    assert manager.peek([*tokens, 0], ROOT) == 4  # while it is written nobody may match it
    assert manager.awaited_hash([*tokens, 0], ROOT)
    manager.check_invariants([again])
    manager.commit(again, tokens, 8)
    assert manager.peek([*tokens, 0], ROOT) == 8
    assert not manager.awaited_hash([*tokens, 0], ROOT)
    manager.check_invariants([again])


def test_a_rewritten_block_keeps_what_is_cached_behind_it() -> None:
    manager = KVCacheManager(8, B)
    manager.free(prefill(manager, list(range(16))))
    manager.free(prefill(manager, list(range(8))))  # rewrites block 1 of 4 in place
    assert manager.peek(list(range(17)), ROOT) == 16


@pytest.mark.parametrize("forked", [False, True])
def test_a_copied_block_keeps_what_is_cached_behind_it(forked: bool) -> None:
    """The published equal of a private copy must be evicted after the blocks that are matched through it."""
    manager = KVCacheManager(8, B)
    tokens = list(range(8))
    first = prefill(manager, tokens)
    second = prefill(manager, tokens)  # shares block 0, has a copy of block 1
    if forked:
        child = manager.fork(second)
        manager.free(second)
        second = child
    manager.free(first)
    assert manager.cached_block_count == 1  # block 1, idle from now on
    running = [*tokens, 1, 2, 3, 4]
    manager.extend(second, 12)
    manager.commit(second, running, 12)
    manager.free(second)
    assert manager.peek([*running, 0], ROOT) == 12
    filler = manager.open_table([], ROOT, use_cache=False)
    manager.extend(filler, B * (manager.free_block_count - 2))
    assert manager.peek([*running, 0], ROOT) == 8  # the end of the chain went first


def test_an_evicted_equal_is_not_mistaken_for_what_took_its_block() -> None:
    manager = KVCacheManager(3, B)
    tokens = list(range(4))
    first = prefill(manager, tokens)
    second = prefill(manager, tokens)  # a copy, whose published equal is the first table's block
    manager.free(first)
    third = prefill(manager, [7] * 4)
    fourth = prefill(manager, [8] * 4)  # takes the block of the evicted equal
    assert fourth.block_ids == [0]
    manager.free(fourth)
    manager.free(third)
    manager.free(second)  # must not refresh block 0
    manager.free(prefill(manager, [5] * 8))  # takes the copy and the oldest cached one
    assert [manager.peek([token] * 4 + [0], ROOT) for token in (7, 8)] == [4, 0]


def test_a_block_republished_meanwhile_is_followed_under_its_new_identity() -> None:
    manager = KVCacheManager(8, B)
    tokens = list(range(4))
    manager.free(prefill(manager, tokens))
    slow = manager.open_table(tokens, ROOT)
    manager.extend(slow, 4)  # rewrites in place: unmatchable for now
    quick = prefill(manager, tokens)  # did not wait and publishes its own
    manager.commit(slow, tokens, 4)
    running = [*tokens, 1, 2, 3, 4]
    manager.extend(slow, 8)
    manager.commit(slow, running, 8)
    assert manager.peek([*running, 0], ROOT) == 8
    assert manager.open_table([*running, 0], ROOT).block_ids == [quick.block_ids[0], slow.block_ids[1]]


# ---- eviction --------------------------------------------------------------------------------------------------------


def test_chains_are_evicted_tail_first_and_the_least_recently_used_chain_first() -> None:
    manager = KVCacheManager(8, B)
    one, two = [1] * 16, [2] * 16
    manager.free(prefill(manager, one))
    manager.free(prefill(manager, two))
    left = []
    for _ in range(8):
        filler = manager.open_table([], ROOT, use_cache=False)
        manager.extend(filler, B)
        left.append((manager.peek([*one, 0], ROOT), manager.peek([*two, 0], ROOT)))
    assert left == [(12, 16), (8, 16), (4, 16), (0, 16), (0, 12), (0, 8), (0, 4), (0, 0)]
    assert manager.evictions == 8


def test_a_hit_makes_a_chain_recently_used() -> None:
    manager = KVCacheManager(4, B)
    one, two = [1] * 8, [2] * 8
    manager.free(prefill(manager, one))
    manager.free(prefill(manager, two))
    manager.free(manager.open_table([*one, 0], ROOT))  # a hit
    filler = manager.open_table([], ROOT, use_cache=False)
    manager.extend(filler, 2 * B)
    assert (manager.peek([*one, 0], ROOT), manager.peek([*two, 0], ROOT)) == (8, 0)


def test_peeking_changes_nothing() -> None:
    manager = KVCacheManager(4, B)
    manager.free(prefill(manager, [1] * 8))
    manager.free(prefill(manager, [2] * 8))
    order = manager._pool.free_ids()
    manager.peek([1] * 9, ROOT)
    manager.awaited_hash([1] * 9, ROOT)
    assert manager._pool.free_ids() == order
    assert (manager.hit_tokens, manager.miss_tokens) == (0, 16)


def test_what_was_never_published_is_taken_before_anything_cached() -> None:
    manager = KVCacheManager(4, B)
    manager.free(prefill(manager, [1] * 8))
    manager.free(prefill(manager, [2] * 7))  # one full block, one partial
    filler = manager.open_table([], ROOT, use_cache=False)
    manager.extend(filler, B)
    assert (manager.peek([1] * 9, ROOT), manager.peek([2] * 9, ROOT)) == (8, 4)


def test_reset_forgets_idle_blocks_and_keeps_referenced_ones() -> None:
    manager = KVCacheManager(8, B)
    held = prefill(manager, [1] * 8)
    manager.free(prefill(manager, [2] * 8))
    assert manager.reset() == 2
    assert (manager.peek([1] * 9, ROOT), manager.peek([2] * 9, ROOT)) == (8, 0)
    assert manager.reset() == 0
    manager.check_invariants([held])
    manager.free(held)
    assert manager.reset() == 2
    assert manager.block_states() == [BLOCK_FREE] * 8


# ---- capacity --------------------------------------------------------------------------------------------------------


def test_extend_is_all_or_nothing() -> None:
    manager = KVCacheManager(4, B)
    held = prefill(manager, [1] * 6)
    table = manager.fork(held)
    before = (table.block_ids.copy(), manager.block_states(), manager.drain_new_blocks())
    assert manager.blocks_needed(table, 14) == 3  # two new ones and the copy of the shared tail
    with pytest.raises(CapacityError, match=r"14 tokens need 3 more blocks of 4 tokens, 2 of 4 are free; enlarge"):
        manager.extend(table, 14)
    assert before == (table.block_ids, manager.block_states(), [0, 1])
    assert manager.drain_new_blocks() == []
    assert manager.cow_copies == 0
    manager.check_invariants([held, table])
    assert len(manager.extend(table, 12)) == 1
    manager.check_invariants([held, table])


def test_extending_to_what_exists_takes_nothing() -> None:
    manager = KVCacheManager(4, B)
    table = prefill(manager, [1] * 6)
    assert manager.extend(table, 8) == []
    assert manager.extend(table, 3) == []
    assert manager.extend(table, 0) == []
    assert manager.used_block_count == 2


# ---- fork ------------------------------------------------------------------------------------------------------------


def test_a_forked_partial_tail_is_copied_by_the_first_who_writes() -> None:
    manager = KVCacheManager(8, B)
    tokens = list(range(6))
    parent = prefill(manager, tokens)
    child = manager.fork(parent)
    assert child.block_ids == parent.block_ids
    assert manager.shared_block_count == 2
    (op,) = manager.extend(child, 7)
    assert op == CopyOp(parent.block_ids[1], child.block_ids[1])
    assert manager.extend(parent, 7) == []  # alone again
    assert parent.block_ids[0] == child.block_ids[0]
    manager.check_invariants([parent, child])
    manager.commit(parent, [*tokens, 70, 71], 6)
    manager.free(parent)
    manager.commit(child, [*tokens, 80], 7)
    manager.check_invariants([child])


def test_forks_publish_a_common_block_once() -> None:
    manager = KVCacheManager(8, B)
    parent = manager.open_table([1, 2, 3, 4], ROOT)
    manager.extend(parent, 4)
    manager.commit(parent, [1, 2, 3], 3)
    child = manager.fork(parent)
    manager.commit(parent, [1, 2, 3, 4], 4)
    manager.commit(child, [1, 2, 3, 4], 4)
    assert manager.published_block_count == 1
    manager.check_invariants([parent, child])


# ---- publishing ------------------------------------------------------------------------------------------------------


def test_only_computed_full_blocks_are_published() -> None:
    manager = KVCacheManager(8, B)
    tokens = list(range(12))
    table = manager.open_table(tokens, ROOT)
    manager.extend(table, 12)
    for computed, expected in [(0, 0), (3, 0), (4, 4), (7, 4), (11, 8), (12, 12)]:
        manager.commit(table, tokens, computed)
        assert manager.peek([*tokens, 0], ROOT) == expected


def test_what_is_freed_before_it_is_committed_is_not_published() -> None:
    manager = KVCacheManager(8, B)
    table = manager.open_table(list(range(8)), ROOT)
    manager.extend(table, 8)
    manager.free(table)
    assert manager.peek(list(range(9)), ROOT) == 0
    assert manager.cached_block_count == 0


def test_an_unpublished_commit_ends_the_publishing_of_a_table_and_its_forks() -> None:
    manager = KVCacheManager(8, B)
    tokens = list(range(16))
    table = manager.open_table(tokens, ROOT)
    manager.extend(table, 16)
    manager.commit(table, tokens, 4)
    manager.commit(table, tokens, 8, publish=False)
    child = manager.fork(table)
    manager.commit(table, tokens, 12)
    manager.commit(child, tokens, 16)
    assert manager.peek([*tokens, 0], ROOT) == 4
    manager.check_invariants([table, child])


@pytest.mark.parametrize("num_computed", [3, 9, 13])
def test_a_commit_must_grow_and_fit(num_computed: int) -> None:
    manager = KVCacheManager(8, B)
    table = prefill(manager, list(range(4)))
    manager.extend(table, 12)
    with pytest.raises(CacheCorruption, match=rf"commit of {num_computed} tokens"):
        manager.commit(table, list(range(8 if num_computed == 9 else 20)), num_computed)


def test_a_block_forked_while_it_is_rewritten_is_published_by_its_writer() -> None:
    manager = KVCacheManager(8, B)
    tokens = [1, 2, 3, 4]
    manager.free(prefill(manager, tokens))
    table = manager.open_table(tokens, ROOT)
    manager.extend(table, 4)
    child = manager.fork(table)
    assert manager.extend(table, 4) == [CopyOp(child.block_ids[0], table.block_ids[0])]
    manager.commit(table, tokens, 4)
    assert manager.open_table([*tokens, 5], ROOT).block_ids == table.block_ids
    assert not manager.awaited_hash(tokens, ROOT)


def test_a_rewrite_with_other_tokens_raises() -> None:
    manager = KVCacheManager(8, B)
    manager.free(prefill(manager, [1, 2, 3, 4]))
    table = manager.open_table([1, 2, 3, 4], ROOT)
    manager.extend(table, 4)
    with pytest.raises(CacheCorruption, match="changed while it was rewritten"):
        manager.commit(table, [1, 2, 3, 5], 4)


# ---- single flight ---------------------------------------------------------------------------------------------------


def test_a_prompt_being_computed_is_waited_for_block_by_block() -> None:
    manager = KVCacheManager(16, B)
    tokens = list(range(12))
    assert not manager.awaited_hash([*tokens, 99], ROOT)
    owner = manager.open_table(tokens, ROOT)
    manager.extend(owner, 12)
    for computed in (0, 4, 8):
        manager.commit(owner, tokens, computed)
        assert manager.awaited_hash([*tokens, 99], ROOT)
    assert not manager.awaited_hash([*tokens, 99], OTHER)
    assert not manager.awaited_hash([*tokens[:8], 99, 99, 99, 99], ROOT)  # it leaves the owner's path where it ends
    assert not manager.awaited_hash(tokens[:3], ROOT)  # no full block to wait for
    manager.commit(owner, tokens, 12)
    assert not manager.awaited_hash([*tokens, 99], ROOT)
    assert manager.peek([*tokens, 99], ROOT) == 12
    manager.check_invariants([owner])


def test_what_is_waited_for_is_the_last_block_another_one_promised() -> None:
    manager = KVCacheManager(16, B)
    tokens = list(range(12))
    owner = manager.open_table(tokens, ROOT)
    manager.extend(owner, 12)
    awaited = manager.awaited_hash([*tokens, *range(50, 60)], ROOT)
    assert awaited == manager.awaited_hash(tokens, ROOT) != manager.awaited_hash(tokens[:8], ROOT)
    for computed in (4, 8, 12):
        assert manager.is_in_flight(awaited)
        manager.commit(owner, tokens, computed)
    assert not manager.is_in_flight(awaited)
    assert not manager.is_in_flight(None)


def test_progress_counts_what_can_make_room() -> None:
    manager = KVCacheManager(16, B)
    table = manager.open_table(list(range(10)), ROOT)
    manager.extend(table, 10)
    assert manager.progress == 0
    manager.commit(table, list(range(10)), 10)
    assert manager.progress == 2  # two full blocks
    manager.free(table)
    assert manager.progress == 3
    again = manager.open_table(list(range(8)), ROOT)
    manager.extend(again, 8)  # takes back the block its last token goes into
    manager.commit(again, list(range(8)), 8)
    assert manager.progress == 4


def test_a_table_that_is_not_counted_is_served_all_the_same() -> None:
    manager = KVCacheManager(16, B)
    manager.free(prefill(manager, list(range(8))))
    table = manager.open_table(list(range(12)), ROOT, count=False)
    manager.extend(table, 12)
    assert (table.num_cached_tokens, manager.hit_tokens, manager.miss_tokens) == (8, 0, 8)


def test_a_waiter_is_released_when_the_owner_is_freed() -> None:
    manager = KVCacheManager(16, B)
    tokens = list(range(12))
    owner = manager.open_table(tokens, ROOT)
    manager.extend(owner, 12)
    manager.commit(owner, tokens, 5)
    assert manager.awaited_hash(tokens, ROOT)
    manager.free(owner)
    assert not manager.awaited_hash(tokens, ROOT)
    waiter = manager.open_table(tokens, ROOT)
    assert waiter.num_cached_tokens == 4
    assert manager.awaited_hash(tokens, ROOT)  # and now it is the owner
    manager.check_invariants([waiter])


def test_who_does_not_wait_takes_no_claim_away() -> None:
    manager = KVCacheManager(16, B)
    tokens = list(range(8))
    owner = manager.open_table(tokens, ROOT)
    eager = manager.open_table([*tokens, 1, 2, 3, 4], ROOT)
    manager.free(eager)
    assert manager.awaited_hash(tokens, ROOT)
    assert not manager.awaited_hash([*tokens, 1, 2, 3, 4][8:], ROOT)
    manager.check_invariants([owner])
    manager.free(owner)
    manager.check_invariants([])


def test_a_table_without_the_cache_is_not_waited_for() -> None:
    manager = KVCacheManager(16, B)
    manager.open_table(list(range(8)), ROOT, use_cache=False)
    assert not manager.awaited_hash(list(range(8)), ROOT)


def test_colliding_claims_are_all_given_back() -> None:
    manager = KVCacheManager(16, 1, hash_fn=lambda parent, tokens: b"same")
    table = manager.open_table([1, 2, 3], ROOT)
    manager.extend(table, 3)
    for computed in (1, 2, 3):
        manager.commit(table, [1, 2, 3], computed)
        manager.check_invariants([table])
    manager.free(table)
    manager.check_invariants([])
    assert manager.peek([1, 2, 3, 4], ROOT) == 3


# ---- collisions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 8])
def test_ten_thousand_lookups_under_a_weak_hash_without_a_wrong_hit(bits: int) -> None:
    def weak(parent: bytes, tokens: bytes) -> bytes:
        return bytes([chain_hash(parent, tokens)[0] & ((1 << bits) - 1)])

    rng = random.Random(bits)
    manager = KVCacheManager(64, 2, hash_fn=weak)
    # The oracle: what each published block stands for, told by who wrote it and not by any hash.
    content: dict[int, tuple[bytes, tuple[int, ...]]] = {}
    lookups = hits = 0
    while lookups < 10_000:
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 13))]
        root = rng.choice([ROOT, OTHER])
        lookups += 1
        table = manager.open_table(tokens, root)
        for index, block_id in enumerate(table.block_ids):
            assert content[block_id] == (root, tuple(tokens[: 2 * (index + 1)]))
            hits += 1
        for src, dst in manager.extend(table, len(tokens)):
            content[dst] = content[src]
        for index, block_id in enumerate(table.block_ids):
            content[block_id] = (root, tuple(tokens[: 2 * (index + 1)]))
        manager.commit(table, tokens, len(tokens))
        manager.free(table)
    assert hits > 5_000  # the test would be idle without real hits
    manager.check_invariants([])


# ---- misuse ----------------------------------------------------------------------------------------------------------


def test_a_freed_table_is_stale_for_every_operation() -> None:
    manager = KVCacheManager(8, B)
    table = prefill(manager, list(range(8)))
    twin = copy.copy(table)
    manager.free(table)
    assert table.block_ids == []
    for stale in (table, twin):
        for operation in (
            lambda t: manager.free(t),
            lambda t: manager.extend(t, 4),
            lambda t: manager.blocks_needed(t, 4),
            lambda t: manager.commit(t, [], 0),
            lambda t: manager.fork(t),
            lambda t: manager.make_writable(t, 0),
            lambda t: manager.slots(t, 0, 0),
        ):
            with pytest.raises(CacheCorruption, match="stale block table"):
                operation(stale)
    manager.check_invariants([])


def test_a_copy_of_a_live_table_and_a_table_of_another_pool_are_refused() -> None:
    manager, other = KVCacheManager(8, B), KVCacheManager(8, B)
    table, foreign = prefill(manager, list(range(8))), prefill(other, list(range(8)))
    for stranger in (copy.copy(table), foreign):
        with pytest.raises(CacheCorruption):
            manager.free(stranger)
    manager.check_invariants([table])


def test_a_table_with_a_stale_id_is_found() -> None:
    manager = KVCacheManager(8, B)
    table = prefill(manager, list(range(8)))
    for ids in ([0, 5], [0, 99], [0, 0], [0]):
        table.block_ids = ids
        with pytest.raises(CacheCorruption):
            manager.check_invariants([table])
    table.block_ids = [0, 5]
    with pytest.raises(CacheCorruption, match="double free: block 5"):
        manager.free(table)


def test_slots_follow_the_table() -> None:
    manager = KVCacheManager(8, B)
    manager.open_table([], ROOT)
    pad = prefill(manager, [9] * 4)
    table = prefill(manager, list(range(6)))
    manager.free(pad)
    manager.extend(table, 9)
    assert table.block_ids == [1, 2, 3]
    assert manager.slots(table, 2, 9) == [6, 7, 8, 9, 10, 11, 12]
    assert manager.slots(table, 5, 5) == []
    for start, stop in [(-1, 2), (3, 2), (0, 13)]:
        with pytest.raises(CacheCorruption):
            manager.slots(table, start, stop)
    for index in (-1, 3):
        with pytest.raises(CacheCorruption, match="block index"):
            manager.make_writable(table, index)


@pytest.mark.parametrize("bad", [0, -16, 1.5, "16", None, True])
def test_a_bad_block_size_is_refused(bad: int) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        KVCacheManager(8, bad)


def test_bad_token_ids_leave_nothing_behind() -> None:
    manager = KVCacheManager(8, B)
    with pytest.raises(RequestError):
        manager.open_table([1, 2, 3, -4], ROOT)
    manager.check_invariants([])
    assert manager.open_table([], ROOT).num_cached_tokens == 0


# ---- looking ---------------------------------------------------------------------------------------------------------


def test_states_and_counts_of_the_pool() -> None:
    manager = KVCacheManager(6, B)
    manager.free(prefill(manager, [1] * 8))
    parent = prefill(manager, [2] * 5)
    child = manager.fork(parent)
    manager.extend(child, 5)
    manager.commit(child, [2] * 5, 5)
    manager.extend(child, 6)  # copies the tail
    assert sorted(manager.block_states()) == sorted(
        [BLOCK_CACHED, BLOCK_CACHED, BLOCK_SHARED, BLOCK_REFERENCED, BLOCK_REFERENCED, BLOCK_FREE]
    )
    assert (manager.num_blocks, manager.free_block_count, manager.used_block_count) == (6, 3, 3)
    assert (manager.cached_block_count, manager.shared_block_count, manager.published_block_count) == (2, 1, 3)
    assert manager.reference_count == 4


def test_new_blocks_are_told_once_and_copies_are_not_among_them() -> None:
    manager = KVCacheManager(6, B)
    parent = prefill(manager, [1] * 6)
    assert manager.drain_new_blocks() == parent.block_ids
    assert manager.drain_new_blocks() == []
    shared = manager.open_table([1] * 6, ROOT)
    assert manager.drain_new_blocks() == []  # a hit brings content with it
    short = manager.open_table([], ROOT)
    manager.extend(short, 4)
    manager.free(short)  # its block, not drained yet, now becomes the target of a copy
    (op,) = manager.extend(manager.fork(parent), 7)
    assert op.dst == 2
    assert manager.drain_new_blocks() == []
    manager.free(shared)


def test_hits_and_misses_count_tokens_once_a_table_is_extended() -> None:
    manager = KVCacheManager(8, B)
    prefill(manager, list(range(8)))
    for _ in range(3):  # a request that finds no room is opened and freed again
        manager.free(manager.open_table([*range(8), 1, 2], ROOT))
    assert (manager.hit_tokens, manager.miss_tokens) == (0, 8)
    for tokens in ([*range(8), 1, 2], list(range(8))):
        table = manager.open_table(tokens, ROOT)
        manager.extend(table, len(tokens) - 1)
        manager.extend(table, len(tokens))
        manager.extend(manager.fork(table), len(tokens))
    assert (manager.hit_tokens, manager.miss_tokens) == (8 + 7, 8 + 2 + 1)


def test_a_table_shows_itself() -> None:
    manager = KVCacheManager(8, B)
    table = prefill(manager, list(range(5)))
    assert repr(table) == "BlockTable(block_ids=[0, 1], num_cached_tokens=0, num_computed_tokens=5)"
    assert len(table) == 2
