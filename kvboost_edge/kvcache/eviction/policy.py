"""Eviction policies: the order in which free blocks are reused.

The pool counts references, and the policy keeps the order of free blocks. A block is in the policy
from its last release until it is allocated or shared again. `LeastRecentlyUsed` follows two rules:

1. A released block that can still be matched goes to the back, to be reused last.
2. A released block that cannot be matched goes to the front, to be reused before cached blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from kvboost_edge.kvcache.eviction.order import ONCE, CachedOrder

__all__ = ["EvictionPolicy", "LeastRecentlyUsed", "TenantFloors"]


class EvictionPolicy(Protocol):
    """Eviction order of the free blocks.

    Only the pool calls these methods, with valid ids. Each free block is in the order exactly once.
    """

    def __len__(self) -> int:
        """Return the number of free blocks."""
        ...

    def __contains__(self, block_id: object) -> bool:
        """Return whether a block is free."""
        ...

    def put(self, block_id: int, *, matchable: bool, owner: bytes = ..., again: int = ...) -> None:
        """Add a block after its last reference was released.

        Args:
            block_id: the block.
            matchable: whether the block is still in the prefix index.
            owner: tenant whose prompts can match the block.
            again: usage rank of the block, which is ONCE, AGAIN or RETAINED. See `CachedOrder`.
        """
        ...

    def remove(self, block_id: int) -> None:
        """Remove a free block that is shared again."""
        ...

    def refresh(self, block_id: int) -> None:
        """Mark a free block as used now."""
        ...

    def demote(self, block_id: int) -> None:
        """End the retention of a free block."""
        ...

    def take(self, count: int, owner: bytes = ...) -> list[int]:
        """Remove and return the next `count` blocks in eviction order, for use by an owner.

        `count` must be at most `len(self)`.
        """
        ...

    def protected(self, owner: bytes) -> int:
        """Return how many free blocks are protected for owners other than this one."""
        ...

    def order(self) -> list[int]:
        """Return all free blocks in eviction order, without removing them."""
        ...

    def missed(self, *, once: int, again: int) -> None:
        """Adapt to the misses of evicted blocks.

        Args:
            once: number of misses of blocks evicted after a single use.
            again: number of misses of blocks evicted after repeated use.
        """
        ...


class LeastRecentlyUsed:
    """LRU policy that keeps the free list in one ordered dict."""

    __slots__ = ("_order",)

    def __init__(self, block_ids: Iterable[int]) -> None:
        # Removing a shared block from the middle takes O(1), compared to O(n) in a deque.
        self._order: OrderedDict[int, None] = OrderedDict.fromkeys(block_ids)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._order

    def put(self, block_id: int, *, matchable: bool, owner: bytes = b"", again: int = ONCE) -> None:
        """Add a block at the back if it can be matched, else at the front."""
        self._order[block_id] = None
        if not matchable:
            self._order.move_to_end(block_id, last=False)

    def remove(self, block_id: int) -> None:
        """Remove a block from the order."""
        del self._order[block_id]

    def refresh(self, block_id: int) -> None:
        """Move a block to the back."""
        self._order.move_to_end(block_id)

    def demote(self, block_id: int) -> None:
        """Do nothing, because this policy does not support retention."""

    def take(self, count: int, owner: bytes = b"") -> list[int]:
        """Remove and return blocks from the front, for any owner."""
        pop = self._order.popitem
        return [pop(last=False)[0] for _ in range(count)]

    def protected(self, owner: bytes) -> int:
        """Return 0, because this policy protects no owner."""
        return 0

    def order(self) -> list[int]:
        """Return the blocks from front to back."""
        return list(self._order)

    def missed(self, *, once: int, again: int) -> None:
        """Do nothing, because this policy does not adapt."""


class TenantFloors:
    """Eviction policy that guarantees each tenant a share, based on `CachedOrder`.

    Blocks that cannot be matched are reused first, then cached blocks in the order of
    `CachedOrder`. With a single owner and no blocks used again or retained, it behaves like
    `LeastRecentlyUsed`.

    Args:
        block_ids: ids of all blocks in the pool.
        window: number of cached blocks in each owner's recency window. See `CachedOrder`.
    """

    __slots__ = ("_cached", "_plain")

    def __init__(self, block_ids: Iterable[int], window: int = 0) -> None:
        # Blocks that cannot be matched, which are reused first.
        self._plain: OrderedDict[int, None] = OrderedDict.fromkeys(block_ids)
        self._cached: CachedOrder[int] = CachedOrder(len(self._plain), window)

    def __len__(self) -> int:
        return len(self._plain) + len(self._cached)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._cached or block_id in self._plain

    def put(self, block_id: int, *, matchable: bool, owner: bytes = b"", again: int = ONCE) -> None:
        """Add a block to the cached order if it can be matched, else in front of all blocks."""
        if matchable:
            self._cached.put(block_id, owner, again=again)
            return
        self._plain[block_id] = None
        self._plain.move_to_end(block_id, last=False)

    def remove(self, block_id: int) -> None:
        """Remove a block from the order."""
        if block_id in self._plain:
            del self._plain[block_id]
        else:
            self._cached.remove(block_id)

    def refresh(self, block_id: int) -> None:
        """Mark a block as used now."""
        if block_id in self._plain:
            self._plain.move_to_end(block_id)
        else:
            self._cached.refresh(block_id)

    def demote(self, block_id: int) -> None:
        """Turn a retained block into one that was used again."""
        if block_id in self._cached:
            self._cached.demote(block_id)

    def take(self, count: int, owner: bytes = b"") -> list[int]:
        """Remove and return unmatchable blocks first, then cached blocks in eviction order."""
        taken = [self._plain.popitem(last=False)[0] for _ in range(min(count, len(self._plain)))]
        return taken + self._cached.take(count - len(taken), owner) if len(taken) < count else taken

    def protected(self, owner: bytes) -> int:
        """Return how many cached blocks of other owners are protected by their floors."""
        return self._cached.protected(owner)

    def missed(self, *, once: int, again: int) -> None:
        """Adapt the share of blocks used once to the misses of evicted blocks."""
        self._cached.missed(once=once, again=again)

    def order(self) -> list[int]:
        """Return all free blocks in eviction order, ignoring floors."""
        return [*self._plain, *self._cached.oldest_first()]
