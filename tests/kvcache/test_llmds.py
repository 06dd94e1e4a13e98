"""The page cache for payloads: its forebear's faults tested away (leaks, short hashes, foreign pages, no-op drafts)."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from kvboost_edge.errors import CapacityError, ConfigError, RequestError
from kvboost_edge.kvcache.llmds import KVCache

BASELINE = {
    "total_sequences": 0,
    "total_pages": 100,
    "allocated_pages": 0,
    "free_pages": 100,
    "shared_pages_count": 0,
    "total_page_refs": 0,
}


def held(cache: KVCache) -> dict[str, int]:
    return {name: value for name, value in cache.stats().items() if name in BASELINE}


# ---- attach, get, detach ---------------------------------------------------------------------------------------------


def test_defaults_are_the_forebears() -> None:
    cache = KVCache()
    cache.attach(1, list(range(600)))
    assert cache.stats() == {
        "total_sequences": 1,
        "total_pages": 10000,
        "allocated_pages": 2,
        "free_pages": 9998,
        "prefix_shares": 0,
        "prefix_map_size": 0,
        "shared_pages_count": 0,
        "total_page_refs": 2,
    }


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("prefix_length", [None, 0, 1, 4, 7, 20])
def test_get_gives_back_what_was_attached(length: int, prefix_length: int | None) -> None:
    cache = KVCache(page_size=4, max_pages=8)
    payloads = [f"kv{i}" for i in range(length)]
    for seq_id in ("a", "b"):
        cache.attach(seq_id, payloads, None if prefix_length is None else list(range(prefix_length)))
        assert cache.get(seq_id) == payloads
        cache.check_invariants()
    assert cache.get("c") is None


def test_detaching_gives_everything_back_and_an_unknown_id_is_no_error() -> None:
    cache = KVCache(page_size=4, max_pages=100)
    cache.attach(1, list(range(9)), [1, 2, 3, 4])
    cache.detach(2)
    assert cache.get(1) == list(range(9))
    cache.detach(1)
    cache.detach(1)
    assert cache.get(1) is None
    assert held(cache) == BASELINE


def test_a_live_id_is_replaced() -> None:
    cache = KVCache(page_size=4, max_pages=3)
    cache.attach("s", list(range(12)), [1, 2, 3, 4])
    cache.attach("s", list("abcdefghi"), [1, 2, 3, 4])  # a full pool: the old pages make the room
    assert cache.get("s") == list("abcdefghi")
    cache.attach("s", ["x"])
    assert (cache.get("s"), cache.stats()["allocated_pages"]) == (["x"], 1)
    cache.check_invariants()


def test_what_does_not_fit_is_refused_and_leaves_the_cache_as_it_was() -> None:
    cache = KVCache(page_size=4, max_pages=4)
    prefix = [1, 2, 3, 4]
    cache.attach("a", list(range(8)), prefix)
    cache.attach("b", list(range(8)), prefix)  # a page shared, a page each
    before = cache.stats()
    for seq_id in ("a", "c"):
        with pytest.raises(CapacityError, match=r"17 payloads need 5 pages of 4, .* enlarge max_pages or detach"):
            cache.attach(seq_id, list(range(17)), prefix)
        assert cache.stats() == before
        cache.check_invariants()
    with pytest.raises(CapacityError):
        cache.attach("a", list(range(100, 116)), prefix)  # 4 pages, but b keeps 2
    assert cache.get("a") == cache.get("b") == list(range(8))
    cache.attach("a", list(range(12)), prefix)  # 3 pages, of which b shares one: fits exactly
    assert cache.stats()["free_pages"] == 0
    cache.check_invariants()


def test_pages_that_the_new_sequence_shares_with_the_replaced_one_make_no_room() -> None:
    cache = KVCache(page_size=4, max_pages=4)
    cache.attach("other", ["x"])
    cache.attach("a", list(range(8)), [1, 2, 3, 4])
    with pytest.raises(CapacityError, match="16 payloads need 4 pages of 4, 1 of them shared; 2 of 4 are available"):
        cache.attach("a", list(range(16)), [1, 2, 3, 4])
    assert cache.get("a") == list(range(8))
    cache.attach("a", list(range(12)), [1, 2, 3, 4])
    assert cache.get("a") == list(range(12))
    cache.check_invariants()


def test_bad_arguments_are_refused_and_nothing_leaks() -> None:
    for options in ({"page_size": 0}, {"page_size": 1.5}, {"max_pages": 0}, {"max_pages": True}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            KVCache(**options)
    with pytest.raises(ConfigError, match="enable_prefix_sharing"):
        KVCache(enable_prefix_sharing=1)  # type: ignore[arg-type]
    cache = KVCache(page_size=4, max_pages=100)
    for prefix in ([-1], [2**32], ["a"]):
        with pytest.raises(RequestError, match="token ids"):
            cache.attach(1, [0], prefix)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="hashable"):
        cache.attach([1], [0], [1])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="not attached"):
        cache.hook_speculative_decode(1, [0])
    assert held(cache) == BASELINE
    cache.check_invariants()


# ---- sharing ---------------------------------------------------------------------------------------------------------


def test_equal_prefixes_hold_their_pages_once() -> None:
    cache = KVCache(page_size=4, max_pages=100)
    prefix = list(range(8))
    for seq_id in range(10):
        cache.attach(seq_id, [*prefix, seq_id], prefix)
    stats = cache.stats()
    assert stats["allocated_pages"] == 2 + 10
    assert (stats["shared_pages_count"], stats["total_page_refs"], stats["prefix_shares"]) == (2, 30, 9)
    assert stats["prefix_map_size"] == 2
    assert all(cache.get(seq_id) == [*prefix, seq_id] for seq_id in range(10))


def test_a_prefix_shorter_than_a_page_shares_a_page_of_equal_payloads() -> None:
    cache = KVCache(page_size=512, max_pages=100)
    cache.attach(1, list(range(300)), list(range(100)))
    cache.attach(2, list(range(300)), list(range(100)))
    cache.attach(3, list(range(301)), list(range(100)))
    assert [cache.get(i) for i in (1, 2, 3)] == [list(range(300)), list(range(300)), list(range(301))]
    assert (cache.stats()["prefix_shares"], cache.stats()["allocated_pages"]) == (1, 2)


def test_shared_pages_with_divergent_payloads_are_copied() -> None:
    cache = KVCache(page_size=2, max_pages=100)
    prefix = list(range(6))
    cache.attach("a", list("abcdef"), prefix)
    cache.attach("b", list("abXdef"), prefix)
    assert (cache.get("a"), cache.get("b")) == (list("abcdef"), list("abXdef"))
    assert (cache.stats()["allocated_pages"], cache.stats()["shared_pages_count"]) == (5, 1)
    cache.detach("a")
    cache.attach("c", list("abXdef"), prefix)
    assert (cache.get("b"), cache.get("c")) == (list("abXdef"), list("abXdef"))
    cache.check_invariants()


def test_divergent_payloads_over_an_idle_page_replace_it() -> None:
    cache = KVCache(page_size=2, max_pages=2)
    cache.attach("a", list("abcd"), [1, 2, 3, 4])
    cache.detach("a")
    cache.attach("b", list("abXY"), [1, 2, 3, 4])
    cache.detach("b")
    cache.attach("c", list("abXY"), [1, 2, 3, 4])
    assert cache.get("c") == list("abXY")
    assert cache.stats()["prefix_shares"] == 2
    cache.check_invariants()


def test_the_whole_prefix_counts_and_not_its_first_hundred_tokens() -> None:
    cache = KVCache(page_size=16, max_pages=100)
    first = list(range(128))
    second = [*range(127), 999]
    payloads = [f"kv{i}" for i in range(128)]
    cache.attach("a", payloads, first)
    cache.attach("b", payloads, second)
    assert cache.stats()["shared_pages_count"] == 7
    cache.attach("c", payloads, [999, *range(1, 128)])
    assert cache.stats()["allocated_pages"] == 8 + 1 + 8


def test_without_sharing_every_sequence_has_its_own_pages() -> None:
    cache = KVCache(page_size=4, max_pages=100, enable_prefix_sharing=False)
    for seq_id in range(3):
        cache.attach(seq_id, list(range(8)), list(range(8)))
    assert cache.stats() == {
        "total_sequences": 3,
        "total_pages": 100,
        "allocated_pages": 6,
        "free_pages": 94,
        "prefix_shares": 0,
        "prefix_map_size": 0,
        "shared_pages_count": 0,
        "total_page_refs": 6,
    }


def test_thousands_of_cycles_leak_no_page_and_hand_out_no_foreign_one() -> None:
    rng = random.Random(7)
    cache = KVCache(page_size=4, max_pages=100)
    prefixes = [[family] * 9 + list(range(family)) for family in range(5)]
    expected: dict[int, list[Any]] = {}
    for cycle in range(4_000):
        seq_id = rng.randrange(12)
        if rng.random() < 0.3:
            cache.detach(seq_id)
            expected.pop(seq_id, None)
        else:
            prefix = rng.choice(prefixes)
            payloads: list[Any] = [("kv", token) for token in prefix[: rng.randrange(len(prefix) + 1)]]
            payloads += [(seq_id, cycle, i) for i in range(rng.randrange(10))]
            cache.attach(seq_id, payloads, prefix)
            expected[seq_id] = payloads
        if seq_id in expected and rng.random() < 0.4:
            draft = cache.hook_speculative_decode(seq_id, [("draft", cycle, i) for i in range(3)])
            if rng.random() < 0.7:
                kept = rng.randrange(4)
                draft.accept(kept)
                expected[seq_id] = expected[seq_id] + [("draft", cycle, i) for i in range(kept)]
            elif rng.random() < 0.5:
                draft.reject()
        if cycle % 50 == 0:
            cache.check_invariants()
            assert {seq: cache.get(seq) for seq in expected} == expected
    for seq_id in expected:
        cache.detach(seq_id)
    assert held(cache) == BASELINE
    cache.check_invariants()
    cache.attach("all", list(range(400)))  # every page can still be had
    assert cache.get("all") == list(range(400))


def test_a_pool_of_a_hundred_pages_survives_the_cycle_that_emptied_the_forebears() -> None:
    cache = KVCache(page_size=16, max_pages=100)
    prefix = list(range(32))
    for cycle in range(1_000):
        cache.attach(cycle, [*prefix, *range(cycle, cycle + 16)], prefix)
        if cycle >= 4:
            cache.detach(cycle - 4)
    assert cache.stats()["allocated_pages"] == 2 + 4


# ---- payloads --------------------------------------------------------------------------------------------------------


def test_no_caller_can_change_what_another_sequence_sees() -> None:
    cache = KVCache(page_size=2, max_pages=10)
    mine = [[1, 2], {"k": [3]}]
    cache.attach("a", mine, [1, 2])
    cache.attach("b", [[1, 2], {"k": [3]}], [1, 2])
    assert cache.stats()["shared_pages_count"] == 1
    mine[0].append(9)  # type: ignore[attr-defined]
    got = cache.get("a")
    assert got is not None
    got[1]["k"].append(9)
    got.append("more")
    assert cache.get("a") == cache.get("b") == [[1, 2], {"k": [3]}]


def test_arrays_are_shared_when_equal_in_shape_dtype_and_every_element() -> None:
    base = np.arange(6, dtype=np.float32)
    others = [base.copy(), base.astype(np.float64), base.reshape(2, 3), base.reshape(1, 6), base + 1, base[:1]]
    for other, shared in zip(others, [1, 0, 0, 0, 0, 0], strict=True):
        cache = KVCache(page_size=1, max_pages=10)
        cache.attach("a", [(base, base)], [1])
        cache.attach("b", [(other, other)], [1])
        assert cache.stats()["shared_pages_count"] == shared
        got = cache.get("b")
        assert got is not None
        np.testing.assert_array_equal(got[0][0], other)
        assert got[0][0].dtype == other.dtype


def test_equal_values_of_different_types_are_not_exchanged() -> None:
    cache = KVCache(page_size=2, max_pages=10)
    for seq_id, payloads in enumerate([[1, True], [1.0, True], [1, 1], [{"k": 1}, 1], [{"k": 1.0}, 1], [[1], (1,)]]):
        cache.attach(seq_id, payloads, [7, 8])
        assert repr(cache.get(seq_id)) == repr(payloads)


def test_payloads_of_any_kind_are_kept() -> None:
    class Contrary:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("not comparable")

        __hash__ = None  # type: ignore[assignment]

    lock, contrary, loop = threading.Lock(), Contrary(), []  # type: ignore[var-annotated]
    loop.append(loop)
    cache = KVCache(page_size=1, max_pages=10)
    for seq_id in ("a", "b"):
        cache.attach(seq_id, [lock, contrary, None, loop], [1, 2, 3, 4])
        got = cache.get(seq_id)
        assert got is not None
        assert got[0] is lock
        assert isinstance(got[1], Contrary)
        assert got[2] is None
        assert got[3][0] is got[3]
    assert cache.stats()["shared_pages_count"] == 1  # the lock; whatever follows a doubtful page is not compared
    cache.check_invariants()


def test_payloads_are_dropped_with_their_pages() -> None:
    cache = KVCache(page_size=2, max_pages=4)
    cache.attach("a", list("abcd"))
    draft = cache.hook_speculative_decode("a", ["e"])
    draft.reject()
    cache.detach("a")
    assert cache._payloads == [[], [], [], []]


# ---- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("num_drafts", [0, 1, 5])
@pytest.mark.parametrize("prefixed", [False, True])
def test_accepted_drafts_are_appended_and_the_rest_is_dropped(length: int, num_drafts: int, prefixed: bool) -> None:
    payloads, drafts = [f"kv{i}" for i in range(length)], [f"draft{i}" for i in range(num_drafts)]
    for kept in range(num_drafts + 1):
        cache = KVCache(page_size=4, max_pages=100)
        cache.attach("s", payloads, list(range(length)) if prefixed else None)
        draft = cache.hook_speculative_decode("s", drafts)
        assert cache.get("s") == payloads
        assert draft.get() == payloads + drafts
        cache.check_invariants()
        draft.accept(kept)
        assert cache.get("s") == payloads + drafts[:kept]
        assert cache.stats()["allocated_pages"] == -(-(length + kept) // 4)
        cache.check_invariants()
        cache.detach("s")
        assert held(cache) == BASELINE


def test_a_rejected_draft_leaves_no_trace() -> None:
    cache = KVCache(page_size=4, max_pages=100)
    cache.attach("s", list(range(6)), list(range(6)))
    before = cache.stats()
    draft = cache.hook_speculative_decode("s", list(range(20)))
    assert cache.stats()["allocated_pages"] == 2 + 1 + 5  # the copied tail and five new pages
    draft.reject()
    assert cache.stats() == before
    assert cache.get("s") == list(range(6))
    assert not draft.is_open
    draft.reject()  # once more is no error
    with pytest.raises(RequestError, match="closed"):
        draft.accept(0)
    with pytest.raises(RequestError, match="closed"):
        draft.get()


def test_drafts_write_into_no_page_of_another_sequence() -> None:
    cache = KVCache(page_size=4, max_pages=100)
    cache.attach("a", list("abcdef"), list(range(6)))
    cache.attach("b", list("abcdef"), list(range(6)))
    assert cache.stats()["shared_pages_count"] == 2
    draft = cache.hook_speculative_decode("a", ["x", "y"])
    draft.accept(2)
    assert (cache.get("a"), cache.get("b")) == (list("abcdefxy"), list("abcdef"))
    cache.attach("c", list("abcdef"), list(range(6)))
    assert cache.get("c") == list("abcdef")
    cache.check_invariants()


def test_a_second_draft_closes_with_the_first_that_is_accepted() -> None:
    cache = KVCache(page_size=4, max_pages=100)
    cache.attach("s", [0])
    one, two = cache.hook_speculative_decode("s", ["x"]), cache.hook_speculative_decode("s", ["y", "z"])
    assert (one.get(), two.get()) == ([0, "x"], [0, "y", "z"])
    two.accept(1)
    assert cache.get("s") == [0, "y"]
    assert not one.is_open
    with pytest.raises(RequestError, match="its sequence has changed"):
        one.accept(1)
    assert cache.stats()["allocated_pages"] == 1


@pytest.mark.parametrize("replaced", [False, True])
def test_drafts_close_with_their_sequence(replaced: bool) -> None:
    cache = KVCache(page_size=4, max_pages=100)
    cache.attach("s", list(range(5)))
    draft = cache.hook_speculative_decode("s", [9])
    if replaced:
        cache.attach("s", [1])
    else:
        cache.detach("s")
    assert not draft.is_open
    with pytest.raises(RequestError):
        draft.accept(1)
    cache.detach("s")
    assert held(cache) == BASELINE


@pytest.mark.parametrize("bad", [-1, 3, 1.0, None, True])
def test_accept_takes_a_number_of_drafts(bad: Any) -> None:
    cache = KVCache(page_size=4, max_pages=100)
    cache.attach("s", [0])
    draft = cache.hook_speculative_decode("s", [1, 2])
    with pytest.raises(RequestError, match="from 0 to the 2 drafts"):
        draft.accept(bad)
    draft.accept(2)
    assert cache.get("s") == [0, 1, 2]


def test_a_draft_that_does_not_fit_changes_nothing() -> None:
    cache = KVCache(page_size=4, max_pages=3)
    cache.attach("s", list(range(5)))
    before = cache.stats()
    with pytest.raises(CapacityError):
        cache.hook_speculative_decode("s", list(range(4)))  # a copy of the tail and one more: three, and one is free
    assert cache.stats() == before
    draft = cache.hook_speculative_decode("s", list(range(3)))
    draft.accept(3)  # exactly full
    assert cache.get("s") == [0, 1, 2, 3, 4, 0, 1, 2]
    cache.check_invariants()
