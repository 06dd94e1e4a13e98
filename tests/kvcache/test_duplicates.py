"""Duplicate blocks: a table replaces blocks that it computed by published ones of equal content."""

import pytest

from helpers.kvcache.manager_cases import ROOT, B, prefill
from kvboost_edge.kvcache.block_table import CopyOp
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.kvcache.recurrent.snapshots import StateSizes


def compute(manager, table, tokens):
    """Compute the pending tokens of a table in one pass of a model with recurrent state."""
    manager.extend(table, len(tokens))
    manager.states.plan(table, table.num_computed_tokens, len(tokens))
    manager.commit(table, tokens, len(tokens))


def take_all(manager):
    """Allocate every free block and free them, which evicts all that is idle."""
    filler = manager.open_table([], b"f" * 32, use_cache=False)
    manager.extend(filler, B * manager.free_block_count)
    manager.free(filler)


def test_duplicate_blocks_are_replaced_by_published_ones():
    manager = KVCacheManager(8, B)
    tokens = list(range(12))
    first, second = (manager.open_table(tokens, ROOT) for _ in range(2))
    for table in (first, second):
        manager.extend(table, 10)
    own = second.block_ids[:2]
    manager.drain_released()
    manager.commit(first, tokens, 10)
    progress = manager.progress
    manager.commit(second, tokens, 10)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2], (
        "a block that is not full must not be replaced"
    )
    assert (manager.drain_released(), manager.used_block_count) == (own, 4)
    assert manager.progress > progress, "progress must show that blocks became available"
    manager.free(first)
    take_all(manager)
    assert manager.peek([*tokens[:8], 99], ROOT) == 8
    manager.check_invariants([second])


@pytest.mark.parametrize(("own", "published"), [(4, 0), (3, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("copies_full", [False, True])
def test_a_published_block_takes_over_kv_of_a_drafter_that_it_lacks(own, published, copies_full):
    manager = KVCacheManager(8, B)
    tokens = list(range(5))
    first, second = (manager.open_table(tokens, ROOT) for _ in range(2))
    copied = []
    manager.drafted.copy_kv = copied.extend
    manager.drafted.copies_full = copies_full
    for table, num_filled in ((first, published), (second, own)):
        manager.extend(table, 5)
        manager.drafted.fill(table.block_ids[0], num_filled)
    copy = CopyOp(second.block_ids[0], first.block_ids[0])
    manager.commit(first, tokens, 5)
    manager.commit(second, tokens, 5)
    is_copied = own > published and (own == B or not copies_full)
    assert copied == [copy] * is_copied
    assert manager.drafted.filled[second.block_ids[0]] == (own if is_copied else published)


def test_replayed_blocks_stay_published_while_their_table_lives():
    """The replay duplicates blocks that are published. The table takes over the published ones
    before they are evicted.
    """
    manager = KVCacheManager(16, B, state_sizes=StateSizes(8))
    tokens = list(range(7 * B))
    table = manager.open_table(tokens[:25], ROOT)
    compute(manager, table, tokens[:25])
    manager.free(table)
    for block_id in manager.states.slots.snapshots():
        manager.states.slots.drop(block_id)
    again = manager.open_table(tokens, ROOT)
    assert (again.num_cached_tokens, again.num_matched_tokens) == (0, 6 * B)
    for stop in (6, 12, 18, 24, 28):
        compute(manager, again, tokens[:stop])
        assert manager.used_block_count == len(again) == -(-stop // B)
    take_all(manager)
    following = manager.open_table([*tokens, 1], ROOT)
    assert following.block_ids == again.block_ids, (
        "the recomputed last block must follow the six published ones"
    )
    manager.check_invariants([again, following])


def test_a_copy_replaces_its_evicted_original():
    manager = KVCacheManager(4, B)
    tokens = list(range(8))
    first = prefill(manager, [*tokens, 1, 2, 3, 4])
    second = manager.open_table(tokens, ROOT)
    (copy,) = manager.extend(second, 8)
    assert copy == CopyOp(first.block_ids[1], second.block_ids[1])
    manager.free(first)
    take_all(manager)
    assert manager.peek([*tokens, 0], ROOT) == 4
    manager.content.track()
    manager.commit(second, tokens, 8)
    assert manager.peek([*tokens, 0], ROOT) == 8
    assert manager.content.drain_published() == [second.block_ids[1]]
    manager.check_invariants([second])


@pytest.mark.parametrize("forked", [False, True])
def test_a_table_that_bypasses_the_cache_keeps_its_own_blocks(forked):
    manager = KVCacheManager(8, B)
    tokens = list(range(8))
    first = prefill(manager, tokens)
    second = prefill(manager, tokens, use_cache=False)
    assert set(first.block_ids).isdisjoint(second.block_ids)
    if forked:
        child = manager.fork(second)
        manager.free(second)
        second = child
    manager.free(first)
    running = [*tokens, 1, 2, 3, 4]
    manager.extend(second, 12)
    manager.commit(second, running, 12)
    manager.free(second)
    assert manager.peek([*running, 0], ROOT) == 12
    filler = manager.open_table([], ROOT, use_cache=False)
    manager.extend(filler, B * (manager.free_block_count - 2))
    assert manager.peek([*running, 0], ROOT) == 8  # the end of the chain was evicted first


def test_a_table_kept_apart_keeps_its_own_blocks():
    manager = KVCacheManager(8, B)
    tokens = list(range(8))
    manager.duplicates.keep_apart()
    first, second = (manager.open_table(tokens, ROOT) for _ in range(2))
    for table in (first, second):
        manager.extend(table, 8)
        manager.commit(table, tokens, 8)
    assert set(first.block_ids).isdisjoint(second.block_ids)
    manager.check_invariants([first, second])


def test_an_evicted_duplicate_is_not_confused_with_its_successor():
    manager = KVCacheManager(3, B)
    tokens = list(range(4))
    first = prefill(manager, tokens)
    second = prefill(
        manager, tokens, use_cache=False
    )  # its published duplicate is the first table's block
    manager.free(first)
    third = prefill(manager, [7] * 4)
    fourth = prefill(manager, [8] * 4)  # takes the block of the evicted duplicate
    assert fourth.block_ids == [0]
    manager.free(fourth)
    manager.free(third)
    manager.free(second)  # must not refresh block 0
    manager.free(
        prefill(manager, [5] * 8)
    )  # takes the second table's block and the oldest cached one
    assert [manager.peek([token] * 4 + [0], ROOT) for token in (7, 8)] == [4, 0]
