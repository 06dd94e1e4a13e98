"""Memory of values for tenants: bounded per root and in total, and fair, against a plain reference."""

import random
from collections import defaultdict

import pytest

from kvboost_edge.host import tenant_lru
from kvboost_edge.host.tenant_lru import TenantLRU

ROOT_BYTES = tenant_lru._ROOT_BYTES
Store = TenantLRU[int]


def test_a_root_keeps_its_newest_values_within_its_bytes():
    store = Store(max_root_bytes=ROOT_BYTES + 100)
    for number in range(20):
        store.keep(b"me", b"root", "used", -1, 10)
        store.keep(b"me", b"root", f"{number}", number, 10)
        assert store.find(b"root", "used") == -1, "the most recently used value must not be evicted"
        assert store.num_bytes <= ROOT_BYTES + 100
    assert [number for number in range(20) if store.find(b"root", f"{number}") == number] == list(
        range(11, 20)
    )
    store.keep(b"me", b"root", "large", 1, 101)
    assert (store.find(b"root", "large"), store.find(b"root", "19")) == (None, 19)
    assert store.find(b"other", "used") is None
    store.forget(b"root", b"nobody's")
    assert (store.num_bytes, store.find(b"root", "used")) == (0, None)


def test_an_owner_within_its_share_loses_nothing():
    store = Store(max_bytes=40_000)
    for number in range(4):
        store.keep(b"quiet", b"quiet", f"{number}", number, 2000)
    for number in range(500):
        store.keep(b"loud", f"salt {number}".encode(), "key", number, 3000)
        assert store.num_bytes <= 40_000
    assert [store.find(b"quiet", f"{number}") for number in range(4)] == [0, 1, 2, 3]
    assert [
        number for number in range(500) if store.find(f"salt {number}".encode(), "key") is not None
    ] == [
        493,
        494,
        495,
        496,
        497,
        498,
        499,
    ]


def test_a_new_owner_gets_its_share_from_larger_owners():
    store = Store(max_bytes=30 * (ROOT_BYTES + 1000))
    for number in range(40):
        for owner in ("one", "two"):
            store.keep(owner.encode(), f"{owner} {number}".encode(), "key", number, 1000)
    for number in range(10):
        store.keep(b"three", f"three {number}".encode(), "key", number, 1000)
    held = {
        owner: sum(
            store.find(f"{owner} {number}".encode(), "key") is not None for number in range(40)
        )
        for owner in ("one", "two", "three")
    }
    assert held == {"one": 10, "two": 10, "three": 10}


def test_the_oldest_owner_is_dropped_beyond_the_limit():
    store = Store(max_owners=3)
    for owner in (b"a", b"b", b"a", b"c", b"d"):
        for salt in (b"1", b"2"):
            store.keep(owner, owner + salt, "key", 1, 10)
    assert [store.find(owner + b"1", "key") for owner in (b"a", b"b", b"c", b"d")] == [
        1,
        None,
        1,
        1,
    ]
    assert store.num_bytes == 6 * (ROOT_BYTES + 10)


def test_a_value_expires_even_if_it_was_used():
    now = 0.0
    store = Store(seconds=10, clock=lambda: now)
    store.keep(b"me", b"root", "a", 1, 10)
    now = 6.0
    store.keep(b"me", b"root", "b", 2, 10)
    assert (store.find(b"root", "a"), store.values(b"root")) == (1, [2, 1])
    now = 11.0
    assert (store.values(b"root"), store.num_bytes) == ([2], ROOT_BYTES + 10)
    store.keep(b"me", b"root", "b", 3, 10)
    now = 17.0
    assert store.peek(b"root", "b") == 3, "a value that was stored again must not expire"
    now = 22.0
    store.expire()
    assert store.num_bytes == 0


def test_the_number_of_values_per_root_is_bounded():
    store = Store(max_root_values=2)
    for number in range(3):
        store.keep(b"me", b"root", number, number, 10)
        assert store.peek(b"root", 0) in (0, None), "peek must not count as a use"
    assert store.values(b"root") == [1, 2]
    assert store.drop(b"root", 1)
    assert not store.drop(b"root", 1)
    assert not store.drop(b"other", 2)
    assert (store.values(b"root"), store.num_bytes) == ([2], ROOT_BYTES + 10)
    store.clear()
    assert (store.values(b"root"), store.num_bytes) == ([], 0)


def test_a_grown_value_counts_with_its_new_size():
    store = Store(max_root_bytes=ROOT_BYTES + 100)
    for key in "ab":
        assert store.keep(b"me", b"root", key, 1, 40)
    store.resize(b"root", "b", 60)
    assert (store.values(b"root"), store.num_bytes) == ([1, 1], ROOT_BYTES + 100)
    store.resize(b"root", "b", 61)
    assert (store.peek(b"root", "a"), store.num_bytes) == (None, ROOT_BYTES + 61)
    store.resize(b"root", "gone", 1000)
    store.resize(b"root", "b", 101)
    assert store.num_bytes == 0


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_equal_the_reference(seed):
    """The reference is a plain dict of all values that were kept and are still found."""
    rng = random.Random(seed)
    most = 20 * ROOT_BYTES
    store = Store(max_root_bytes=4 * ROOT_BYTES, max_bytes=most)
    known = {}  # (owner, root, key) -> (value, size)

    def held():
        found = defaultdict(int)
        for owner, root in {(owner, root) for owner, root, _ in known}:
            found[owner] += ROOT_BYTES + sum(
                size for at, (_, size) in known.items() if at[:2] == (owner, root)
            )
        return found

    for value in range(600):
        owner = rng.randrange(4)
        root = rng.randrange(6)
        key = rng.randrange(5)
        if rng.random() < 0.1:
            store.forget(bytes([owner, root]))
            known = {at: one for at, one in known.items() if at[:2] != (owner, root)}
            continue
        size = rng.randrange(1, 3 * ROOT_BYTES)
        store.keep(bytes([owner]), bytes([owner, root]), key, value, size)
        before = held()
        known[owner, root, key] = value, size
        # Find removed entries without counting a use of them in the store.
        roots = store._roots
        gone = {
            at
            for at in known
            if bytes(at[:2]) not in roots or at[2] not in roots[bytes(at[:2])].entries
        }
        for at in gone:
            same_root = at[:2] == (owner, root)
            assert same_root or at[0] == owner or before[at[0]] >= most / 4, (
                "an owner below its equal share lost a value"
            )
            del known[at]
        assert {at: store._roots[bytes(at[:2])].entries[at[2]] for at in known} == known
        assert sum(held().values()) == store.num_bytes <= most
