"""Definition of reuse: a prompt hits a block, or a request continues a published chain."""

import pytest

from helpers.kvcache.manager_cases import ROOT, B, prefill
from kvboost_edge.kvcache.eviction.block_usage import Uses
from kvboost_edge.kvcache.eviction.policy import LeastRecentlyUsed, TenantFloors
from kvboost_edge.kvcache.manager import KVCacheManager


def used_again(manager, tokens):
    """Report for each published block of a prompt whether it counts as reused."""
    table = manager.open_table([*tokens, 0], ROOT, count=False)
    flags = [manager._uses.again[block_id] for block_id in table.block_ids]
    manager.free(table)
    return flags


def test_a_block_counts_as_reused_once_it_is_hit():
    manager = KVCacheManager(12, B)
    head = [1] * 8
    one = [*[1] * 8, *[2] * 4]
    other = [*[1] * 8, *[3] * 4]
    manager.free(prefill(manager, one))
    assert used_again(manager, one) == [0, 0, 0]
    manager.free(prefill(manager, other))
    assert used_again(manager, one) == [1, 1, 0]
    assert used_again(manager, other) == [1, 1, 0], "the shared head must count as reused"
    manager.free(prefill(manager, [*head, *[4] * 4]))
    assert used_again(manager, [*head, *[4] * 4]) == [1, 1, 0]


def test_continuing_a_chain_counts_as_reuse_of_all_its_blocks():
    manager = KVCacheManager(12, B)
    turn = [1] * 8
    manager.free(prefill(manager, turn))
    manager.free(prefill(manager, [*turn, *[2] * 9]))
    assert used_again(manager, [*turn, *[2] * 9]) == [1, 1, 1, 1]


def test_a_reallocated_block_has_no_usage():
    manager = KVCacheManager(4, B)
    for _ in range(2):
        manager.free(prefill(manager, [1] * 8))
    assert used_again(manager, [1] * 8) == [1, 1]
    manager.free(prefill(manager, [2] * 16))
    assert used_again(manager, [2] * 16) == [0, 0, 0, 0]


def test_a_hit_after_preemption_is_not_a_reuse():
    manager = KVCacheManager(4, B)
    manager.free(prefill(manager, [1] * 8))
    assert used_again(manager, [1] * 8) == [0, 0]
    assert used_again(manager, [1] * 8) == [0, 0]


def test_a_table_may_declare_expected_reuse():
    for use_cache in (True, False):
        manager = KVCacheManager(12, B)
        table = manager.open_table([1] * 8, ROOT, use_cache=use_cache, again=True)
        manager.extend(table, 8)
        manager.commit(table, [1] * 8, 8)
        manager.free(table)
        assert used_again(manager, [1] * 8) == [1, 1]


def test_uses_records_reuse():
    uses = Uses(3)
    assert not uses.matched([])
    uses.follow([0])
    assert uses.matched([0, 1])
    assert not uses.matched([0])
    assert list(uses.again) == [1, 1, 0]
    uses.forget([0])
    assert uses.matched([0])


@pytest.mark.parametrize(("policy", "expected"), [(LeastRecentlyUsed, 0), (TenantFloors, 5 * 4)])
def test_single_use_documents_do_not_evict_conversations(policy, expected):
    """Three documents exceed what LRU keeps. The policy learns from the misses of the first rounds."""
    manager = KVCacheManager(40, B, policy=policy)
    chats = [[number] * 2 * B for number in range(1, 5)]
    hits = 0
    for turn in range(12):
        for tokens in chats * 2:
            table = prefill(manager, [*tokens, 0])
            hits += turn > 6 and table.num_cached_tokens == len(tokens)
            manager.free(table)
        hits -= 4 * (turn > 6)  # hits of the second pass
        for number in range(3):
            manager.free(prefill(manager, [100 + 3 * turn + number] * 15 * B))
    assert hits == expected
