"""Usage of blocks, from which the eviction policy learns which blocks are worth keeping."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost_edge.kvcache.eviction.order import RETAINED

__all__ = ["Uses"]


class Uses:
    """Usage of each block, from the time it is handed out until it is handed out again.

    A block counts as used again once a prompt has matched it. The blocks of a chain that continues
    at the end of a published chain count from the start: this is the next turn of a conversation. A
    chain that branches off inside another chain, or shares nothing, is new. Most such chains are
    single documents under a common system prompt.

    Attributes:
        again: 1 for each block that was used again.
        retained: block -> time until which it is evicted after its owner's other blocks, by the
            caller's clock. All blocks before it in its chain are retained at least as long.
    """

    __slots__ = ("_followed", "again", "retained")

    def __init__(self, num_blocks: int) -> None:
        self.again = bytearray(num_blocks)
        self.retained: dict[int, float] = {}
        self._followed = bytearray(num_blocks)  # 1: a block after it in the chain was published

    def rank(self, block_id: int) -> int:
        """Return the block's rank in the eviction order: ONCE, AGAIN or RETAINED."""
        return RETAINED if block_id in self.retained else self.again[block_id]

    def matched(self, block_ids: Sequence[int]) -> bool:
        """Mark matched blocks as used again; return whether the match reached the chain's end."""
        self.mark(block_ids)
        return bool(block_ids) and not self._followed[block_ids[-1]]

    def follow(self, block_ids: Sequence[int]) -> None:
        """Record that blocks after these were published."""
        for block_id in block_ids:
            self._followed[block_id] = 1

    def mark(self, block_ids: Sequence[int]) -> None:
        """Mark blocks as used again."""
        again = self.again
        for block_id in block_ids:
            again[block_id] = 1

    def forget(self, block_ids: Sequence[int]) -> None:
        """Forget the usage of blocks that are handed out for other content."""
        again = self.again
        followed = self._followed
        for block_id in block_ids:
            again[block_id] = followed[block_id] = 0
        if self.retained:
            for block_id in block_ids:
                self.retained.pop(block_id, None)
