"""Retained blocks: they outlive the other blocks of their owner until they expire, and never refuse
a block to a request.
"""

import random

import pytest

from helpers.kvcache.manager_cases import OTHER, ROOT, B, prefill
from kvboost_edge.kvcache.eviction.policy import LeastRecentlyUsed, TenantFloors
from kvboost_edge.kvcache.manager import KVCacheManager


def run(manager, tokens, owner=b"", root=ROOT, ttl=0.0):
    """Compute a whole prompt and return the number of its cached blocks. A nonzero `ttl` retains
    the prompt until then.
    """
    table = manager.open_table(tokens, root, owner=owner)
    found = table.num_cached_tokens // B
    manager.extend(table, len(tokens))
    manager.commit(table, tokens, len(tokens))
    if ttl:
        manager.pins.retain(manager.pins.published(tokens, root), owner, ttl)
    manager.free(table)
    manager.check_invariants([])
    return found


def scan(manager, length, owner=b"", root=ROOT, times=1):
    """Compute `length` different prompts, each `times` times."""
    for number in range(length):
        for _ in range(times):
            run(manager, [1000 + number] * B, owner, root)


def cached(manager, tokens, root=ROOT):
    return manager.peek([*tokens, 0], root) // B


def test_retained_blocks_survive_a_scan_until_they_expire():
    manager = KVCacheManager(16, B, policy=TenantFloors)
    kept = [1] * 4 * B
    plain = [2] * 4 * B
    run(manager, kept, ttl=100.0)
    for _ in range(3):
        run(manager, plain)
    scan(manager, 200)
    assert (cached(manager, kept), cached(manager, plain)) == (4, 4), (
        "the prompt that was reused must stay cached"
    )
    scan(manager, 200, times=2)
    assert (cached(manager, kept), cached(manager, plain)) == (4, 0)
    manager.pins.expire(99.9)
    scan(manager, 200, times=2)
    assert (cached(manager, kept), manager.pins.num_retained) == (4, 4)
    manager.pins.expire(100.0)
    assert (cached(manager, kept), manager.pins.num_retained) == (4, 0), (
        "an expired prompt must stay cached until its blocks are needed"
    )
    manager.check_invariants([])
    scan(manager, 200, times=2)
    assert cached(manager, kept) == 0


def test_expiry_is_checked_once_a_second():
    manager = KVCacheManager(16, B, policy=TenantFloors)
    for number in range(5):
        run(manager, [number] * B, ttl=10.0 + number / 10)
    manager.pins.expire(10.05)
    assert manager.pins.num_retained == 4
    manager.pins.expire(10.5)
    assert manager.pins.num_retained == 4
    manager.pins.expire(11.05)
    assert manager.pins.num_retained == 0
    run(manager, [9] * B, ttl=11.5)
    manager.pins.expire(11.5)
    assert manager.pins.num_retained == 0, "an earlier expiry must be checked earlier"


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, TenantFloors])
def test_retained_blocks_are_free_for_other_requests(policy):
    """All of the pool is retained. A request that needs all of it gets it at once."""
    manager = KVCacheManager(8, B, policy=policy)
    run(manager, [1] * 8 * B, ttl=1e9)
    assert manager.free_block_count == manager.usable_block_count == 8
    assert manager.protected_block_count(b"") == 0
    assert run(manager, [2] * 8 * B) == 0
    assert (cached(manager, [1] * 8 * B), manager.pins.num_retained) == (0, 0)


def test_the_longest_retention_applies_and_use_does_not_extend_it():
    manager = KVCacheManager(16, B, policy=TenantFloors)
    run(manager, [1] * 2 * B, ttl=50.0)
    assert run(manager, [1] * 2 * B, ttl=20.0) == 1
    run(manager, [1] * 2 * B)
    manager.pins.expire(49.0)
    assert manager.pins.num_retained == 2
    manager.pins.expire(51.0)
    assert manager.pins.num_retained == 0


def test_the_latest_half_of_an_owners_retained_blocks_stays():
    manager = KVCacheManager(16, B, policy=TenantFloors)
    for number in range(1, 40):
        run(manager, [number] * 2 * B, ttl=1e9)
    scan(manager, 100, times=2)
    assert [number for number in range(1, 40) if cached(manager, [number] * 2 * B) == 2] == [
        36,
        37,
        38,
        39,
    ]


def test_retaining_everything_takes_nothing_from_another_owner():
    """Two owners share a pool of 24 blocks. Each keeps its floor of 6, whether or not the other
    retains blocks.
    """
    found = []
    for ttl in (0.0, 1e9):
        manager = KVCacheManager(24, B, policy=TenantFloors)
        mine = [7] * 6 * B
        run(manager, mine, b"one", ROOT)
        for number in range(1, 60):
            run(manager, [number] * 3 * B, b"other", OTHER, ttl)
        found.append(cached(manager, mine))
    assert found == [6, 6]


def test_an_expired_pin_keeps_retained_blocks():
    manager = KVCacheManager(16, B, policy=TenantFloors)
    run(manager, [1] * 2 * B, ttl=1e9)
    manager.pins.add([1] * 2 * B, ROOT)
    manager.pins.end([1] * 2 * B, ROOT)
    scan(manager, 100)
    assert cached(manager, [1] * 2 * B) == 2


def test_a_reset_ends_retention():
    manager = KVCacheManager(8, B, policy=TenantFloors)
    run(manager, [1] * 2 * B, ttl=1e9)
    run(manager, [2] * 4 * B)
    assert (manager.reset(), manager.pins.num_retained) == (6, 0)
    run(manager, [3] * 2 * B)
    run(manager, [4] * 6 * B)
    assert cached(manager, [3] * 2 * B) == 2, "blocks that cannot be matched must be evicted first"
    manager.pins.expire(1e12)
    manager.check_invariants([])


def test_retention_applies_to_the_published_duplicate():
    """A sequence that bypasses the cache has unpublished blocks of its own. The published ones,
    which are idle, are retained.
    """
    manager = KVCacheManager(16, B, policy=TenantFloors)
    run(manager, [1] * 2 * B)
    table = prefill(manager, [1] * 2 * B, use_cache=False)
    manager.pins.retain(manager.pins.published([1] * 2 * B, ROOT), b"", 1e9)
    manager.free(table)
    scan(manager, 100)
    assert cached(manager, [1] * 2 * B) == 2


def test_an_ancestor_is_never_evicted_before_its_descendants():
    rng = random.Random(5)
    manager = KVCacheManager(60, B, policy=TenantFloors)
    texts = [[rng.randrange(5)] * B * 2 for _ in range(3)]
    ended = 0
    for now in range(1500):
        before = manager.pins.num_retained
        manager.pins.expire(now)
        ended += manager.pins.num_retained < before
        tokens = rng.choice(texts) + [
            token for _ in range(rng.randrange(8)) for token in [rng.randrange(3)] * B
        ]
        owner = rng.choice((b"a", b"b", b"c"))
        ttl = rng.choice((0.0, now + 3.0, now + 40.0))
        run(manager, [*tokens, 1], owner, owner * 32, ttl)
        serials = {0, *(entry.serial for entry in manager._index.entries().values())}
        assert all(entry.parent_serial in serials for entry in manager._index.entries().values())
    assert manager.evictions > 500
    assert ended > 50
