"""The manager's errors, lookups, eviction and waiting. Sharing and copying are tested in
test_state_machine.py.
"""

import copy

import pytest

from helpers.kvcache.manager_cases import ROOT, B, prefill
from helpers.raising import assert_raises
from kvboost_edge.errors import CacheCorruption, CapacityError, ConfigError, RequestError
from kvboost_edge.kvcache.manager import (
    BLOCK_CACHED,
    BLOCK_FREE,
    BLOCK_REFERENCED,
    BLOCK_SHARED,
    KVCacheManager,
)

# misuse


def test_a_freed_table_is_refused_by_every_operation():
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
            lambda t: manager.shrink(t, 0),
        ):
            assert_raises(CacheCorruption, "stale block table", operation, stale)
    manager.check_invariants([])


def test_a_copy_of_a_live_table_and_a_table_of_another_pool_are_refused():
    manager = KVCacheManager(8, B)
    other = KVCacheManager(8, B)
    table = prefill(manager, list(range(8)))
    foreign = prefill(other, list(range(8)))
    for stranger in (copy.copy(table), foreign):
        with pytest.raises(CacheCorruption):
            manager.free(stranger)
    manager.check_invariants([table])


def test_a_table_with_a_stale_block_id_is_detected():
    manager = KVCacheManager(8, B)
    table = prefill(manager, list(range(8)))
    for ids in ([0, 5], [0, 99], [0, 0], [0]):
        table.block_ids = ids
        with pytest.raises(CacheCorruption):
            manager.check_invariants([table])
    table.block_ids = [0, 5]
    assert_raises(CacheCorruption, "double free: block 5", manager.free, table)


def test_slots_follow_the_table():
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
        assert_raises(CacheCorruption, "block index", manager.make_writable, table, index)


def test_unused_blocks_after_the_tokens_are_released():
    manager = KVCacheManager(8, B)
    table = prefill(manager, list(range(2 * B + 1)))
    progress = manager.progress
    manager.extend(table, 5 * B)
    manager.shrink(table, 2 * B + 2)
    assert (len(table), manager.free_block_count) == (3, 5)
    assert manager.progress > progress, "progress must show that blocks became available"
    assert len(manager.drain_released()) == 2
    assert len(manager.drain_new_blocks()) == 3
    manager.shrink(table, 2 * B + 2)
    assert manager.drain_released() == []
    with pytest.raises(
        CacheCorruption,
        match="33 computed tokens cannot be cut to 32" if B == 16 else "cannot be cut",
    ):
        manager.shrink(table, 2 * B)
    child = manager.fork(table)
    manager.extend(table, 4 * B)
    twin = manager.fork(table)
    assert_raises(CacheCorruption, "shared or published", manager.shrink, table, 2 * B + 2)
    for one in (table, child, twin):
        manager.free(one)
    manager.check_invariants([])


@pytest.mark.parametrize("bad", [0, -16, 1.5, "16", None, True])
def test_an_invalid_block_size_is_refused(bad):
    assert_raises(ConfigError, "block_size", KVCacheManager, 8, bad)


def test_invalid_token_ids_change_nothing():
    manager = KVCacheManager(8, B)
    with pytest.raises(RequestError):
        manager.open_table([1, 2, 3, -4], ROOT)
    manager.check_invariants([])
    assert manager.open_table([], ROOT).num_cached_tokens == 0


# lookups


def test_block_states_and_counts_of_the_pool():
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
    assert (
        manager.cached_block_count,
        manager.shared_block_count,
        manager.published_block_count,
    ) == (2, 1, 3)
    assert manager.reference_count == 4


def test_new_blocks_are_reported_once_without_copies():
    manager = KVCacheManager(6, B)
    parent = prefill(manager, [1] * 6)
    assert manager.drain_new_blocks() == parent.block_ids
    assert manager.drain_new_blocks() == []
    shared = manager.open_table([1] * 6, ROOT)
    assert manager.drain_new_blocks() == []  # a cached block already has content
    short = manager.open_table([], ROOT)
    manager.extend(short, 4)
    manager.free(short)  # its block, not drained yet, becomes the target of a copy
    (op,) = manager.extend(manager.fork(parent), 7)
    assert op.dst == 2
    assert manager.drain_new_blocks() == []
    manager.free(shared)


def test_a_table_has_a_repr_and_a_length():
    manager = KVCacheManager(8, B)
    table = prefill(manager, list(range(5)))
    assert repr(table) == "BlockTable(block_ids=[0, 1], num_cached_tokens=0, num_computed_tokens=5)"
    assert len(table) == 2


# eviction


def test_chains_are_evicted_tail_first_and_the_least_recently_used_chain_first():
    manager = KVCacheManager(8, B)
    one = [1] * 16
    two = [2] * 16
    manager.free(prefill(manager, one))
    manager.free(prefill(manager, two))
    left = []
    for _ in range(8):
        filler = manager.open_table([], ROOT, use_cache=False)
        manager.extend(filler, B)
        left.append((manager.peek([*one, 0], ROOT), manager.peek([*two, 0], ROOT)))
    assert left == [(12, 16), (8, 16), (4, 16), (0, 16), (0, 12), (0, 8), (0, 4), (0, 0)]
    assert manager.evictions == 8


def test_a_hit_makes_a_chain_recently_used():
    manager = KVCacheManager(4, B)
    one = [1] * 8
    two = [2] * 8
    manager.free(prefill(manager, one))
    manager.free(prefill(manager, two))
    manager.free(manager.open_table([*one, 0], ROOT))  # a hit
    filler = manager.open_table([], ROOT, use_cache=False)
    manager.extend(filler, 2 * B)
    assert (manager.peek([*one, 0], ROOT), manager.peek([*two, 0], ROOT)) == (8, 0)


def test_peeking_changes_nothing():
    manager = KVCacheManager(4, B)
    manager.free(prefill(manager, [1] * 8))
    manager.free(prefill(manager, [2] * 8))
    order = manager._pool.free_ids()
    manager.peek([1] * 9, ROOT)
    manager.awaited_hash([1] * 9, ROOT)
    assert manager._pool.free_ids() == order
    assert (manager.hit_tokens, manager.miss_tokens) == (0, 16)


def test_unpublished_blocks_are_reused_before_cached_ones():
    manager = KVCacheManager(4, B)
    manager.free(prefill(manager, [1] * 8))
    manager.free(prefill(manager, [2] * 7))  # one full block, one partial
    filler = manager.open_table([], ROOT, use_cache=False)
    manager.extend(filler, B)
    assert (manager.peek([1] * 9, ROOT), manager.peek([2] * 9, ROOT)) == (8, 4)


# capacity


def test_extend_is_all_or_nothing():
    manager = KVCacheManager(4, B)
    held = prefill(manager, [1] * 6)
    table = manager.fork(held)
    before = (table.block_ids.copy(), manager.block_states(), manager.drain_new_blocks())
    assert manager.blocks_needed(table, 14) == 3  # two new blocks and the copy of the shared tail
    with pytest.raises(
        CapacityError,
        match=r"14 tokens need 3 more blocks of 4 tokens, but only 2 of 4 are free; enlarge",
    ):
        manager.extend(table, 14)
    assert before == (table.block_ids, manager.block_states(), [0, 1])
    assert manager.drain_new_blocks() == []
    assert manager.cow_copies == 0
    manager.check_invariants([held, table])
    assert len(manager.extend(table, 12)) == 1
    manager.check_invariants([held, table])


def test_extending_to_existing_blocks_allocates_nothing():
    manager = KVCacheManager(4, B)
    table = prefill(manager, [1] * 6)
    assert manager.extend(table, 8) == []
    assert manager.extend(table, 3) == []
    assert manager.extend(table, 0) == []
    assert manager.used_block_count == 2


# publishing


def test_an_unpublished_commit_stops_publishing_for_table_and_forks():
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
def test_a_commit_must_grow_and_fit(num_computed):
    manager = KVCacheManager(8, B)
    table = prefill(manager, list(range(4)))
    manager.extend(table, 12)
    with pytest.raises(CacheCorruption, match=rf"commit of {num_computed} tokens"):
        manager.commit(table, list(range(8 if num_computed == 9 else 20)), num_computed)


def test_a_rewrite_with_other_tokens_raises():
    manager = KVCacheManager(8, B)
    manager.free(prefill(manager, [1, 2, 3, 4]))
    table = manager.open_table([1, 2, 3, 4], ROOT)
    manager.extend(table, 4)
    with pytest.raises(CacheCorruption, match="changed while it was rewritten"):
        manager.commit(table, [1, 2, 3, 5], 4)


# prompts in flight


def test_the_awaited_hash_is_the_last_promised_block():
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


def test_progress_counts_events_that_may_free_blocks():
    manager = KVCacheManager(16, B)
    table = manager.open_table(list(range(10)), ROOT)
    manager.extend(table, 10)
    assert manager.progress == 0
    manager.commit(table, list(range(10)), 10)
    assert manager.progress == 2  # two full blocks
    manager.free(table)
    assert manager.progress == 3
    again = manager.open_table(list(range(8)), ROOT)
    manager.extend(again, 8)  # takes back the block that holds its last token
    manager.commit(again, list(range(8)), 8)
    assert manager.progress == 4


def test_an_uncounted_table_still_gets_hits():
    manager = KVCacheManager(16, B)
    manager.free(prefill(manager, list(range(8))))
    table = manager.open_table(list(range(12)), ROOT, count=False)
    manager.extend(table, 12)
    assert (table.num_cached_tokens, manager.hit_tokens, manager.miss_tokens) == (8, 0, 8)
