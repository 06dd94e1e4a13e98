"""The eviction order against a reference model that sorts all entries at each eviction."""

from __future__ import annotations

import dataclasses
import random

import pytest

from kvboost_edge.kvcache.eviction.order import AGAIN, ONCE, RETAINED, CachedOrder


@dataclasses.dataclass
class Model:
    """Reference model of `CachedOrder`, with its rules in plain Python.

    - entries: key -> (owner, ONCE, AGAIN or RETAINED, time of the last use)
    - retaining: owners that have retained entries, in the order of their first one
    - ranks: for entries in a recency window, which are RETAINED here, the rank outside the window
    """

    capacity: int
    window: int = 0
    ranks: dict[int, int] = dataclasses.field(default_factory=dict)
    retaining: dict[bytes, None] = dataclasses.field(default_factory=dict)
    entries: dict[int, tuple[bytes, int, int]] = dataclasses.field(default_factory=dict)
    given_up: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    now: int = 0

    def put(self, key, owner, again):
        self.now += 1
        if self.window and again != RETAINED:
            self.ranks[key] = again
            again = RETAINED
        self.entries[key] = (owner, again, self.now)
        if again == RETAINED:
            self.retaining[owner] = None
        self.settle()

    def settle(self):
        """No owner retains more than the floor, and no window exceeds its size. Excess entries
        count as just used.
        """
        self.ranks = {key: rank for key, rank in self.ranks.items() if key in self.entries}
        self.retaining = {owner: None for owner in self.retaining if owner in self.owners}
        for owner in self.retaining:
            while len(kept := self.retained(owner)) > self.floor:
                self.let_go(kept[0])
            while len(kept := [k for k in self.retained(owner) if k in self.ranks]) > self.window:
                self.let_go(kept[0])

    def let_go(self, key):
        self.now += 1
        self.entries[key] = (self.entries[key][0], self.ranks.pop(key, AGAIN), self.now)

    def retained(self, owner):
        kept = [key for key, entry in self.entries.items() if entry[:2] == (owner, RETAINED)]
        return sorted(kept, key=lambda key: self.entries[key][2])

    def count(self, owner):
        return sum(entry[0] == owner for entry in self.entries.values())

    @property
    def owners(self):
        return {owner for owner, _, _ in self.entries.values()}

    @property
    def floor(self):
        return self.capacity // 2 // max(1, len(self.owners))

    def protected(self, owner):
        return sum(min(self.count(other), self.floor) for other in self.owners - {owner})

    def take(self, count, owner, share):
        taken = []
        for floor in (self.floor, 0):
            while len(taken) < count:
                free = {o for o in self.owners if o == owner or self.count(o) > floor}
                open_to = {key: entry for key, entry in self.entries.items() if entry[0] in free}
                once = {key for key, entry in open_to.items() if entry[1] == ONCE}
                plain = {key: entry for key, entry in open_to.items() if entry[1] != RETAINED}
                if once and sum(entry[1] == ONCE for entry in self.entries.values()) > share:
                    open_to = {key: open_to[key] for key in once}
                elif plain and floor:
                    open_to = plain
                else:  # retained entries come after all others of their owner
                    others = {entry[0] for entry in plain.values()}
                    open_to = {
                        k: entry
                        for k, entry in open_to.items()
                        if k in plain or entry[0] not in others
                    }
                if not open_to:
                    break
                key = min(open_to, key=lambda key: open_to[key][2])
                taken.append(key)
                del self.entries[key]
                self.settle()
        return taken


@pytest.mark.parametrize("seed", range(90))
@pytest.mark.some(3)
def test_random_operations_agree_with_the_model(seed):
    rng = random.Random(seed)
    capacity = rng.choice((1, 5, 20, 60))
    owners = [b"%d" % number for number in range(rng.choice((1, 2, 3, 9)))]
    window = (0, 2, 7)[seed % 3]
    order = CachedOrder(capacity, window)
    model = Model(capacity, window)
    for step in range(400):
        act = rng.random()
        keys = list(model.entries)
        owner = rng.choice(owners)
        if act < 0.5 and len(keys) < capacity:
            again = rng.choice((ONCE, ONCE, AGAIN, RETAINED))
            order.put(step, owner, again=again)
            model.put(step, owner, again)
        elif act < 0.6 and keys:
            key = rng.choice(keys)
            order.remove(key)
            del model.entries[key]
            model.settle()
        elif act < 0.7 and keys:
            key = rng.choice(keys)
            order.refresh(key)
            owner, again, _ = model.entries[key]
            model.put(key, owner, model.ranks.get(key, again))
        elif act < 0.75 and keys:
            key = rng.choice(keys)
            order.demote(key)
            if model.entries[key][1] == RETAINED and key not in model.ranks:
                model.let_go(key)
        elif act < 0.8:
            order.missed(once=rng.randrange(3), again=rng.randrange(3))
            assert capacity // 10 <= order.once_share <= capacity
        elif keys:
            if len(owners) == 1:
                copy = dataclasses.replace(
                    model,
                    entries=model.entries.copy(),
                    retaining=model.retaining.copy(),
                    ranks=model.ranks.copy(),
                )
                assert order.oldest_first() == copy.take(len(keys), owner, order.once_share)
            count = rng.randrange(1, 1 + rng.choice((1, len(keys))))
            asking = rng.choice([owner, b"a stranger"])
            assert order.take(count, asking) == model.take(count, asking, order.once_share)
        assert len(order) == len(model.entries)
        for other in (*owners, b"a stranger"):
            assert order.protected(other) == model.protected(other)
        assert all(key in order for key in model.entries)
        assert sorted(order.oldest_first()) == sorted(model.entries)


def test_single_use_blocks_beyond_their_share_are_evicted_first():
    order = CachedOrder(10)
    for key in "abc":
        order.put(key, b"", again=1)
    for key in "defghij":
        order.put(key, b"")
    assert order.once_share == 1, "the initial share must be a tenth"
    assert order.oldest_first() == list("defghi" + "abc" + "j")
    order.missed(once=3, again=0)
    assert order.once_share == 4
    assert order.oldest_first() == list("def" + "abc" + "ghij")
    order.missed(once=0, again=100)
    assert order.once_share == 1, "the share must stay at least a tenth"
    order.missed(once=100, again=0)
    assert order.once_share == 10
    assert order.oldest_first() == list("abcdefghij"), (
        "with the largest share, the order must be plain LRU"
    )


def test_misses_of_evicted_blocks_adapt_the_shares():
    order = CachedOrder(100)
    order.once_share = 100
    for key in range(100):
        order.put(key, b"", again=int(key >= 90))
    order.take(100, b"")
    order.missed(once=0, again=2)
    assert order.once_share == 100 - 2 * 3, "the weight must be the root of the ratio of 9 to 1"
    order.missed(once=2, again=0)
    assert order.once_share == 100 - 2 * 3 + 2


def test_an_owners_recency_window_is_evicted_last():
    order = CachedOrder(40, 3)
    for key in range(8):
        order.put(key, b"a", again=ONCE)
    order.refresh(1)
    for key in range(20, 28):
        order.put(key, b"a", again=AGAIN)
    order.missed(once=0, again=40)
    assert order.take(13, b"a") == [0, 2, 3, 4, 5, 6, 7, 1, 20, 21, 22, 23, 24]
    assert order.take(9, b"a") == [25, 26, 27]
    order = CachedOrder(40, 3)
    for key in range(6):
        order.put(key, b"a", again=AGAIN if key < 2 else ONCE)
    order.missed(once=0, again=40)
    assert order.once_share == 4
    order.put(6, b"a", again=ONCE)
    order.remove(6)
    assert order.oldest_first()[-2:] == [4, 5], (
        "the window of three blocks must lose the removed block"
    )


def test_unknown_keys_are_errors():
    order = CachedOrder(4)
    for call in (order.remove, order.refresh):
        with pytest.raises(KeyError):
            call(3)
    assert order.take(3, b"") == []
