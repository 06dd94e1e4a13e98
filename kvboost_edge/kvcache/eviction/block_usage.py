"""What the manager knows of how blocks were used: what came again tells the eviction policy what is
worth keeping.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvboost_edge.kvcache.eviction.order import RETAINED

__all__ = ["Uses"]


class Uses:
    """Three facts of each block, from when it is handed out until it is handed out again.

    A block was used again once a prompt found it in the cache. So were, from the beginning, the
    blocks of a chain that goes on where a published one ended: that is the next turn of a
    conversation. A chain that branches off inside another one, or shares nothing, is new: most of
    those that read one document each under a common head are.

    Attributes:
        again: 1 for each block that was used again.
        retained: blocks that are to outlive the others of their owner, and until when, by the
            caller's clock. With a block all before it in its chain are retained, at least as long.
    """

    __slots__ = ("_followed", "again", "retained")

    def __init__(self, num_blocks: int) -> None:
        self.again = bytearray(num_blocks)
        self.retained: dict[int, float] = {}
        self._followed = bytearray(num_blocks)  # a block after it was published

    def rank(self, block_id: int) -> int:
        """What the block is for the eviction policy: used ONCE, AGAIN, or RETAINED."""
        return RETAINED if block_id in self.retained else self.again[block_id]

    def matched(self, block_ids: Sequence[int]) -> bool:
        """A prompt found these blocks, a chain from its head; whether it found the chain's end."""
        self.mark(block_ids)
        return bool(block_ids) and not self._followed[block_ids[-1]]

    def follow(self, block_ids: Sequence[int]) -> None:
        """Blocks after these were published."""
        for block_id in block_ids:
            self._followed[block_id] = 1

    def mark(self, block_ids: Sequence[int]) -> None:
        """These blocks count as used again."""
        again = self.again
        for block_id in block_ids:
            again[block_id] = 1

    def forget(self, block_ids: Sequence[int]) -> None:
        """Blocks are handed out for other content."""
        again = self.again
        followed = self._followed
        for block_id in block_ids:
            again[block_id] = followed[block_id] = 0
        if self.retained:
            for block_id in block_ids:
                self.retained.pop(block_id, None)
