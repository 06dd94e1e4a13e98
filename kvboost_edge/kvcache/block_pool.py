"""Reference counts of the blocks and one ordered list of the free ones, which is the LRU too.

A block is free when nobody references it. Free blocks wait in one `OrderedDict`: `take` hands out from its front, so
its order is the eviction order. Two rules make that order:

1. A released block whose content may still be matched goes to the back: it lives longest.
2. A released block with nothing to match goes to the front: it is handed out before anything cached is lost.

Why not a deque: `touch` takes a block out of the middle when a prefix is matched, O(1) here and O(n) there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvboost_edge.errors import CacheCorruption, CapacityError, ConfigError

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks 0 .. num_blocks-1, all free at first. Knows counts and order, nothing of content."""

    __slots__ = ("_free", "_ref_counts")

    def __init__(self, num_blocks: int) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise ConfigError(f"num_blocks={num_blocks!r} must be an integer of at least 1")
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, in any state."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks nobody references, whether or not they are still matchable."""
        return len(self._free)

    def ref_count(self, block_id: int) -> int:
        """References on a block; CacheCorruption for an id outside the pool."""
        self._check_id(block_id)
        return self._ref_counts[block_id]

    def ref_counts(self) -> list[int]:
        """A copy of all reference counts, by block id."""
        return self._ref_counts.copy()

    def free_ids(self) -> list[int]:
        """The free blocks, the next one to be handed out first."""
        return list(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out the `count` least recently used free blocks with one reference each; all or nothing.

        Raises CapacityError when fewer are free. The caller forgets what the blocks held.
        """
        if count > len(self._free):
            raise CapacityError(
                f"{count} blocks needed, {len(self._free)} of {self.num_blocks} are free; "
                "enlarge max_cache_bytes or num_blocks"
            )
        pop = self._free.popitem
        taken = [pop(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def touch(self, block_id: int) -> None:
        """Add a reference; a free block leaves the free list."""
        self._check_id(block_id)
        if self._ref_counts[block_id] == 0:
            del self._free[block_id]
        self._ref_counts[block_id] += 1

    def release(self, block_id: int, *, matchable: bool) -> None:
        """Drop a reference; the last one frees the block, to the back of the list if `matchable`, else to the front.

        Raises CacheCorruption for a block that has no reference (double free) or is not in the pool (stale id).
        """
        self._check_id(block_id)
        count = self._ref_counts[block_id]
        if count == 0:
            raise CacheCorruption(f"double free: block {block_id} has no reference left")
        self._ref_counts[block_id] = count - 1
        if count == 1:
            self._free[block_id] = None
            if not matchable:
                self._free.move_to_end(block_id, last=False)

    def refresh(self, block_id: int) -> None:
        """Make a free block the most recently used; a referenced one is in no list and stays as it is."""
        self._check_id(block_id)
        if block_id in self._free:
            self._free.move_to_end(block_id)

    def check(self, references: Iterable[int]) -> None:
        """Recount from `references` (one block id per reference held anywhere); CacheCorruption on any difference."""
        counted = [0] * self.num_blocks
        for block_id in references:
            self._check_id(block_id)
            counted[block_id] += 1
        for block_id, (expected, actual) in enumerate(zip(counted, self._ref_counts, strict=True)):
            if expected != actual:
                raise CacheCorruption(f"block {block_id} counts {actual} references, its holders hold {expected}")
            if (actual == 0) != (block_id in self._free):
                raise CacheCorruption(f"block {block_id} has {actual} references and the free list disagrees")
        if len(self._free) != counted.count(0):
            raise CacheCorruption(f"the free list holds {len(self._free)} blocks, {counted.count(0)} are free")

    def _check_id(self, block_id: int) -> None:
        if not 0 <= block_id < len(self._ref_counts):
            raise CacheCorruption(f"stale block id {block_id}: the pool has blocks 0 .. {len(self._ref_counts) - 1}")
