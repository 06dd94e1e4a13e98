"""The append-only list of blocks that holds one sequence's keys and values, and the copy operations on blocks."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BlockTable", "CopyOp", "PrefixEntry"]


class CopyOp(NamedTuple):
    """Copy the whole block `src` onto block `dst` (all layers) before the next forward pass."""

    src: int
    dst: int


class PrefixEntry(NamedTuple):
    """What makes a full block matchable.

    prefix_hash    chain hash of the block and all before it; equal hashes alone prove nothing
    tokens         the block's own tokens, little-endian u32; for the first block of a chain the root precedes them
    parent_serial  identity of the block before it (ROOT_SERIAL for the first)
    serial         identity of this prefix: counted up, never reused
    """

    prefix_hash: bytes
    tokens: bytes
    parent_serial: int
    serial: int


class BlockTable:
    """The blocks of one sequence, in order; made, changed and freed by a `KVCacheManager` alone.

    Example, block_size 16: a prompt of 40 tokens whose first 32 were cached opens as block_ids [7, 2],
    num_cached_tokens 32, num_computed_tokens 32. `extend(table, 40)` appends a block, [7, 2, 9]; slots 9*16 .. 9*16+7
    take tokens 32..39; `commit` with 40 computed tokens publishes nothing new, with 48 it publishes block 9.

    block_ids            ids of the blocks; grows at the end, an entry changes only by copy-on-write
    num_cached_tokens    tokens served by the cache when the table was opened
    num_computed_tokens  tokens whose KV is in the pool
    root                 32-byte root hash the chain starts from
    miss_reason          why the token after the cached ones was not served; see `Lookup.miss_reason`
    """

    __slots__ = (
        "_chain_hash",
        "_chain_serial",
        "_claims",
        "_num_chained",
        "_publishes",
        "_serial",
        "_twins",
        "_uncounted_misses",
        "_withdrawn",
        "block_ids",
        "miss_reason",
        "num_cached_tokens",
        "num_computed_tokens",
        "root",
    )

    def __init__(self, serial: int, root: bytes) -> None:
        self.block_ids: list[int] = []
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self.root = root
        self.miss_reason = "bypassed"
        self._serial = serial
        # The chain so far: how many full blocks it covers, the hash and the identity of the last of them.
        self._num_chained = 0
        self._chain_hash = root
        self._chain_serial = 0
        self._publishes = True
        # tokens the lookup left to compute, until the first extend counts the lookup (at least one is always left)
        self._uncounted_misses = 0
        # block index -> prefix hash this table promised to compute (single flight)
        self._claims: dict[int, bytes] = {}
        # block index -> (block id, entry serial) of the published equal of a block this table holds privately
        self._twins: dict[int, tuple[int, int]] = {}
        # block index -> entry taken out of the index while this table, its only holder, rewrites the block
        self._withdrawn: dict[int, PrefixEntry] = {}

    def __len__(self) -> int:
        return len(self.block_ids)

    def __repr__(self) -> str:
        return (
            f"BlockTable(block_ids={self.block_ids}, num_cached_tokens={self.num_cached_tokens}, "
            f"num_computed_tokens={self.num_computed_tokens})"
        )
