"""Lookup on storage whose full blocks cannot be rewritten, and the reasons for misses."""

import pytest

from kvboost_edge.kvcache import lookup
from kvboost_edge.kvcache.hashing import narrowed_root, root_hash
from kvboost_edge.kvcache.manager import KVCacheManager

ROOT = root_hash(model_fingerprint="m", kv_format="f")
BLOCK = 16


def compute(manager, tokens, root=ROOT):
    """Compute a whole prompt and free its table."""
    table = manager.open_table(tokens, root)
    manager.extend(table, len(tokens))
    manager.commit(table, tokens, len(tokens))
    manager.free(table)
    manager.check_invariants([])


@pytest.mark.parametrize(
    ("length", "served", "served_whole"),
    [
        (1, 0, 0),
        (15, 0, 0),
        (16, 15, 0),
        (17, 16, 16),
        (31, 16, 16),
        (32, 31, 16),
        (33, 32, 32),
        (48, 47, 32),
    ],
)
def test_whole_blocks_exclude_the_last_tokens_block(length, served, served_whole):
    tokens = list(range(length))
    for whole, expected in ((False, served), (True, served_whole)):
        manager = KVCacheManager(8, BLOCK, whole_blocks=whole)
        compute(manager, tokens)
        assert manager.peek(tokens, ROOT) == expected
        table = manager.open_table(tokens, ROOT)
        assert table.num_cached_tokens == table.num_computed_tokens == expected
        assert manager.extend(table, length) == [] or not whole, (
            "no block may be copied or rewritten"
        )
        assert manager.cow_copies == 0
        manager.commit(table, tokens, length)
        manager.check_invariants([table])
        manager.free(table)
        manager.check_invariants([])
        assert manager.peek([*tokens, 99], ROOT) == length // BLOCK * BLOCK, (
            "all full blocks must be cached for longer prompts"
        )


def reason(manager, tokens, root=ROOT):
    table = manager.open_table(tokens, root)
    manager.free(table)
    return table.miss_reason


@pytest.mark.parametrize("whole", [False, True])
def test_miss_reasons_are_reported(whole):
    manager = KVCacheManager(4, BLOCK, whole_blocks=whole)
    tokens = list(range(40))
    assert reason(manager, tokens) == "first_seen"
    assert reason(manager, tokens[:16]) == "first_seen"
    assert reason(manager, tokens[:15]) == "tail"
    assert reason(manager, tokens[:1]) == ""
    compute(manager, tokens)
    assert reason(manager, tokens) == "tail"
    assert reason(manager, tokens[:33]) == ""
    assert reason(manager, tokens[:32]) == ("tail" if whole else "")
    assert reason(manager, [*tokens[:16], *tokens]) == "first_seen"
    compute(manager, [9] * 64)
    assert reason(manager, tokens) == "evicted"
    compute(manager, tokens)
    manager.reset()
    assert reason(manager, tokens) == "evicted"


def test_miss_reasons_do_not_reveal_other_tenants_evictions():
    manager = KVCacheManager(4, BLOCK)
    other = narrowed_root(ROOT, "tenant", "other")
    compute(manager, list(range(40)), other)
    compute(manager, [9] * 64)
    assert reason(manager, list(range(40))) == "first_seen"
    assert reason(manager, list(range(40)), other) == "evicted"


def test_an_evicted_prompt_is_reported_as_evicted():
    manager = KVCacheManager(2, BLOCK)
    for number in range(200):
        compute(manager, [number] * 32)
    assert [reason(manager, [number] * 32) for number in (0, 198, 200)] == [
        "evicted",
        "evicted",
        "first_seen",
    ]


def test_the_memory_of_evictions_is_bounded(monkeypatch):
    monkeypatch.setattr(lookup, "_LEAST_REASONS", 8)
    manager = KVCacheManager(2, BLOCK)
    for number in range(100):
        compute(manager, [number] * 32)
    assert len(manager._lookup._forgotten) == 4, "the policy must remember four evicted hashes"
    assert reason(manager, [95] * 32) == "evicted", "evictions of 8 pools must be remembered"
    assert reason(manager, [0] * 32) == "first_seen"


def test_roots_of_tenants_and_salts_are_all_different():
    roots = {
        ROOT,
        narrowed_root(ROOT, "tenant", "a"),
        narrowed_root(ROOT, "cache_salt", "a"),
        narrowed_root(narrowed_root(ROOT, "tenant", "a"), "cache_salt", "a"),
        narrowed_root(ROOT, "tenant", "aa"),
        narrowed_root(ROOT, "tenant", "\udc80"),
        narrowed_root(root_hash(model_fingerprint="m", kv_format="g"), "tenant", "a"),
    }
    assert len(roots) == 7
    assert all(len(root) == 32 for root in roots)


def test_freed_unmatchable_blocks_are_reported_once():
    manager = KVCacheManager(8, BLOCK)
    tokens = list(range(40))
    table = manager.open_table(tokens, ROOT)
    manager.extend(table, 40)
    manager.commit(table, tokens, 40)
    fork = manager.fork(table)
    tail = table.block_ids[2]
    manager.free(table)
    assert manager.drain_released() == [], "the tail must not be released while the fork holds it"
    manager.free(fork)
    assert manager.drain_released() == [tail]
    assert manager.drain_released() == []
