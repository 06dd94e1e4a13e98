"""Drafts of the page cache: partly accepted, rejected without a trace, and closed with their
sequence.
"""

import pytest

from helpers.kvcache.manager_cases import BASELINE, held
from helpers.raising import assert_raises
from kvboost_edge.compat.page_cache import KVCache
from kvboost_edge.errors import CapacityError, RequestError


@pytest.mark.parametrize("length", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("num_drafts", [0, 1, 5])
@pytest.mark.parametrize("prefixed", [False, True])
def test_accepted_drafts_are_appended_and_others_dropped(length, num_drafts, prefixed):
    payloads = [f"kv{i}" for i in range(length)]
    drafts = [f"draft{i}" for i in range(num_drafts)]
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


def test_a_rejected_draft_leaves_no_trace():
    cache = KVCache(page_size=4, max_pages=100)
    cache.attach("s", list(range(6)), list(range(6)))
    before = cache.stats()
    draft = cache.hook_speculative_decode("s", list(range(20)))
    assert cache.stats()["allocated_pages"] == 2 + 1 + 5  # the copied tail and five new pages
    draft.reject()
    assert cache.stats() == before
    assert cache.get("s") == list(range(6))
    assert not draft.is_open
    draft.reject()  # a second call is no error
    assert_raises(RequestError, "closed", draft.accept, 0)
    assert_raises(RequestError, "closed", draft.get)


def test_accepting_a_draft_closes_the_others():
    cache = KVCache(page_size=4, max_pages=100)
    cache.attach("s", [0])
    one = cache.hook_speculative_decode("s", ["x"])
    two = cache.hook_speculative_decode("s", ["y", "z"])
    assert (one.get(), two.get()) == ([0, "x"], [0, "y", "z"])
    two.accept(1)
    assert cache.get("s") == [0, "y"]
    assert not one.is_open
    with pytest.raises(RequestError, match="its sequence has changed"):
        one.accept(1)
    assert cache.stats()["allocated_pages"] == 1


@pytest.mark.parametrize("replaced", [False, True])
def test_drafts_close_with_their_sequence(replaced):
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
def test_accept_checks_the_number_of_drafts(bad):
    cache = KVCache(page_size=4, max_pages=100)
    cache.attach("s", [0])
    draft = cache.hook_speculative_decode("s", [1, 2])
    with pytest.raises(RequestError, match="from 0 to the number of drafts, 2"):
        draft.accept(bad)
    draft.accept(2)
    assert cache.get("s") == [0, 1, 2]


def test_a_draft_that_does_not_fit_changes_nothing():
    cache = KVCache(page_size=4, max_pages=3)
    cache.attach("s", list(range(5)))
    before = cache.stats()
    with pytest.raises(CapacityError):
        cache.hook_speculative_decode(
            "s", list(range(4))
        )  # a copy of the tail and one more: three, with one page free
    assert cache.stats() == before
    draft = cache.hook_speculative_decode("s", list(range(3)))
    draft.accept(3)  # exactly full
    assert cache.get("s") == [0, 1, 2, 3, 4, 0, 1, 2]
    cache.check_invariants()


def test_a_draft_for_an_unknown_id_is_ignored():
    cache = KVCache(page_size=4, max_pages=100)
    assert cache.hook_speculative_decode("nobody", [1, 2]) is None
    assert cache.get("nobody") is None
    assert held(cache) == BASELINE
    cache.check_invariants()
