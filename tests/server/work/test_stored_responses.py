"""Tests of stored turns: bounded in bytes, entries and time, and separate for each tenant."""

import sys

import pytest

from kvboost_edge.server.work.stored_responses import ResponseStore, StoredResponse


def turn(size=1000, previous=None):
    return StoredResponse(b"x" * (size - StoredResponse(b"", b"", None).size), b"", previous)


def names(remembered, tenant=None):
    return "".join(name for name in "abcdefgh" if remembered.find(tenant, name))


def test_bytes_are_bounded_with_lru_eviction():
    remembered = ResponseStore(1, max_bytes=3000)
    for name in "abc":
        assert remembered.keep(None, name, turn())
    remembered.conversation(None, "a")
    assert remembered.keep(None, "d", turn(2000))
    assert names(remembered) == "ad"
    assert remembered.num_bytes == 3000
    assert not remembered.keep(None, "e", turn(3001))
    assert names(remembered) == "ad"


def test_the_number_of_entries_is_bounded():
    remembered = ResponseStore(1, max_entries=2)
    for name in "abc":
        remembered.keep(None, name, turn())
    assert names(remembered) == "bc"
    assert remembered.num_bytes == 2000


def test_responses_expire_even_if_used():
    now = 0.0
    remembered = ResponseStore(1, seconds=10, clock=lambda: now)
    remembered.keep(None, "a", turn())
    now = 6.0
    remembered.keep(None, "b", turn())
    remembered.conversation(None, "a")
    now = 11.0
    assert names(remembered) == "b"
    assert remembered.num_bytes == 1000


def test_each_tenant_has_its_own_share():
    remembered = ResponseStore(2, max_bytes=4000, max_entries=100)
    for name in "abcd":
        remembered.keep("one", name, turn())
    remembered.keep("two", "e", turn())
    assert (names(remembered, "one"), names(remembered, "two"), names(remembered)) == (
        "cd",
        "e",
        "",
    )
    assert not remembered.forget("two", "c")
    assert remembered.forget("one", "c")
    assert remembered.num_bytes == 2000


def test_a_conversation_is_its_turns_in_order():
    remembered = ResponseStore(1)
    remembered.keep(None, "a", turn())
    remembered.keep(None, "b", turn(1001, "a"))
    remembered.keep(None, "c", turn(1002, "b"))
    assert [one.size for one in remembered.conversation(None, "c")] == [1000, 1001, 1002]
    remembered.forget(None, "a")
    with pytest.raises(KeyError, match="a"):
        remembered.conversation(None, "c")
    with pytest.raises(KeyError, match="x"):
        remembered.conversation(None, "x")


def test_items_are_found_in_the_turns_used_last():
    remembered = ResponseStore(2)
    turns = {
        name: StoredResponse(name.encode(), b"", None, frozenset(items))
        for name, items in (("a", "12"), ("b", "23"), ("c", "4"))
    }
    for name, one in turns.items():
        remembered.keep("one", name, one)
    assert remembered.holding("one", "3") == [turns["b"]]
    assert remembered.holding("one", "21") == [turns["b"], turns["a"]]
    remembered.find("one", "a")  # this does not count as use
    assert remembered.holding("one", "24") == [turns["c"], turns["b"]]
    remembered.conversation("one", "a")
    assert remembered.holding("one", "2") == [turns["a"]]
    assert remembered.holding("one", "") == []
    for tenant, items, missing in (("one", "425", "5"), ("two", "1", "1"), (None, "1", "1")):
        with pytest.raises(KeyError, match=missing):
            remembered.holding(tenant, items)


def test_ids_of_items_count_as_bytes():
    ids = frozenset(f"msg_{number:048x}" for number in range(1000))
    used = sys.getsizeof(ids) + sum(map(sys.getsizeof, ids))
    size = StoredResponse(b"", b"", None, ids).size - StoredResponse(b"", b"", None).size
    assert used <= size <= 2 * used
