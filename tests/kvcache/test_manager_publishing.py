"""When a block becomes matchable for others: computed, full, committed, and unchanged."""

from __future__ import annotations

import pytest

from helpers.kvcache.manager_cases import ROOT, B, prefill
from kvboost_edge.errors import CacheCorruption
from kvboost_edge.kvcache.block_table import CopyOp
from kvboost_edge.kvcache.manager import KVCacheManager


def test_only_computed_full_blocks_are_published() -> None:
    manager = KVCacheManager(8, B)
    tokens = list(range(12))
    table = manager.open_table(tokens, ROOT)
    manager.extend(table, 12)
    for computed, expected in [(0, 0), (3, 0), (4, 4), (7, 4), (11, 8), (12, 12)]:
        manager.commit(table, tokens, computed)
        assert manager.peek([*tokens, 0], ROOT) == expected


def test_what_is_freed_before_it_is_committed_is_not_published() -> None:
    manager = KVCacheManager(8, B)
    table = manager.open_table(list(range(8)), ROOT)
    manager.extend(table, 8)
    manager.free(table)
    assert manager.peek(list(range(9)), ROOT) == 0
    assert manager.cached_block_count == 0


def test_an_unpublished_commit_ends_the_publishing_of_a_table_and_its_forks() -> None:
    manager = KVCacheManager(8, B)
    tokens = list(range(16))
    table = manager.open_table(tokens, ROOT)
    manager.extend(table, 16)
    manager.commit(table, tokens, 4)
    manager.commit(table, tokens, 8, publish=False)
    child = manager.fork(table)
    manager.commit(table, tokens, 12)
    manager.commit(child, tokens, 16)
    assert manager.peek([*tokens, 0], ROOT) == 4
    manager.check_invariants([table, child])


@pytest.mark.parametrize("num_computed", [3, 9, 13])
def test_a_commit_must_grow_and_fit(num_computed: int) -> None:
    manager = KVCacheManager(8, B)
    table = prefill(manager, list(range(4)))
    manager.extend(table, 12)
    with pytest.raises(CacheCorruption, match=rf"commit of {num_computed} tokens"):
        manager.commit(table, list(range(8 if num_computed == 9 else 20)), num_computed)


def test_a_block_forked_while_it_is_rewritten_is_published_by_its_writer() -> None:
    manager = KVCacheManager(8, B)
    tokens = [1, 2, 3, 4]
    manager.free(prefill(manager, tokens))
    table = manager.open_table(tokens, ROOT)
    manager.extend(table, 4)
    child = manager.fork(table)
    assert manager.extend(table, 4) == [CopyOp(child.block_ids[0], table.block_ids[0])]
    manager.commit(table, tokens, 4)
    assert manager.open_table([*tokens, 5], ROOT).block_ids == table.block_ids
    assert not manager.awaited_hash(tokens, ROOT)


def test_a_rewrite_with_other_tokens_raises() -> None:
    manager = KVCacheManager(8, B)
    manager.free(prefill(manager, [1, 2, 3, 4]))
    table = manager.open_table([1, 2, 3, 4], ROOT)
    manager.extend(table, 4)
    with pytest.raises(CacheCorruption, match="changed while it was rewritten"):
        manager.commit(table, [1, 2, 3, 5], 4)
