"""Pinned prompts: they survive all other requests. Also unpinning, the limit and owners."""

import pytest

from helpers.kvcache.manager_cases import OTHER, ROOT, B, prefill
from kvboost_edge.errors import CacheCorruption, CapacityError, ConfigError, RequestError
from kvboost_edge.kvcache.eviction.policy import TenantFloors
from kvboost_edge.kvcache.manager import BLOCK_CACHED, KVCacheManager


def cached(manager, tokens, root=ROOT):
    return manager.peek([*tokens, 0], root) // B


def fill(manager):
    """Allocate every free block, then free them all."""
    table = manager.open_table([], ROOT, use_cache=False)
    manager.extend(table, manager.free_block_count * B)
    manager.free(table)


def warmed(num_blocks, *prompts, max_pinned_blocks=None):
    manager = KVCacheManager(
        num_blocks, B, policy=TenantFloors, max_pinned_blocks=max_pinned_blocks
    )
    for tokens in prompts:
        manager.free(prefill(manager, tokens))
    return manager


def test_a_pinned_prompt_is_kept_until_unpinned():
    manager = warmed(8, [1] * 10, [2] * 8)
    assert manager.pins.add([1] * 10, ROOT) == 2
    assert (manager.used_block_count, manager.usable_block_count, manager.pins.num_blocks) == (
        2,
        6,
        2,
    )
    fill(manager)
    manager.reset()
    assert (cached(manager, [1] * 8), cached(manager, [2] * 8)) == (2, 0)
    manager.check_invariants([])
    before = manager.progress
    assert manager.pins.end([1] * 11, ROOT) == 2, "the same full blocks must be unpinned"
    assert manager.progress > before, "progress must show that blocks became available"
    assert manager.block_states().count(BLOCK_CACHED) == 2
    fill(manager)
    assert cached(manager, [1] * 8) == 0
    manager.check_invariants([])


def test_pins_expire_and_repinning_renews_them():
    manager = warmed(12, [1] * 8, [2] * 8)
    pins = manager.pins
    pins.add([1] * 8, ROOT, until=5.0)
    pins.add([2] * 8, ROOT, until=9.0)
    assert pins.next_end == 5.0
    pins.add([1] * 8, ROOT, until=20.0)
    assert (pins.next_end, len(pins), pins.num_blocks) == (9.0, 2, 4)
    pins.expire(8.99)
    assert len(pins) == 2
    pins.expire(9.0)
    assert (pins.next_end, len(pins), pins.num_blocks) == (20.0, 1, 2)
    pins.add([1] * 8, ROOT)
    assert pins.next_end is None
    pins.expire(1e12)
    assert len(pins) == 1
    manager.check_invariants([])


def test_a_pin_lasts_to_the_latest_end_of_its_holders():
    manager = warmed(12, [1] * 8)
    pins = manager.pins
    pins.add([1] * 8, ROOT, holder="long", until=20.0)
    pins.add([1] * 8, ROOT, holder="short", until=5.0)
    assert (pins.next_end, len(pins), pins.num_blocks) == (5.0, 1, 2)
    pins.expire(5.0)
    assert (pins.next_end, pins.num_blocks) == (20.0, 2)
    pins.add([1] * 8, ROOT, holder="long", until=9.0)  # the holder's own end is replaced
    pins.expire(9.0)
    assert (pins.next_end, pins.num_blocks) == (None, 0)
    manager.check_invariants([])


def test_a_holder_ends_a_pin_for_itself_alone():
    manager = warmed(12, [1] * 8)
    pins = manager.pins
    for holder in ("", "one", "two"):
        pins.add([1] * 8, ROOT, holder=holder)
    assert [pins.end([1] * 8, ROOT, one) for one in ("two", "two", "unknown")] == [0, 0, 0]
    assert pins.end([1] * 8, ROOT, "") == 0
    assert pins.num_blocks == 2
    assert pins.end([1] * 8, ROOT, "one") == 2
    for holder in ("", "one"):
        pins.add([1] * 8, ROOT, holder=holder, until=5.0)
    assert pins.end([1] * 8, ROOT) == 2, "without a holder, the pin must end for all"
    assert pins.next_end is None
    manager.check_invariants([])


def test_blocks_of_two_pins_stay_until_both_end():
    one = [1] * 8 + [2] * 4
    two = [1] * 8 + [3] * 4
    manager = warmed(8, one, two)
    for tokens in (one, two, [1] * 8):
        manager.pins.add(tokens, ROOT)
    assert manager.pins.num_blocks == 4
    assert [manager.pins.end(tokens, ROOT) for tokens in (one, one, [1] * 8, two)] == [1, 0, 0, 3]
    assert manager.used_block_count == 0
    manager.check_invariants([])


def test_pins_beyond_the_limit_are_refused_without_changes():
    manager = warmed(12, [1] * 8, [2] * 8, max_pinned_blocks=3)
    manager.pins.add([1] * 8, ROOT)
    with pytest.raises(
        CapacityError,
        match=r"2 more blocks cannot be pinned.*max_pinned_blocks=3 of the 12 blocks in the pool; unpin",
    ):
        manager.pins.add([2] * 8, ROOT)
    with pytest.raises(CapacityError, match="4 more blocks cannot be pinned"):
        manager.pins.check_size(16)
    with pytest.raises(
        RequestError, match=r"cannot be pinned: the 3 tokens .* do not fill a block of 4"
    ):
        manager.pins.add([1] * 3, ROOT)
    with pytest.raises(CapacityError, match="only 0 of the prompt's 1 full blocks are cached"):
        manager.pins.add([3] * 4, ROOT)
    assert (manager.pins.num_blocks, len(manager.pins)) == (2, 1)
    manager.pins.add([1] * 8, ROOT)  # pinned blocks need no further room
    manager.check_invariants([])


@pytest.mark.parametrize("limit", [-1, 7])
def test_max_pinned_blocks_is_at_most_half_of_the_pool(limit):
    with pytest.raises(
        ConfigError, match=rf"max_pinned_blocks={limit} must be in 0\.\.6, half of the 12 blocks"
    ):
        KVCacheManager(12, B, max_pinned_blocks=limit)


def test_one_tenants_pins_leave_other_tenants_reserves():
    """Tenant a pins as much as it may and keeps reading. Tenant b keeps its share of the half of
    the pool that cannot be pinned.
    """
    manager = KVCacheManager(40, B, policy=TenantFloors)
    for owner, root, blocks in ((b"b", OTHER, 10), (b"a", ROOT, 20)):
        table = manager.open_table([1] * (blocks * B), root, owner=owner)
        manager.extend(table, blocks * B)
        manager.commit(table, [1] * (blocks * B), blocks * B)
        manager.free(table)
    manager.pins.add([1] * (20 * B), ROOT, owner=b"a")
    for number in range(30):
        tokens = [2 + number] * (5 * B)
        table = manager.open_table(tokens, ROOT, owner=b"a")
        manager.extend(table, len(tokens))
        manager.commit(table, tokens, len(tokens))
        manager.free(table)
    assert cached(manager, [1] * (10 * B), OTHER) == 10
    assert cached(manager, [1] * (20 * B)) == 20


def test_pin_counts_are_checked():
    manager = warmed(8, [1] * 8)
    manager.pins.add([1] * 8, ROOT)
    manager.pins._counts.popitem()
    with pytest.raises(CacheCorruption, match="pinned"):
        manager.check_invariants([])


def test_pin_shares_are_independent_and_reveal_nothing():
    """With shares that add up to 1 each owner pins its own part, whatever the other has pinned. A
    refusal has the same text whether or not others have pins.
    """
    refusals = []
    for others in (False, True):
        manager = warmed(24, *([n] * 8 for n in range(1, 5)))
        for n in (11, 12, 13):
            manager.free(prefill(manager, [n] * 8, OTHER))
        pins = manager.pins
        if others:
            for n in (11, 12, 13):
                pins.add([n] * 8, OTHER, owner=b"other", share=0.5)
        for n in (1, 2, 3, 1):
            assert pins.add([n] * 8, ROOT, owner=b"one", share=0.5) == 2
        assert (pins.num_owned(b"one"), pins.num_owned(b"other")) == (6, 6 * others)
        with pytest.raises(
            CapacityError, match="this tenant's share of max_pinned_blocks is 6; unpin"
        ) as refused:
            pins.add([4] * 8, ROOT, owner=b"one", share=0.5)
        with pytest.raises(CapacityError, match="7 more blocks cannot be pinned") as too_long:
            pins.check_size(7 * B, 0.5)
        refusals.append((str(refused.value), str(too_long.value)))
        manager.check_invariants([])
        assert pins.end([2] * 8, ROOT) == 2
        assert pins.add([4] * 8, ROOT, owner=b"one", share=0.5) == 2
    assert refusals[0] == refusals[1]
    assert not {"24", "12"} & set(refusals[0][0].split()), (
        "the refusal must not show totals, which reveal the number of tenants"
    )


@pytest.mark.parametrize("number", [1, 3, 7, 49, 98])
def test_equal_pin_shares_round_to_whole_blocks(number):
    pins = KVCacheManager(196, B).pins
    pins.check_size(98 // number * B, 1 / number)
    with pytest.raises(CapacityError):
        pins.check_size((98 // number + 1) * B, 1 / number)
