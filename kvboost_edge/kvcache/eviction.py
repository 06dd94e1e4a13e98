"""Which free block is handed out next, as an object: the pool keeps counts, the policy keeps the order.

A block is with the policy from the moment nobody references it until it is handed out or shared again. Two rules make
the order of `LeastRecentlyUsed`:

1. A released block whose content may still be matched goes to the back: it lives longest.
2. A released block with nothing to match goes to the front: it is handed out before anything cached is lost.

Why not a deque: a shared prefix leaves the middle of the order, O(1) here and O(n) there.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Protocol

__all__ = ["EvictionPolicy", "LeastRecentlyUsed", "TenantFloors"]


class EvictionPolicy(Protocol):
    """The order of free blocks. The pool alone calls it, with ids it has checked, each free block once.

    A policy may hold blocks of its own (pins): references that no table explains. `held` names them, and whoever counts
    what is left for requests, or what an idle pool may reference, asks for them.
    """

    def __len__(self) -> int:
        """Free blocks."""
        ...

    def __contains__(self, block_id: object) -> bool:
        """Whether a block is among the free ones."""
        ...

    def put(self, block_id: int, *, matchable: bool, owner: bytes = ...) -> None:
        """A block was released by its last holder; `matchable`: its content can still be found, by `owner`."""
        ...

    def remove(self, block_id: int) -> None:
        """A free block is shared again."""
        ...

    def refresh(self, block_id: int) -> None:
        """A free block counts as used just now."""
        ...

    def take(self, count: int, owner: bytes = ...) -> list[int]:
        """Hand out `count` blocks to an owner, not more than there are, those to be evicted first."""
        ...

    def protected(self, owner: bytes) -> int:
        """Free blocks that this owner gets only when there are no others."""
        ...

    def order(self) -> list[int]:
        """The free blocks, the next one to be handed out first. Changes nothing."""
        ...

    def held(self) -> Collection[int]:
        """Blocks the policy itself references, once each: no request can get them."""
        ...


class LeastRecentlyUsed:
    """One ordered dict is the free list and the LRU. It holds no blocks of its own."""

    __slots__ = ("_order",)

    def __init__(self, block_ids: Iterable[int]) -> None:
        self._order: OrderedDict[int, None] = OrderedDict.fromkeys(block_ids)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._order

    def put(self, block_id: int, *, matchable: bool, owner: bytes = b"") -> None:
        """To the back if matchable, else to the front."""
        self._order[block_id] = None
        if not matchable:
            self._order.move_to_end(block_id, last=False)

    def remove(self, block_id: int) -> None:
        """Out of the order."""
        del self._order[block_id]

    def refresh(self, block_id: int) -> None:
        """To the back."""
        self._order.move_to_end(block_id)

    def take(self, count: int, owner: bytes = b"") -> list[int]:
        """From the front, whoever asks."""
        pop = self._order.popitem
        return [pop(last=False)[0] for _ in range(count)]

    def protected(self, owner: bytes) -> int:
        """None."""
        return 0

    def order(self) -> list[int]:
        """Front to back."""
        return list(self._order)

    def held(self) -> Collection[int]:
        """None."""
        return ()


class TenantFloors:
    """The order of `LeastRecentlyUsed`, but nobody's cached blocks go to others below a floor while there are more.

    Half of the pool is divided evenly among the owners that have blocks cached and idle: that many of each stay, the
    most recently used ones, until others need the pool's last blocks. With one owner it is `LeastRecentlyUsed`.

    Example, 12 blocks, a and b have 5 cached each, the floor is 12 // 2 // 2 = 3: b, who needs 6, gets the two that
    nobody has cached, and of the oldest ones at most two of a's.
    """

    __slots__ = ("_cached", "_num_blocks", "_owners", "_plain", "_stamps")

    def __init__(self, block_ids: Iterable[int]) -> None:
        self._plain: OrderedDict[int, None] = OrderedDict.fromkeys(block_ids)  # nothing to match, handed out first
        self._cached: dict[bytes, OrderedDict[int, int]] = {}  # owner -> block -> when it was put there, oldest first
        self._owners: dict[int, bytes] = {}  # of the cached ones
        self._stamps = itertools.count()
        self._num_blocks = len(self._plain)

    def __len__(self) -> int:
        return len(self._plain) + len(self._owners)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._owners or block_id in self._plain

    def put(self, block_id: int, *, matchable: bool, owner: bytes = b"") -> None:
        """Behind all that its owner has cached if matchable, else before everything."""
        if not matchable:
            self._plain[block_id] = None
            self._plain.move_to_end(block_id, last=False)
            return
        self._owners[block_id] = owner
        cached = self._cached.get(owner)
        if cached is None:
            cached = self._cached[owner] = OrderedDict()
        cached[block_id] = next(self._stamps)

    def remove(self, block_id: int) -> None:
        """Out of whatever holds it."""
        owner = self._owners.pop(block_id, None)
        if owner is None:
            del self._plain[block_id]
            return
        cached = self._cached[owner]
        del cached[block_id]
        if not cached:
            del self._cached[owner]

    def refresh(self, block_id: int) -> None:
        """To the back."""
        owner = self._owners.get(block_id)
        if owner is None:
            self._plain.move_to_end(block_id)
            return
        self._cached[owner][block_id] = next(self._stamps)
        self._cached[owner].move_to_end(block_id)

    def take(self, count: int, owner: bytes = b"") -> list[int]:
        """What nobody can match; then the oldest of those above their owner's floor, or this owner's; then the oldest
        of all."""
        taken = [self._plain.popitem(last=False)[0] for _ in range(min(count, len(self._plain)))]
        if len(self._cached) == 1 and owner in self._cached:  # the usual case, in which every block's time counts
            taken += self._oldest(owner, count - len(taken))
        for floor in (self._floor, 0):
            if len(taken) == count:
                break
            spare = {o: len(c) - (0 if o == owner else floor) for o, c in self._cached.items()}
            fronts = [(next(iter(self._cached[o].values())), o) for o, number in spare.items() if number > 0]
            heapq.heapify(fronts)
            while fronts and len(taken) < count:
                _, victim = fronts[0]
                cached = self._cached[victim]
                block_id, _ = cached.popitem(last=False)
                del self._owners[block_id]
                taken.append(block_id)
                spare[victim] -= 1
                if spare[victim]:
                    heapq.heapreplace(fronts, (next(iter(cached.values())), victim))
                else:
                    heapq.heappop(fronts)
                if not cached:
                    del self._cached[victim]
        return taken

    def _oldest(self, owner: bytes, count: int) -> list[int]:
        cached, forget = self._cached[owner], self._owners.__delitem__
        taken = [cached.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            forget(block_id)
        if not cached:
            del self._cached[owner]
        return taken

    def protected(self, owner: bytes) -> int:
        """Blocks of the others up to their floors."""
        if not self._cached or (len(self._cached) == 1 and owner in self._cached):
            return 0
        floor = self._floor
        return sum(min(len(cached), floor) for other, cached in self._cached.items() if other != owner)

    def order(self) -> list[int]:
        """What nobody can match, then the oldest: the order while nobody is at its floor."""
        stamped = [(stamp, block_id) for cached in self._cached.values() for block_id, stamp in cached.items()]
        return [*self._plain, *(block_id for _, block_id in sorted(stamped))]

    def held(self) -> Collection[int]:
        """None."""
        return ()

    @property
    def _floor(self) -> int:
        return self._num_blocks // 2 // max(1, len(self._cached))
