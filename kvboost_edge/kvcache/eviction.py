"""Which free block is handed out next, as an object: the pool keeps counts, the policy keeps the order.

A block is with the policy from the moment nobody references it until it is handed out or shared again. Two rules make
the order of `LeastRecentlyUsed`:

1. A released block whose content may still be matched goes to the back: it lives longest.
2. A released block with nothing to match goes to the front: it is handed out before anything cached is lost.

Why not a deque: a shared prefix leaves the middle of the order, O(1) here and O(n) there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Protocol

__all__ = ["EvictionPolicy", "LeastRecentlyUsed"]


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

    def put(self, block_id: int, *, matchable: bool) -> None:
        """A block was released by its last holder; `matchable`: its content can still be found."""
        ...

    def remove(self, block_id: int) -> None:
        """A free block is shared again."""
        ...

    def refresh(self, block_id: int) -> None:
        """A free block counts as used just now."""
        ...

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks, not more than there are, those to be evicted first."""
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

    def put(self, block_id: int, *, matchable: bool) -> None:
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

    def take(self, count: int) -> list[int]:
        """From the front."""
        pop = self._order.popitem
        return [pop(last=False)[0] for _ in range(count)]

    def order(self) -> list[int]:
        """Front to back."""
        return list(self._order)

    def held(self) -> Collection[int]:
        """None."""
        return ()
