"""Eviction policies as objects: the LRU order, and the calls that pool and manager make."""

import random

import pytest

from helpers.raising import assert_raises
from kvboost_edge.errors import CacheCorruption, CapacityError
from kvboost_edge.kvcache.block_pool import BlockPool
from kvboost_edge.kvcache.eviction.policy import LeastRecentlyUsed, TenantFloors
from kvboost_edge.kvcache.hashing import root_hash
from kvboost_edge.kvcache.manager import KVCacheManager

ROOT = root_hash(model_fingerprint="m", kv_format="f32", tenant="")


class NewestFirst(LeastRecentlyUsed):
    """Policy that evicts the most recently used block first."""

    def take(self, count, owner=b""):
        newest = self.order()[::-1][:count]
        for block_id in newest:
            self.remove(block_id)
        return newest


def test_least_recently_used_order():
    policy = LeastRecentlyUsed(range(4))
    assert policy.take(2) == [0, 1]
    policy.put(0, matchable=True)
    policy.put(1, matchable=False)
    assert policy.order() == [1, 2, 3, 0]
    policy.refresh(2)
    policy.remove(3)
    assert policy.order() == [1, 0, 2]
    assert (len(policy), 3 in policy, 2 in policy) == (3, False, True)


def test_the_pool_evicts_in_its_policys_order():
    pool = BlockPool(3, NewestFirst)
    assert pool.take(1) == [2]
    pool.release(2, matchable=True)
    assert pool.take(2) == [2, 1]
    pool.check([1, 2])


def test_the_policy_determines_the_evicted_prefix():
    def survivor(manager):
        first = [1, 2, 3, 4, 0]
        second = [5, 6, 7, 8, 0]
        tables = [manager.open_table(tokens, ROOT) for tokens in (first, second)]
        for table, tokens in zip(tables, (first, second), strict=True):
            manager.extend(table, 4)
            manager.commit(table, tokens, 4)
        for table in tables:
            manager.free(table)
        big = manager.open_table(list(range(10, 14)), ROOT, use_cache=False)
        manager.extend(big, 4)
        manager.check_invariants([big])
        return [manager.peek(tokens, ROOT) > 0 for tokens in (first, second)]

    assert survivor(KVCacheManager(2, 4)) == [False, True]
    assert survivor(KVCacheManager(2, 4, policy=NewestFirst)) == [True, False]


def test_pinned_blocks_count_as_referenced():
    manager = KVCacheManager(4, 4)
    pool = manager._pool
    for block_id in (0, 1):
        pool.hold(block_id)
    assert (manager.usable_block_count, manager.used_block_count, manager.free_block_count) == (
        2,
        2,
        2,
    )
    pool.check([])
    assert_raises(CapacityError, "2 of 4", pool.take, 3)
    assert_raises(CacheCorruption, "block 1 is already pinned", pool.hold, 1)
    pool.let_go(1, matchable=False)
    assert_raises(CacheCorruption, "block 1 is not pinned", pool.let_go, 1, matchable=False)
    pool.release(0, matchable=False)
    assert_raises(CacheCorruption, "block 0", pool.check, [])  # it is pinned but has no reference


def test_tenant_floors_with_one_owner_equal_lru():
    rng = random.Random(5)
    for _ in range(50):
        both = LeastRecentlyUsed(range(12)), TenantFloors(range(12))
        used = []
        for _ in range(200):
            act = rng.choice(("take", "put", "remove", "refresh"))
            number = rng.randrange(1, 4)
            free = both[0].order()
            if act == "take" and number <= len(free):
                taken = [policy.take(number, b"a") for policy in both]
                assert taken[0] == taken[1]
                used += taken[0]
            elif act == "put" and used:
                block_id = used.pop(rng.randrange(len(used)))
                matchable = rng.random() < 0.7
                for policy in both:
                    policy.put(block_id, matchable=matchable, owner=b"a")
            elif act == "remove" and free:
                used.append(rng.choice(free))
                for policy in both:
                    policy.remove(used[-1])
            elif act == "refresh" and any(b in both[1]._cached for b in free):
                block_id = rng.choice([b for b in free if b in both[1]._cached])
                for policy in both:
                    policy.refresh(block_id)
            assert both[0].order() == both[1].order()
            assert (len(both[0]), both[0].protected(b"a")) == (
                len(both[1]),
                both[1].protected(b"a"),
            )
            assert all((b in both[0]) == (b in both[1]) for b in range(12))


@pytest.mark.parametrize("length", [1, 5, 20, 40])
def test_the_first_flood_evicts_no_reused_block(length):
    """All documents are new, so no earlier miss could have taught the policy."""
    manager = KVCacheManager(64, 4, policy=TenantFloors)
    prompt = [1] * 40

    def ask(tokens):
        table = manager.open_table(tokens, ROOT)
        manager.extend(table, len(tokens))
        manager.commit(table, tokens, len(tokens))
        manager.free(table)
        return table.num_cached_tokens

    for number in range(20):
        ask([*prompt, 2, number])
    for number in range(600 // length):
        ask([1000 + number] * 4 * length)
    manager.check_invariants([])
    assert manager.evictions > 500
    assert ask([*prompt, 3]) == 40


def test_tenant_floors_order():
    policy = TenantFloors(range(12))
    policy.take(10)
    for block_id in range(10):
        policy.put(block_id, matchable=True, owner=b"ab"[block_id // 5 : block_id // 5 + 1])
    assert (policy.protected(b"a"), policy.protected(b"b"), policy.protected(b"c")) == (3, 3, 6)
    assert policy.take(6, b"b") == [10, 11, 0, 1, 5, 6], (
        "tenant a must lose two blocks and be at its floor"
    )
    assert policy.take(4, b"c") == [2, 3, 4, 7], (
        "if no tenant is above its floor, the oldest blocks must be evicted"
    )
    assert len(policy) == 2
