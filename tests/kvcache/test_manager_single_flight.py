"""A prompt that is being computed is waited for, and whoever waits is always released."""

from __future__ import annotations

from helpers.kvcache.manager_cases import OTHER, ROOT, B, prefill
from kvboost_edge.kvcache.manager import KVCacheManager


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
