"""Usage tracking of blocks, which tells the eviction policy which ones are worth keeping."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost_edge.kvcache.eviction.order import RETAINED

__all__ = ["Uses"]


class Uses:
    """Usage of each block since it was last allocated.

    A block counts as used again once a prompt matches it. If a prompt extends a whole published
    chain, its new blocks count as used again from the start, because it is probably the next turn
    of a conversation. The blocks of other prompts start as used once. Most of those are single
    documents after a common system prompt.

    Attributes:
        again: 1 for each block that was used again, else 0.
        retained: block -> time until which it is retained, by the caller's clock. Earlier blocks of
            the same chain are retained at least as long.
    """

    __slots__ = ("_followed", "again", "retained")

    def __init__(self, num_blocks: int) -> None:
        self.again = bytearray(num_blocks)
        self.retained: dict[int, float] = {}
        self._followed = bytearray(num_blocks)  # 1 if a later block of the chain was published

    def rank(self, block_id: int) -> int:
        """Return the block's rank in the eviction order: ONCE, AGAIN or RETAINED."""
        return RETAINED if block_id in self.retained else self.again[block_id]

    def matched(self, block_ids: Sequence[int]) -> bool:
        """Mark matched blocks as used again, and return whether the last one ends its chain."""
        self.mark(block_ids)
        return bool(block_ids) and not self._followed[block_ids[-1]]

    def follow(self, block_ids: Sequence[int]) -> None:
        """Record that each of these blocks is followed by another published block."""
        for block_id in block_ids:
            self._followed[block_id] = 1

    def mark(self, block_ids: Sequence[int]) -> None:
        """Mark blocks as used again."""
        again = self.again
        for block_id in block_ids:
            again[block_id] = 1

    def forget(self, block_ids: Sequence[int]) -> None:
        """Reset the usage of blocks that are allocated for new content."""
        again = self.again
        followed = self._followed
        for block_id in block_ids:
            again[block_id] = followed[block_id] = 0
        if self.retained:
            for block_id in block_ids:
                self.retained.pop(block_id, None)
