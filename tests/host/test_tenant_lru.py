"""What is remembered for tenants: bounded for each root and for all, and fair, against a list that
is plain to read.
"""

import random
from collections import defaultdict

import pytest

from kvboost_edge.host import tenant_lru as fair_store
from kvboost_edge.host.tenant_lru import TenantLRU

ROOT_BYTES = fair_store._ROOT_BYTES
Store = TenantLRU[int]


def test_a_root_keeps_its_latest_within_its_bytes():
    store = Store(max_root_bytes=ROOT_BYTES + 100)
    for number in range(20):
        store.keep(b"me", b"root", "used", -1, 10)
        store.keep(b"me", b"root", f"{number}", number, 10)
        assert store.find(b"root", "used") == -1, "used just now, so the others go"
        assert store.num_bytes <= ROOT_BYTES + 100
    assert [number for number in range(20) if store.find(b"root", f"{number}") == number] == list(
        range(11, 20)
    )
    store.keep(b"me", b"root", "large", 1, 101)
    assert (store.find(b"root", "large"), store.find(b"root", "19")) == (None, 19)
    assert store.find(b"other", "used") is None
    store.forget(b"root", b"nobody's")
    assert (store.num_bytes, store.find(b"root", "used")) == (0, None)


def test_who_keeps_no_more_than_an_equal_part_loses_nothing():
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


def test_a_third_one_finds_its_part_and_those_with_more_give():
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


def test_of_too_many_owners_the_one_that_came_longest_ago_goes(monkeypatch):
    monkeypatch.setattr(fair_store, "_MAX_OWNERS", 3)
    store = Store()
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


@pytest.mark.parametrize("seed", range(8))
def test_bytes_are_those_of_what_is_kept_and_nobody_with_a_fair_part_loses(seed):
    """Against a plain list of all that was kept and is found again."""
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
        # What is gone: looked for without the store counting it as used.
        roots = store._roots
        gone = {
            at
            for at in known
            if bytes(at[:2]) not in roots or at[2] not in roots[bytes(at[:2])].values
        }
        for at in gone:
            same_root = at[:2] == (owner, root)
            assert same_root or at[0] == owner or before[at[0]] >= most / 4, (
                "it had less than an equal part"
            )
            del known[at]
        assert {at: store._roots[bytes(at[:2])].values[at[2]] for at in known} == known
        assert sum(held().values()) == store.num_bytes <= most
