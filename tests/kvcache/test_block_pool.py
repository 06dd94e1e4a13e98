"""Reference counts of blocks, and errors of wrong calls."""

import pytest

from helpers.raising import assert_raises
from kvboost_edge.errors import CacheCorruption, CapacityError, ConfigError
from kvboost_edge.kvcache.block_pool import BlockPool


@pytest.mark.parametrize("bad", [0, -1, 1.0, "4", None, True])
def test_a_pool_has_at_least_one_block(bad):
    assert_raises(ConfigError, "num_blocks", BlockPool, bad)


def test_take_is_all_or_nothing():
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(
        CapacityError,
        match=r"3 blocks are needed, but only 2 of 3 are free; enlarge max_cache_bytes or num_blocks",
    ):
        pool.take(3)
    assert (pool.num_free, pool.ref_counts()) == (2, [1, 0, 0])
    assert pool.take(0) == []


def test_a_touched_block_is_freed_by_its_last_holder():
    pool = BlockPool(2)
    pool.take(1)
    pool.touch(0)
    pool.release(0, matchable=True)
    assert (pool.ref_count(0), pool.num_free) == (1, 1)
    pool.release(0, matchable=True)
    assert (pool.ref_count(0), pool.num_free) == (0, 2)
    pool.touch(0)
    assert (pool.ref_count(0), pool.free_ids()) == (1, [1])


def test_double_free_raises_and_changes_nothing():
    pool = BlockPool(2)
    pool.take(1)
    pool.release(0, matchable=True)
    assert_raises(CacheCorruption, "double free: block 0", pool.release, 0, matchable=True)
    assert pool.free_ids() == [1, 0]


@pytest.mark.parametrize("stale", [-1, 2, 10**9])
def test_stale_ids_raise(stale):
    pool = BlockPool(2)
    for operation in (
        pool.touch,
        pool.refresh,
        pool.ref_count,
        lambda block_id: pool.release(block_id, matchable=True),
    ):
        assert_raises(CacheCorruption, "stale block id", operation, stale)
    pool.check([])


def test_check_detects_each_inconsistency():
    pool = BlockPool(3)
    pool.take(2)
    pool.check([0, 1])
    for holders in ([0], [0, 1, 1], [0, 1, 2], [0, 1, 7]):
        with pytest.raises(CacheCorruption):
            pool.check(holders)
    pool._free.put(0, matchable=False)  # a referenced block in the free list
    assert_raises(CacheCorruption, "free list", pool.check, [0, 1])
    pool._free.take(2)  # and a free one missing from it
    assert_raises(CacheCorruption, "free list", pool.check, [0, 1])
