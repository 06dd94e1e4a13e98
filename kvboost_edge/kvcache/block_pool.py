"""Reference counts of the blocks in a pool.

A block without references is free. The eviction policy orders the free blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from kvboost_edge.errors import CacheCorruption, CapacityError, ConfigError
from kvboost_edge.kvcache.eviction.policy import EvictionPolicy, LeastRecentlyUsed

__all__ = ["BlockPool"]


class BlockPool:
    """Pool of blocks with ids 0 to num_blocks - 1, all free at first.

    The pool counts references and does not know what the blocks contain.

    Args:
        num_blocks: number of blocks in the pool.
        policy: factory that builds the eviction policy from the ids of all blocks.
    """

    __slots__ = ("_free", "_held", "_ref_counts")

    def __init__(
        self, num_blocks: int, policy: Callable[[Iterable[int]], EvictionPolicy] = LeastRecentlyUsed
    ) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise ConfigError(f"num_blocks={num_blocks!r} must be an integer of at least 1")
        self._ref_counts = [0] * num_blocks
        self._free = policy(range(num_blocks))
        self._held: dict[int, None] = {}  # used as an ordered set

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Number of blocks without references, including cached ones."""
        return len(self._free)

    def ref_count(self, block_id: int) -> int:
        """Return the number of references on a block; raise CacheCorruption for an unknown id."""
        self._check_id(block_id)
        return self._ref_counts[block_id]

    def ref_counts(self) -> list[int]:
        """Return a copy of all reference counts, by block id."""
        return self._ref_counts.copy()

    def free_ids(self) -> list[int]:
        """Return the free blocks in eviction order."""
        return self._free.order()

    def held(self) -> Collection[int]:
        """Return the pinned blocks. Each pinned block has one reference held by the pool itself."""
        return self._held.keys()

    def hold(self, block_id: int) -> None:
        """Pin a block until `let_go`; raise CacheCorruption if it is already pinned."""
        if block_id in self._held:
            raise CacheCorruption(f"block {block_id} is already pinned")
        self.touch(block_id)
        self._held[block_id] = None

    def let_go(self, block_id: int, *, matchable: bool, owner: bytes = b"", again: int = 0) -> None:
        """Unpin a block; raise CacheCorruption if it is not pinned."""
        if block_id not in self._held:
            raise CacheCorruption(f"block {block_id} is not pinned")
        del self._held[block_id]
        self.release(block_id, matchable=matchable, owner=owner, again=again)

    def missed(self, *, once: int, again: int) -> None:
        """Tell the eviction policy how many blocks of a prompt had been evicted.

        Args:
            once: number of missing blocks that were evicted after a single use.
            again: number of missing blocks that were evicted after repeated use.
        """
        self._free.missed(once=once, again=again)

    def num_protected(self, owner: bytes) -> int:
        """Return how many free blocks are protected for owners other than this one."""
        return self._free.protected(owner)

    def take(self, count: int, owner: bytes = b"") -> list[int]:
        """Allocate `count` free blocks in eviction order, with one reference each.

        The caller must remove the old content of these blocks from the prefix index.

        Raises:
            CapacityError: fewer than `count` blocks are free. No block is allocated.
        """
        if count > len(self._free):
            raise CapacityError(
                f"{count} blocks are needed, but only {len(self._free)} of {self.num_blocks} are "
                "free; enlarge max_cache_bytes or num_blocks"
            )
        taken = self._free.take(count, owner)
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def touch(self, block_id: int) -> None:
        """Add a reference to a block, and remove the block from the free list if it was free."""
        self._check_id(block_id)
        if self._ref_counts[block_id] == 0:
            self._free.remove(block_id)
        self._ref_counts[block_id] += 1

    def release(
        self, block_id: int, *, matchable: bool, owner: bytes = b"", again: int = 0
    ) -> None:
        """Drop a reference to a block, and free the block if that was the last one.

        Args:
            block_id: the block.
            matchable: whether the block is still in the prefix index.
            owner: tenant whose prompts can match the block.
            again: usage rank of the block, which is ONCE, AGAIN or RETAINED. See `CachedOrder`.

        Raises:
            CacheCorruption: the block has no reference (double free), or the id is outside the pool
                (stale id).
        """
        self._check_id(block_id)
        count = self._ref_counts[block_id]
        if count == 0:
            raise CacheCorruption(f"double free: block {block_id} has no reference left")
        self._ref_counts[block_id] = count - 1
        if count == 1:
            self._free.put(block_id, matchable=matchable, owner=owner, again=again)

    def refresh(self, block_id: int) -> None:
        """Mark a free block as most recently used. Does nothing to a referenced block."""
        self._check_id(block_id)
        if block_id in self._free:
            self._free.refresh(block_id)

    def regard(
        self, block_id: int, *, matchable: bool = True, owner: bytes = b"", again: int = 0
    ) -> None:
        """Re-insert a free block into the eviction order as if it were released now.

        Does nothing to a referenced block. See `release` for the arguments.
        """
        self._check_id(block_id)
        if block_id in self._free:
            self._free.remove(block_id)
            self._free.put(block_id, matchable=matchable, owner=owner, again=again)

    def demote(self, block_id: int) -> None:
        """End the retention of a free block. Does nothing to a referenced block."""
        self._check_id(block_id)
        if block_id in self._free:
            self._free.demote(block_id)

    def check(self, references: Iterable[int]) -> None:
        """Recount all references and raise CacheCorruption if any count is wrong.

        Args:
            references: one block id for each reference that a table holds, excluding pins.
        """
        counted = [0] * self.num_blocks
        for block_id in (*references, *self._held):
            self._check_id(block_id)
            counted[block_id] += 1
        for block_id, (expected, actual) in enumerate(zip(counted, self._ref_counts, strict=True)):
            if expected != actual:
                raise CacheCorruption(
                    f"block {block_id} has reference count {actual}, but {expected} references "
                    "were found"
                )
            if (actual == 0) != (block_id in self._free):
                raise CacheCorruption(
                    f"block {block_id} has {actual} references, which contradicts the free list"
                )
        if len(self._free) != counted.count(0):
            raise CacheCorruption(
                f"the free list has {len(self._free)} blocks, but {counted.count(0)} have no "
                "references"
            )

    def _check_id(self, block_id: int) -> None:
        if not 0 <= block_id < len(self._ref_counts):
            raise CacheCorruption(
                f"stale block id {block_id}: the pool has blocks 0 .. {len(self._ref_counts) - 1}"
            )
