"""The page cache for payloads, without the faults of its predecessor: leaks, short hashes, foreign
pages, drafts without effect.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from helpers.kvcache.manager_cases import BASELINE, held
from helpers.raising import assert_raises
from kvboost_edge.compat.page_cache import KVCache
from kvboost_edge.errors import CapacityError, ConfigError, RequestError

# attach, get, detach


def test_defaults_equal_llmds():
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
def test_get_returns_the_attached_payloads(length, prefix_length):
    cache = KVCache(page_size=4, max_pages=8)
    payloads = [f"kv{i}" for i in range(length)]
    for seq_id in ("a", "b"):
        cache.attach(
            seq_id, payloads, None if prefix_length is None else list(range(prefix_length))
        )
        assert cache.get(seq_id) == payloads
        cache.check_invariants()
    assert cache.get("c") is None


def test_a_live_id_is_replaced():
    cache = KVCache(page_size=4, max_pages=3)
    cache.attach("s", list(range(12)), [1, 2, 3, 4])
    cache.attach("s", list("abcdefghi"), [1, 2, 3, 4])  # a full pool: the old pages make room
    assert cache.get("s") == list("abcdefghi")
    cache.attach("s", ["x"])
    assert (cache.get("s"), cache.stats()["allocated_pages"]) == (["x"], 1)
    cache.check_invariants()


def test_a_sequence_that_does_not_fit_is_refused_without_changes():
    cache = KVCache(page_size=4, max_pages=4)
    prefix = [1, 2, 3, 4]
    cache.attach("a", list(range(8)), prefix)
    cache.attach("b", list(range(8)), prefix)  # one shared page and one page each
    before = cache.stats()
    for seq_id in ("a", "c"):
        with pytest.raises(
            CapacityError, match=r"17 payloads need 5 pages of 4 .* enlarge max_pages or detach"
        ):
            cache.attach(seq_id, list(range(17)), prefix)
        assert cache.stats() == before
        cache.check_invariants()
    with pytest.raises(CapacityError):
        cache.attach("a", list(range(100, 116)), prefix)  # 4 pages, but b keeps 2
    assert cache.get("a") == cache.get("b") == list(range(8))
    cache.attach("a", list(range(12)), prefix)  # 3 pages, of which b shares one: fits exactly
    assert cache.stats()["free_pages"] == 0
    cache.check_invariants()


def test_shared_pages_of_a_replaced_sequence_do_not_count_as_free():
    cache = KVCache(page_size=4, max_pages=4)
    cache.attach("other", ["x"])
    cache.attach("a", list(range(8)), [1, 2, 3, 4])
    with pytest.raises(
        CapacityError,
        match=r"16 payloads need 4 pages of 4 \(1 of them shared\), but only 2 of 4 pages are available",
    ):
        cache.attach("a", list(range(16)), [1, 2, 3, 4])
    assert cache.get("a") == list(range(8))
    cache.attach("a", list(range(12)), [1, 2, 3, 4])
    assert cache.get("a") == list(range(12))
    cache.check_invariants()


def test_invalid_arguments_are_refused_without_leaks():
    for options in (
        {"page_size": 0},
        {"page_size": 1.5},
        {"max_pages": 0},
        {"max_pages": True},
        {"enable_prefix_sharing": 1},
    ):
        assert_raises(ConfigError, next(iter(options)), KVCache, **options)
    cache = KVCache(page_size=4, max_pages=100)
    for prefix in ([-1], [2**32], ["a"]):
        assert_raises(RequestError, "token ids", cache.attach, 1, [0], prefix)
    assert_raises(RequestError, "hashable", cache.attach, [1], [0], [1])
    assert held(cache) == BASELINE
    cache.check_invariants()


# payloads


def test_payloads_are_isolated_between_callers():
    cache = KVCache(page_size=2, max_pages=10)
    mine = [[1, 2], {"k": [3]}]
    cache.attach("a", mine, [1, 2])
    cache.attach("b", [[1, 2], {"k": [3]}], [1, 2])
    assert cache.stats()["shared_pages_count"] == 1
    mine[0].append(9)
    got = cache.get("a")
    got[1]["k"].append(9)
    got.append("more")
    assert cache.get("a") == cache.get("b") == [[1, 2], {"k": [3]}]


def test_arrays_are_shared_only_if_identical():
    base = np.arange(6, dtype=np.float32)
    others = [
        base.copy(),
        base.astype(np.float64),
        base.reshape(2, 3),
        base.reshape(1, 6),
        base + 1,
        base[:1],
    ]
    for other, shared in zip(others, [1, 0, 0, 0, 0, 0], strict=True):
        cache = KVCache(page_size=1, max_pages=10)
        cache.attach("a", [(base, base)], [1])
        cache.attach("b", [(other, other)], [1])
        assert cache.stats()["shared_pages_count"] == shared
        got = cache.get("b")
        np.testing.assert_array_equal(got[0][0], other)
        assert got[0][0].dtype == other.dtype


def test_equal_values_of_different_types_are_not_shared():
    cache = KVCache(page_size=2, max_pages=10)
    for seq_id, payloads in enumerate(
        [[1, True], [1.0, True], [1, 1], [{"k": 1}, 1], [{"k": 1.0}, 1], [[1], (1,)]]
    ):
        cache.attach(seq_id, payloads, [7, 8])
        assert repr(cache.get(seq_id)) == repr(payloads)


def test_payloads_of_any_type_are_stored():
    class Contrary:
        def __eq__(self, other):
            raise RuntimeError("not comparable")

        __hash__ = None

    lock = threading.Lock()
    contrary = Contrary()
    loop = []
    loop.append(loop)
    cache = KVCache(page_size=1, max_pages=10)
    for seq_id in ("a", "b"):
        cache.attach(seq_id, [lock, contrary, None, loop], [1, 2, 3, 4])
        got = cache.get(seq_id)
        assert got[0] is lock
        assert isinstance(got[1], Contrary)
        assert got[2] is None
        assert got[3][0] is got[3]
    assert (
        cache.stats()["shared_pages_count"] == 1
    )  # the lock; pages after a doubtful one are not compared
    cache.check_invariants()


def test_payloads_are_dropped_with_their_pages():
    cache = KVCache(page_size=2, max_pages=4)
    cache.attach("a", list("abcd"))
    draft = cache.hook_speculative_decode("a", ["e"])
    draft.reject()
    cache.detach("a")
    assert cache._payloads == [[], [], [], []]


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (complex(0, 0.0), complex(0, -0.0)),
        (1, True),
        (None, False),
        ([0.0], [-0.0]),
        ({1: 0}, {True: 0}),
        ({"k": 0.0}, {"k": -0.0}),
        ({1.0}, {True}),
        (Pair(1, 0.0), Pair(1, -0.0)),
        (Pair(1, 2), Pair(True, 2)),
        (np.zeros(2), -np.zeros(2)),
        (np.float32(0), np.float32(-0.0)),
        (torch.zeros(2), -torch.zeros(2)),
        (torch.zeros(2, dtype=torch.bfloat16), -torch.zeros(2, dtype=torch.bfloat16)),
        ({1: 2, 3: 4}, {3: 4, 1: 2}),
        (Decimal("0"), Decimal("-0")),
    ],
)
def test_payloads_equal_but_not_identical_are_not_shared(one, other):
    cache = KVCache(page_size=1, max_pages=4)
    for seq_id, payload in enumerate((one, other, copy.deepcopy(other))):
        cache.attach(seq_id, [payload], [7])
        assert repr(cache.get(seq_id)) == repr([payload])
    assert cache.stats()["prefix_shares"] <= 1, (
        "only the third sequence may share pages with the second one"
    )


@pytest.mark.parametrize(
    "payload",
    [
        None,
        -0.0,
        Pair(1, [2.0]),
        {"k": {"a", "b"}},
        np.zeros(3),
        torch.ones(2, 2, dtype=torch.bfloat16),
        b"x",
        Decimal("1.5"),
        torch.tensor(1.0),
        np.int64(3),
    ],
)
def test_the_same_payload_is_shared(payload):
    cache = KVCache(page_size=1, max_pages=4)
    cache.attach("a", [payload], [7])
    cache.attach("b", [copy.deepcopy(payload)], [7])
    assert cache.stats()["prefix_shares"] == 1


def test_numpy_integers_are_accepted():
    cache = KVCache(page_size=np.int64(2), max_pages=np.uint16(8))
    cache.attach(np.int64(5), ["x", "y"], np.array([1, 2]))
    assert cache.get(5) == ["x", "y"]
    cache.hook_speculative_decode(5, ["z"]).accept(np.int32(1))
    assert cache.get(5) == ["x", "y", "z"]
    draft = cache.hook_speculative_decode(5, ["z"])
    for bad in (True, np.True_, 1.0, np.float32(1), np.array([1]), None, "1"):
        assert_raises(RequestError, "n=", draft.accept, bad)
        assert_raises(ConfigError, "page_size=", KVCache, page_size=bad)
        assert_raises(RequestError, "token ids", cache.attach, 6, ["x"], [bad])
    for wrong in (None, 5):
        assert_raises(RequestError, "kv_tokens=", cache.attach, 6, wrong)
        assert_raises(RequestError, "draft_tokens=", cache.hook_speculative_decode, 5, wrong)
    for prefix in (5, "ab", iter([1])):
        assert_raises(RequestError, "prefix_tokens=", cache.attach, 6, ["x"], prefix)
    assert cache.get(6) is None
    cache.check_invariants()
