"""What the manager takes back when room is needed, in which order, and what it does when there is none."""

from __future__ import annotations

import pytest

from helpers.kvcache.manager_cases import ROOT, B, prefill
from kvboost_edge.errors import CapacityError
from kvboost_edge.kvcache.manager import BLOCK_FREE, KVCacheManager

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
