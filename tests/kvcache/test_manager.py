"""The manager's promises one by one, here what it refuses and shows; test_state_machine.py holds them together."""

from __future__ import annotations

import copy

import pytest

from helpers.kvcache.manager_cases import ROOT, B, prefill
from kvboost_edge.errors import CacheCorruption, ConfigError, RequestError
from kvboost_edge.kvcache.manager import BLOCK_CACHED, BLOCK_FREE, BLOCK_REFERENCED, BLOCK_SHARED, KVCacheManager

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
            lambda t: manager.shrink(t, 0),
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


def test_blocks_behind_the_tokens_are_given_back() -> None:
    manager = KVCacheManager(8, B)
    table = prefill(manager, list(range(2 * B + 1)))
    progress = manager.progress
    manager.extend(table, 5 * B)
    manager.shrink(table, 2 * B + 2)
    assert (len(table), manager.free_block_count) == (3, 5)
    assert manager.progress > progress, "whoever found no room may look again"
    assert len(manager.drain_released()) == 2
    assert len(manager.drain_new_blocks()) == 3
    manager.shrink(table, 2 * B + 2)
    assert manager.drain_released() == []
    with pytest.raises(CacheCorruption, match="33 computed tokens cannot be cut to 32" if B == 16 else "cannot be cut"):
        manager.shrink(table, 2 * B)
    child = manager.fork(table)
    manager.extend(table, 4 * B)
    twin = manager.fork(table)
    with pytest.raises(CacheCorruption, match="shared or published"):
        manager.shrink(table, 2 * B + 2)
    for one in (table, child, twin):
        manager.free(one)
    manager.check_invariants([])


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
