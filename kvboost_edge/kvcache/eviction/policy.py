"""Which free block is handed out next, as an object: the pool keeps counts, the policy keeps the
order.

A block is with the policy from the moment nobody references it until it is handed out or shared
again. Two rules make the order of `LeastRecentlyUsed`:

1. A released block whose content may still be matched goes to the back: it lives longest.
2. A released block with nothing to match goes to the front: it is handed out before anything cached
  is lost.

Why not a deque: a shared prefix leaves the middle of the order, O(1) here and O(n) there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from kvboost_edge.kvcache.eviction.order import ONCE, CachedOrder

__all__ = ["EvictionPolicy", "LeastRecentlyUsed", "TenantFloors"]


class EvictionPolicy(Protocol):
    """The order of free blocks. The pool alone calls it, with ids it has checked, each free block
    once.
    """

    def __len__(self) -> int:
        """Free blocks."""
        ...

    def __contains__(self, block_id: object) -> bool:
        """Whether a block is among the free ones."""
        ...

    def put(self, block_id: int, *, matchable: bool, owner: bytes = ..., again: int = ...) -> None:
        """A block was released by its last holder; `matchable`: its content can still be found, by
        `owner`; `again`: it was used ONCE or AGAIN, or is RETAINED, see `CachedOrder`.
        """
        ...

    def remove(self, block_id: int) -> None:
        """A free block is shared again."""
        ...

    def refresh(self, block_id: int) -> None:
        """A free block counts as used just now."""
        ...

    def demote(self, block_id: int) -> None:
        """A free block is retained no longer."""
        ...

    def take(self, count: int, owner: bytes = ...) -> list[int]:
        """Hand out `count` blocks to an owner, not more than there are, those to be evicted
        first.
        """
        ...

    def protected(self, owner: bytes) -> int:
        """Free blocks that this owner gets only when there are no others."""
        ...

    def order(self) -> list[int]:
        """The free blocks, the next one to be handed out first. Changes nothing."""
        ...

    def missed(self, *, once: int, again: int) -> None:
        """A prompt lacks so many blocks that were cached and handed out: after one use, after
        more.
        """
        ...


class LeastRecentlyUsed:
    """One ordered dict is the free list and the LRU."""

    __slots__ = ("_order",)

    def __init__(self, block_ids: Iterable[int]) -> None:
        self._order: OrderedDict[int, None] = OrderedDict.fromkeys(block_ids)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._order

    def put(self, block_id: int, *, matchable: bool, owner: bytes = b"", again: int = ONCE) -> None:
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

    def demote(self, block_id: int) -> None:
        """It retains nothing."""

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

    def missed(self, *, once: int, again: int) -> None:
        """It learns nothing."""


class TenantFloors:
    """First what nobody can match, then the cached blocks in a `CachedOrder`: the least recently
    used first, of those used once only a share, what is retained last, and nobody's to others below
    a floor while there are more.

    With one owner, and as long as nothing was used again or retained, it is `LeastRecentlyUsed`.
    `window`: cached blocks of each owner that were used last and go last, see `CachedOrder`.
    """

    __slots__ = ("_cached", "_plain")

    def __init__(self, block_ids: Iterable[int], window: int = 0) -> None:
        self._plain: OrderedDict[int, None] = OrderedDict.fromkeys(
            block_ids
        )  # nothing to match, handed out first
        self._cached: CachedOrder[int] = CachedOrder(len(self._plain), window)

    def __len__(self) -> int:
        return len(self._plain) + len(self._cached)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._cached or block_id in self._plain

    def put(self, block_id: int, *, matchable: bool, owner: bytes = b"", again: int = ONCE) -> None:
        """Behind all that its owner has cached if matchable, else before everything."""
        if matchable:
            self._cached.put(block_id, owner, again=again)
            return
        self._plain[block_id] = None
        self._plain.move_to_end(block_id, last=False)

    def remove(self, block_id: int) -> None:
        """Out of whatever holds it."""
        if block_id in self._plain:
            del self._plain[block_id]
        else:
            self._cached.remove(block_id)

    def refresh(self, block_id: int) -> None:
        """To the back."""
        if block_id in self._plain:
            self._plain.move_to_end(block_id)
        else:
            self._cached.refresh(block_id)

    def demote(self, block_id: int) -> None:
        """From the blocks that go last to those used again."""
        if block_id in self._cached:
            self._cached.demote(block_id)

    def take(self, count: int, owner: bytes = b"") -> list[int]:
        """What nobody can match; then what of the cached goes first."""
        taken = [self._plain.popitem(last=False)[0] for _ in range(min(count, len(self._plain)))]
        return taken + self._cached.take(count - len(taken), owner) if len(taken) < count else taken

    def protected(self, owner: bytes) -> int:
        """Blocks of the others up to their floors."""
        return self._cached.protected(owner)

    def missed(self, *, once: int, again: int) -> None:
        """The share of what was used once follows."""
        self._cached.missed(once=once, again=again)

    def order(self) -> list[int]:
        """What nobody can match, then the cached ones: the order while nobody is at its floor."""
        return [*self._plain, *self._cached.oldest_first()]
