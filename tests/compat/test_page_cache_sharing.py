"""Sharing in the page cache: equal prefixes hold their pages once, no page leaks, and none is
foreign.
"""

import random

from helpers.kvcache.manager_cases import BASELINE, held
from kvboost_edge.compat.page_cache import KVCache


def test_equal_prefixes_share_their_pages():
    cache = KVCache(page_size=4, max_pages=100)
    prefix = list(range(8))
    for seq_id in range(10):
        cache.attach(seq_id, [*prefix, seq_id], prefix)
    stats = cache.stats()
    assert stats["allocated_pages"] == 2 + 10
    assert (stats["shared_pages_count"], stats["total_page_refs"], stats["prefix_shares"]) == (
        2,
        30,
        9,
    )
    assert stats["prefix_map_size"] == 1, "there must be one prefix, of two pages"
    assert all(cache.get(seq_id) == [*prefix, seq_id] for seq_id in range(10))


def test_the_prefix_map_counts_matchable_prefixes():
    cache = KVCache(page_size=2, max_pages=8)

    def size():
        return cache.stats()["prefix_map_size"]

    assert size() == 0
    cache.attach("a", list("abcdef"), [1, 2, 3, 4])  # two pages of prefix, one without
    assert size() == 1
    cache.attach("b", list("abcX"), [1, 2, 3, 4])  # other payloads, so no page is shared completely
    cache.attach("c", list("ab"))
    assert size() == 1
    cache.attach("d", list("ab"), [1, 2])
    assert size() == 2, "a part of a prefix must be a separate prefix"
    for seq_id in "abcd":
        cache.detach(seq_id)
    assert size() == 2, "idle pages must be matchable"
    cache.attach("all", list(range(16)))
    assert size() == 0, "reused pages must not be matchable"
    cache.check_invariants()


def test_dropped_prefixes_take_no_memory():
    cache = KVCache(page_size=1, max_pages=4)
    for token in range(100):
        cache.attach("s", [token], [token])
        assert len(cache._prefixes) <= 2 * 4 + 1
    assert cache.stats()["prefix_map_size"] == 4


def test_a_prefix_shorter_than_a_page_shares_a_page_of_equal_payloads():
    cache = KVCache(page_size=512, max_pages=100)
    cache.attach(1, list(range(300)), list(range(100)))
    cache.attach(2, list(range(300)), list(range(100)))
    cache.attach(3, list(range(301)), list(range(100)))
    assert [cache.get(i) for i in (1, 2, 3)] == [
        list(range(300)),
        list(range(300)),
        list(range(301)),
    ]
    assert (cache.stats()["prefix_shares"], cache.stats()["allocated_pages"]) == (1, 2)


def test_shared_pages_with_divergent_payloads_are_copied():
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


def test_divergent_payloads_over_an_idle_page_replace_it():
    cache = KVCache(page_size=2, max_pages=2)
    cache.attach("a", list("abcd"), [1, 2, 3, 4])
    cache.detach("a")
    cache.attach("b", list("abXY"), [1, 2, 3, 4])
    cache.detach("b")
    cache.attach("c", list("abXY"), [1, 2, 3, 4])
    assert cache.get("c") == list("abXY")
    assert cache.stats()["prefix_shares"] == 2
    cache.check_invariants()


def test_the_whole_prefix_is_compared():
    cache = KVCache(page_size=16, max_pages=100)
    first = list(range(128))
    second = [*range(127), 999]
    payloads = [f"kv{i}" for i in range(128)]
    cache.attach("a", payloads, first)
    cache.attach("b", payloads, second)
    assert cache.stats()["shared_pages_count"] == 7
    cache.attach("c", payloads, [999, *range(1, 128)])
    assert cache.stats()["allocated_pages"] == 8 + 1 + 8


def test_without_sharing_every_sequence_has_its_own_pages():
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


def test_thousands_of_cycles_leak_and_mix_no_pages():
    rng = random.Random(7)
    cache = KVCache(page_size=4, max_pages=100)
    prefixes = [[family] * 9 + list(range(family)) for family in range(5)]
    expected = {}
    for cycle in range(4_000):
        seq_id = rng.randrange(12)
        if rng.random() < 0.3:
            cache.detach(seq_id)
            expected.pop(seq_id, None)
        else:
            prefix = rng.choice(prefixes)
            payloads = [("kv", token) for token in prefix[: rng.randrange(len(prefix) + 1)]]
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
    cache.attach("all", list(range(400)))  # every page can still be allocated
    assert cache.get("all") == list(range(400))
