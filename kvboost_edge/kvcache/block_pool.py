"""Reference counts of the blocks; a free block is one that nobody references, and the eviction
policy orders those.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from kvboost_edge.errors import CacheCorruption, CapacityError, ConfigError
from kvboost_edge.kvcache.eviction.policy import EvictionPolicy, LeastRecentlyUsed

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks 0 .. num_blocks-1, all free at first. Knows counts, nothing of content.

    policy: makes the order in which free blocks are handed out, from the ids of all blocks.
    """

    __slots__ = ("_free", "_held", "_ref_counts")

    def __init__(
        self, num_blocks: int, policy: Callable[[Iterable[int]], EvictionPolicy] = LeastRecentlyUsed
    ) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise ConfigError(f"num_blocks={num_blocks!r} must be an integer of at least 1")
        self._ref_counts = [0] * num_blocks
        self._free = policy(range(num_blocks))
        self._held: dict[int, None] = {}  # an ordered set

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
        return self._free.order()

    def held(self) -> Collection[int]:
        """Blocks that are pinned: they have a reference that no table explains."""
        return self._held.keys()

    def hold(self, block_id: int) -> None:
        """Pin a block: a reference that stays until `let_go`; CacheCorruption if it is pinned
        already.
        """
        if block_id in self._held:
            raise CacheCorruption(f"block {block_id} is pinned already")
        self.touch(block_id)
        self._held[block_id] = None

    def let_go(self, block_id: int, *, matchable: bool, owner: bytes = b"", again: int = 0) -> None:
        """Unpin a block; CacheCorruption if it is not pinned."""
        if block_id not in self._held:
            raise CacheCorruption(f"block {block_id} is not pinned")
        del self._held[block_id]
        self.release(block_id, matchable=matchable, owner=owner, again=again)

    def missed(self, *, once: int, again: int) -> None:
        """A prompt lacks so many blocks that were handed out: after one use, after more."""
        self._free.missed(once=once, again=again)

    def num_protected(self, owner: bytes) -> int:
        """Free blocks that the policy hands to this owner only when nothing else is left."""
        return self._free.protected(owner)

    def take(self, count: int, owner: bytes = b"") -> list[int]:
        """Hand out `count` free blocks with one reference each, those to be evicted first; all or
        nothing.

        Raises CapacityError when fewer are free. The caller forgets what the blocks held.
        """
        if count > len(self._free):
            raise CapacityError(
                f"{count} blocks needed, {len(self._free)} of {self.num_blocks} are free; "
                "enlarge max_cache_bytes or num_blocks"
            )
        taken = self._free.take(count, owner)
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def touch(self, block_id: int) -> None:
        """Add a reference; a free block leaves the free list."""
        self._check_id(block_id)
        if self._ref_counts[block_id] == 0:
            self._free.remove(block_id)
        self._ref_counts[block_id] += 1

    def release(
        self, block_id: int, *, matchable: bool, owner: bytes = b"", again: int = 0
    ) -> None:
        """Drop a reference; the last one frees the block, whose content may still be found if
        `matchable`, by `owner`, and was used `again`, see `CachedOrder`.

        Raises CacheCorruption for a block that has no reference (double free) or is not in the pool
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
        """Make a free block the most recently used; a referenced one is in no list and stays as it
        is.
        """
        self._check_id(block_id)
        if block_id in self._free:
            self._free.refresh(block_id)

    def regard(
        self, block_id: int, *, matchable: bool = True, owner: bytes = b"", again: int = 0
    ) -> None:
        """Count a free block as released just now, with these attributes; a referenced one is in no
        list and stays as it is.
        """
        self._check_id(block_id)
        if block_id in self._free:
            self._free.remove(block_id)
            self._free.put(block_id, matchable=matchable, owner=owner, again=again)

    def demote(self, block_id: int) -> None:
        """A block is retained no longer."""
        self._check_id(block_id)
        if block_id in self._free:
            self._free.demote(block_id)

    def check(self, references: Iterable[int]) -> None:
        """Recount from `references` (one block id for each that a table holds) and the pins;
        CacheCorruption on any difference.
        """
        counted = [0] * self.num_blocks
        for block_id in (*references, *self._held):
            self._check_id(block_id)
            counted[block_id] += 1
        for block_id, (expected, actual) in enumerate(zip(counted, self._ref_counts, strict=True)):
            if expected != actual:
                raise CacheCorruption(
                    f"block {block_id} counts {actual} references, its holders hold {expected}"
                )
            if (actual == 0) != (block_id in self._free):
                raise CacheCorruption(
                    f"block {block_id} has {actual} references and the free list disagrees"
                )
        if len(self._free) != counted.count(0):
            raise CacheCorruption(
                f"the free list holds {len(self._free)} blocks, {counted.count(0)} are free"
            )

    def _check_id(self, block_id: int) -> None:
        if not 0 <= block_id < len(self._ref_counts):
            raise CacheCorruption(
                f"stale block id {block_id}: the pool has blocks 0 .. {len(self._ref_counts) - 1}"
            )
