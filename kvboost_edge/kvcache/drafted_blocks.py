"""Record of the blocks that have KV of a drafter, in a pool of its own with the same block ids."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

from kvboost_edge.kvcache.block_table import CopyOp
from kvboost_edge.kvcache.hashing import BlockAddress

__all__ = ["DraftedBlocks"]


class DraftedBlocks:
    """Number of tokens of each block that have KV of the drafter, and logs for the offload tiers.

    The engine has at most one drafter with KV. A block that gets other tokens starts without KV of
    the drafter. The logs stay empty until `track` is called. The caller of `track` must drain them.

    Attributes:
        filled: number of leading tokens of each block that have KV of the drafter. Use the methods
            to change it.
        arriving: addresses of the blocks whose KV of the drafter is being loaded from a tier, by
            block id. The drafter waits for them.
        block_size: tokens per block.
        copy_kv: function that copies KV of the drafter between blocks of its pool at once.
        copies_full: whether only full blocks can be copied, because the pool is quantized.
        is_on: False after `stop`.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.filled = [0] * num_blocks
        self.arriving: dict[int, BlockAddress] = {}
        self.block_size = block_size
        self.copy_kv: Callable[[Sequence[CopyOp]], None] = lambda copies: None
        self.copies_full = False
        self.is_on = True
        self._digest: bytes | None = None
        # Blocks that became full, and full blocks that were evicted, since the last drain. The
        # dicts are used as ordered sets.
        self._full: dict[int, None] = {}
        self._evicted: dict[int, None] = {}

    def track(self, digest: bytes) -> None:
        """Start logging.

        Args:
            digest: 32-byte digest of everything that affects the drafter's KV.
        """
        self._digest = digest

    def stop(self) -> None:
        """Record that no block has KV of the drafter, now and later, because the drafter failed."""
        self.is_on = False
        self.filled = [0] * len(self.filled)
        self.arriving.clear()
        self._full.clear()

    def is_full(self, block_id: int) -> bool:
        """Return whether all tokens of a block have KV of the drafter."""
        return self.filled[block_id] == self.block_size

    def fill(self, block_id: int, num_tokens: int) -> None:
        """Record that the first `num_tokens` tokens of a block have KV of the drafter."""
        if self.is_on and num_tokens > self.filled[block_id]:
            self.filled[block_id] = num_tokens
            if self._digest is not None and num_tokens == self.block_size:
                self._full[block_id] = None

    def drop(self, block_id: int) -> None:
        """Record that no token of a block has KV of the drafter until more is filled or arrives."""
        self.filled[block_id] = 0

    def empty(self, block_id: int) -> None:
        """Record that no token of a block has KV of the drafter, and that none is arriving."""
        self.drop(block_id)
        self.arriving.pop(block_id, None)

    def copy(self, source: int, target: int) -> None:
        """Record that a block becomes a copy of another one."""
        self.filled[target] = self.filled[source]

    def merge(self, source: int, target: int) -> None:
        """Copy KV of the drafter to a block of the same tokens, if that has less of it."""
        if self.copies_full and not self.is_full(source):
            return
        # The source may be freed and overwritten before the next step, so the copy cannot wait.
        if self.filled[source] > self.filled[target]:
            self.copy_kv([CopyOp(source, target)])
            self.fill(target, self.filled[source])

    def note_evicted(self, block_id: int) -> None:
        """Log that a published block is evicted, if it is full. Call it before `empty`."""
        if self._digest is not None and self.is_full(block_id):
            self._evicted[block_id] = None

    def drain_full(self) -> list[int]:
        """Return the blocks that became full since the last call, published or not."""
        full = list(self._full)
        self._full.clear()
        return full

    def drain_evicted(self) -> list[int]:
        """Return the blocks that were evicted since the last call and were full."""
        evicted = list(self._evicted)
        self._evicted.clear()
        return evicted

    def address(self, block: BlockAddress) -> BlockAddress:
        """Return the address under which tiers store a block's KV of the drafter.

        It depends on the block and the drafter's digest. `track` must have been called.
        """
        # The block is the parent, so a tier evicts its KV of the drafter before the block.
        return BlockAddress(self._hash(block.prefix_hash), block.prefix_hash, block.tokens)

    def hashes(self, block_ids: Sequence[int], prefix_hashes: Sequence[bytes]) -> list[bytes]:
        """Return the hashes under which tiers store the drafter's KV of full blocks.

        Args:
            block_ids: blocks of a table.
            prefix_hashes: prefix hashes of the first of them.
        """
        if self._digest is None:
            return []
        return [
            self._hash(prefix_hash)
            for block_id, prefix_hash in zip(block_ids, prefix_hashes, strict=False)
            if self.is_full(block_id)
        ]

    def _hash(self, prefix_hash: bytes) -> bytes:
        assert self._digest is not None
        # No block has this hash, because the hashed data has another length than a block's.
        return hashlib.sha256(b"kvboost-edge draft 1\n" + self._digest + prefix_hash).digest()

    def awaits(self, block_ids: Iterable[int]) -> bool:
        """Return whether KV of the drafter is being loaded for one of these blocks."""
        return bool(self.arriving) and not self.arriving.keys().isdisjoint(block_ids)
