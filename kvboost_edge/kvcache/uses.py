"""What the manager knows of how blocks were used: what came again tells the eviction policy what is worth keeping."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Uses"]


class Uses:
    """Two facts of each block, from when it is handed out until it is handed out again.

    A block was used again once a prompt found it in the cache. So were, from the beginning, the blocks of a chain that
    goes on where a published one ended: that is the next turn of a conversation. A chain that branches off inside
    another one, or shares nothing, is new: most of those that read one document each under a common head are.

    again   1 for each block that was used again
    """

    __slots__ = ("_followed", "again")

    def __init__(self, num_blocks: int) -> None:
        self.again = bytearray(num_blocks)
        self._followed = bytearray(num_blocks)  # a block after it was published

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
        again, followed = self.again, self._followed
        for block_id in block_ids:
            again[block_id] = followed[block_id] = 0
