"""Which blocks prompts, forks and whole cached prompts share, who copies before writing, and never a wrong hit."""

from __future__ import annotations

import random

import pytest

from helpers.kvcache.manager_cases import OTHER, ROOT, B, prefill
from kvboost_edge.kvcache.block_table import CopyOp
from kvboost_edge.kvcache.hashing import chain_hash
from kvboost_edge.kvcache.manager import KVCacheManager

# ---- sharing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, B - 1, B, 2 * B + 3])
def test_a_prefix_is_shared_in_full_blocks(cut: int) -> None:
    manager = KVCacheManager(16, B)
    first = prefill(manager, list(range(13)))
    tokens = list(range(cut)) + [99] * (20 - cut)
    full = cut // B
    assert manager.peek(tokens, ROOT) == full * B
    second = manager.open_table(tokens, ROOT)
    assert second.block_ids == first.block_ids[:full]
    assert second.num_cached_tokens == second.num_computed_tokens == full * B
    manager.extend(second, 20)
    assert not set(second.block_ids[full:]) & set(first.block_ids)
    manager.check_invariants([first, second])


def test_a_partial_block_is_never_shared() -> None:
    manager = KVCacheManager(16, B)
    prefill(manager, list(range(7)))
    assert manager.peek(list(range(8)), ROOT) == B


def test_other_roots_share_nothing() -> None:
    manager = KVCacheManager(16, B)
    prefill(manager, list(range(12)))
    assert manager.peek(list(range(12)), OTHER) == 0
    assert manager.open_table(list(range(12)), OTHER).block_ids == []


def test_equal_tokens_after_different_parents_are_different() -> None:
    manager = KVCacheManager(16, B)
    prefill(manager, [1] * 4 + [7] * 4)
    prefill(manager, [2] * 4 + [8] * 4)
    assert manager.peek([2] * 4 + [7] * 4 + [0], ROOT) == 4
    assert manager.peek([7] * 4 + [0], ROOT) == 0


def test_generated_tokens_are_published_too() -> None:
    manager = KVCacheManager(16, B)
    running = list(range(6))
    table = prefill(manager, running)
    for token in (50, 51, 52, 53, 54, 55, 56):
        running.append(token)
        assert manager.extend(table, len(running)) == []
        manager.commit(table, running, len(running))
    manager.free(table)
    turn = [*running, 1, 2, 3]
    assert manager.peek(turn, ROOT) == len(running) // B * B == 12


def test_without_the_cache_nothing_is_shared_or_counted_but_the_blocks_are_published_once() -> None:
    manager = KVCacheManager(16, B)
    first = prefill(manager, list(range(8)))
    second = prefill(manager, list(range(8)), use_cache=False)
    assert not set(first.block_ids) & set(second.block_ids)
    assert (manager.hit_tokens, manager.miss_tokens) == (0, 8)
    assert manager.published_block_count == 2
    assert manager.peek(list(range(9)), ROOT) == 8
    manager.check_invariants([first, second])
    manager.free(second)
    assert manager.cached_block_count == 0  # the private copies hold nothing to match


# ---- a prompt cached to its end --------------------------------------------------------------------------------------


def test_a_fully_cached_prompt_recomputes_its_last_token_in_a_copy() -> None:
    manager = KVCacheManager(16, B)
    tokens = list(range(8))
    first = prefill(manager, tokens)
    second = manager.open_table(tokens, ROOT)
    assert second.block_ids == first.block_ids
    assert second.num_cached_tokens == 7
    assert manager.blocks_needed(second, 8) == 1
    ops = manager.extend(second, 8)
    assert ops == [CopyOp(first.block_ids[1], second.block_ids[1])]
    assert manager.slots(second, 7, 8) == [second.block_ids[1] * B + 3]
    manager.commit(second, tokens, 8)
    manager.check_invariants([first, second])
    assert manager.cow_copies == 1
    assert manager.published_block_count == 2


def test_a_fully_cached_prompt_that_nobody_else_holds_is_rewritten_in_place() -> None:
    manager = KVCacheManager(2, B)  # no room for a copy, and none is needed
    tokens = list(range(8))
    manager.free(prefill(manager, tokens))
    again = manager.open_table(tokens, ROOT)
    assert (again.num_cached_tokens, manager.free_block_count) == (7, 0)
    assert manager.extend(again, 8) == []
    assert manager.peek([*tokens, 0], ROOT) == 4  # while it is written nobody may match it
    assert manager.awaited_hash([*tokens, 0], ROOT)
    manager.check_invariants([again])
    manager.commit(again, tokens, 8)
    assert manager.peek([*tokens, 0], ROOT) == 8
    assert not manager.awaited_hash([*tokens, 0], ROOT)
    manager.check_invariants([again])


def test_a_rewritten_block_keeps_what_is_cached_behind_it() -> None:
    manager = KVCacheManager(8, B)
    manager.free(prefill(manager, list(range(16))))
    manager.free(prefill(manager, list(range(8))))  # rewrites block 1 of 4 in place
    assert manager.peek(list(range(17)), ROOT) == 16


def test_a_block_republished_meanwhile_is_followed_under_its_new_identity() -> None:
    manager = KVCacheManager(8, B)
    tokens = list(range(4))
    manager.free(prefill(manager, tokens))
    slow = manager.open_table(tokens, ROOT)
    manager.extend(slow, 4)  # rewrites in place: unmatchable for now
    quick = prefill(manager, tokens)  # did not wait and publishes its own
    manager.commit(slow, tokens, 4)
    running = [*tokens, 1, 2, 3, 4]
    manager.extend(slow, 8)
    manager.commit(slow, running, 8)
    assert manager.peek([*running, 0], ROOT) == 8
    assert manager.open_table([*running, 0], ROOT).block_ids == [quick.block_ids[0], slow.block_ids[1]]


# ---- fork ------------------------------------------------------------------------------------------------------------


def test_a_forked_partial_tail_is_copied_by_the_first_who_writes() -> None:
    manager = KVCacheManager(8, B)
    tokens = list(range(6))
    parent = prefill(manager, tokens)
    child = manager.fork(parent)
    assert child.block_ids == parent.block_ids
    assert manager.shared_block_count == 2
    (op,) = manager.extend(child, 7)
    assert op == CopyOp(parent.block_ids[1], child.block_ids[1])
    assert manager.extend(parent, 7) == []  # alone again
    assert parent.block_ids[0] == child.block_ids[0]
    manager.check_invariants([parent, child])
    manager.commit(parent, [*tokens, 70, 71], 6)
    manager.free(parent)
    manager.commit(child, [*tokens, 80], 7)
    manager.check_invariants([child])


def test_forks_publish_a_common_block_once() -> None:
    manager = KVCacheManager(8, B)
    parent = manager.open_table([1, 2, 3, 4], ROOT)
    manager.extend(parent, 4)
    manager.commit(parent, [1, 2, 3], 3)
    child = manager.fork(parent)
    manager.commit(parent, [1, 2, 3, 4], 4)
    manager.commit(child, [1, 2, 3, 4], 4)
    assert manager.published_block_count == 1
    manager.check_invariants([parent, child])


# ---- collisions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 8])
def test_ten_thousand_lookups_under_a_weak_hash_without_a_wrong_hit(bits: int) -> None:
    def weak(parent: bytes, tokens: bytes) -> bytes:
        return bytes([chain_hash(parent, tokens)[0] & ((1 << bits) - 1)])

    rng = random.Random(bits)
    manager = KVCacheManager(64, 2, hash_fn=weak)
    # The oracle: what each published block stands for, told by who wrote it and not by any hash.
    content: dict[int, tuple[bytes, tuple[int, ...]]] = {}
    lookups = hits = 0
    while lookups < 10_000:
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 13))]
        root = rng.choice([ROOT, OTHER])
        lookups += 1
        table = manager.open_table(tokens, root)
        for index, block_id in enumerate(table.block_ids):
            assert content[block_id] == (root, tuple(tokens[: 2 * (index + 1)]))
            hits += 1
        for src, dst in manager.extend(table, len(tokens)):
            content[dst] = content[src]
        for index, block_id in enumerate(table.block_ids):
            content[block_id] = (root, tuple(tokens[: 2 * (index + 1)]))
        manager.commit(table, tokens, len(tokens))
        manager.free(table)
    assert hits > 5_000  # the test would be idle without real hits
    manager.check_invariants([])
