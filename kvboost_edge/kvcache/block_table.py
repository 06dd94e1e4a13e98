"""Block table of a sequence, with its segments, spans and pending copies."""

from __future__ import annotations

import bisect
from operator import attrgetter
from typing import NamedTuple

from kvboost_edge.kvcache.hashing import BlockAddress

__all__ = ["WHOLE", "BlockTable", "CopyOp", "PrefixEntry", "Span", "TableEntry", "TableSegment"]

_VALID_FROM = attrgetter("valid_from")


class CopyOp(NamedTuple):
    """Copy of block `src` to block `dst` in all layers, due before the next forward pass."""

    src: int
    dst: int


class PrefixEntry(NamedTuple):
    """Entry of a full block in the prefix index.

    The index identifies a block by `prefix_hash`, `tokens` and `parent_serial`. The other fields
    are for offload tiers and non-prefix reuse.

    Attributes:
        prefix_hash: chain hash of this block and all blocks before it. Matches are confirmed by
            comparing the other two fields.
        tokens: the block's own tokens as little-endian u32. The first block of a chain has the root
            prepended.
        parent_serial: `serial` of the previous block, or `ROOT_SERIAL` for the first block.
        serial: unique number of this prefix. Serials increase and are never reused.
        parent_hash: chain hash of the previous block.
        root: root of the prompts that may share the block at other positions. See `LoneRoot`.
        depth: number of blocks before this one in the chain.
    """

    prefix_hash: bytes
    tokens: bytes
    parent_serial: int
    serial: int
    parent_hash: bytes = b""
    root: bytes = b""
    depth: int = 0

    @property
    def own_tokens(self) -> bytes:
        """The block's tokens without a root."""
        return self.tokens if self.parent_serial else self.tokens[len(self.parent_hash) :]

    @property
    def address(self) -> BlockAddress:
        """Content address of the block."""
        return BlockAddress(self.prefix_hash, self.parent_hash, self.own_tokens)


class TableEntry(NamedTuple):
    """One block of a table, as seen by attention. Positions are those of the table's sequence.

    Attributes:
        block_id: the block that holds the KV.
        first_position: position of the block's slot 0.
        valid_from: first position that the block serves.
        valid_to: end of the served positions, exclusive. Slots outside the served range must not be
            read.
        delta: distance from the positions at which the keys were computed. 0 means that the KV is
            exact.
    """

    block_id: int
    first_position: int
    valid_from: int
    valid_to: int
    delta: int


class TableSegment(NamedTuple):
    """Run of blocks in a table that hold consecutive positions.

    A segment serves the positions from its `valid_from` up to the `valid_from` of the next segment.
    The last segment serves all remaining positions.

    Attributes:
        first_index: index of the segment's first block in the table.
        first_position: position of slot 0 of that block, at most `valid_from`.
        valid_from: first position that the segment serves.
        delta: see `TableEntry`.
    """

    first_index: int
    first_position: int
    valid_from: int
    delta: int


class Span(NamedTuple):
    """Blocks computed in another context that serve positions [start, stop) of a table.

    Attributes:
        block_ids: consecutive blocks of one chain.
        first_position: position of slot 0 of the first block, at most `start`. It is negative if
            the block holds more tokens before the span than the prompt does.
        start: first position that the span serves.
        stop: end of the served positions, exclusive.
        delta: `start` minus the position at which its token was computed.
    """

    block_ids: tuple[int, ...]
    first_position: int
    start: int
    stop: int
    delta: int


WHOLE = TableSegment(0, 0, 0, 0)
"""Segment that covers a whole table without gaps, starting at position 0."""


class BlockTable:
    """Blocks of one sequence, in order. Only a `KVCacheManager` creates, changes and frees tables.

    Layout of a table:

        0            num_cached_tokens         num_computed_tokens             end
        |   shared    |        computed here         |        reserved         |
        | matched in  | own blocks, each             | own blocks, empty,      |
        | the index   | published once it is full    | added by `extend`       |
        [ block_ids[0], block_ids[1], ...                                      ]
        |-- chained: the first `_num_hashed` blocks --|

    `free` releases the blocks in reverse order. Published blocks stay matchable until they are
    evicted. A shared block is copied before it is written. This happens to the tail of a forked
    table, and to the last block of a fully cached prompt.

    Example with block_size 16: a prompt has 40 tokens, and 32 of them are cached. Its table opens
    with block_ids [7, 2], num_cached_tokens 32 and num_computed_tokens 32. `extend(table, 40)`
    appends block 9, and tokens 32 to 39 go to slots 9*16 to 9*16+7. `commit` with 40 computed
    tokens publishes nothing new. `commit` with 48 publishes block 9.

    Attributes:
        block_ids: ids of the blocks, in order. An id changes on copy-on-write, or when an equal
            published block replaces its block (`DuplicateBlocks`).
        segments: mapping of positions to blocks. It is `[WHOLE]` unless the table has spans.
        num_cached_tokens: tokens that the cache served when the table was opened.
        num_matched_tokens: tokens whose KV was cached when the table was opened. This exceeds
            num_cached_tokens if no snapshot of recurrent state was kept at the end of the match.
        num_computed_tokens: tokens whose KV is in the pool.
        root: 32-byte root hash of the chain.
        spans: KV reused from other positions, in order.
        reserve: blocks set aside for span tokens that will be recomputed. They are in no segment
            yet.
        owner: tenant that owns the blocks, for the eviction policy.
        miss_reason: why the first uncached token was not served. See `Lookup.miss_reason`.
        missed_hash: prefix hash of the full block with the first uncached token. None if that block
            is not full, or if no lookup was made.
    """

    __slots__ = (
        "_chain_hash",
        "_chain_serial",
        "_claims",
        "_counts_spans",
        "_duplicates",
        "_extends_chain",
        "_num_hashed",
        "_publishes",
        "_serial",
        "_shares",
        "_uncounted_misses",
        "_withdrawn",
        "block_ids",
        "miss_reason",
        "missed_hash",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_matched_tokens",
        "owner",
        "reserve",
        "root",
        "segments",
        "spans",
    )

    def __init__(
        self,
        serial: int,
        root: bytes,
        owner: bytes = b"",
        *,
        again: bool = False,
        shares: bool = True,
        publishes: bool = True,
    ) -> None:
        self.block_ids: list[int] = []
        self.segments: list[TableSegment] = [WHOLE]
        self.spans: tuple[Span, ...] = ()
        self.reserve: list[int] = []
        self.num_cached_tokens = self.num_matched_tokens = 0
        self.num_computed_tokens = 0
        self.root = root
        self.owner = owner
        self.miss_reason = "bypassed"
        self.missed_hash: bytes | None = None
        self._serial = serial
        # The published chain: the number of its blocks, and the hash and serial of the last one.
        self._num_hashed = 0
        self._chain_hash = root
        self._chain_serial = 0
        self._publishes = publishes
        # If False, the table bypasses the cache and reads only KV that it computed itself.
        self._shares = shares
        # Whether new blocks count as used again. True if the prompt extends a published chain (see
        # `Uses`) or if the caller asked for it.
        self._extends_chain = again
        # Missed tokens of the lookup, which the first `extend` adds to the counters.
        self._uncounted_misses = 0
        # Whether spans count as reused tokens. False after a preemption, because they were counted
        # before.
        self._counts_spans = False
        # Block index -> prefix hash that this table has claimed (single flight).
        self._claims: dict[int, bytes] = {}
        # Index of a private block -> the published block with equal content, and its entry. See
        # `DuplicateBlocks`.
        self._duplicates: dict[int, tuple[int, PrefixEntry]] = {}
        # Block index -> entry that was removed from the prefix index while this table rewrites the
        # block.
        self._withdrawn: dict[int, PrefixEntry] = {}

    def __len__(self) -> int:
        return len(self.block_ids)

    def segment_of(self, position: int) -> TableSegment:
        """Return the segment that serves a position, even if its block is not allocated yet."""
        segments = self.segments
        if len(segments) == 1:
            return segments[0]
        return segments[bisect.bisect_right(segments, position, key=_VALID_FROM) - 1]

    def index_of(self, position: int, block_size: int) -> int:
        """Return the index of the block that serves a position.

        The result is `len(table)` or more if the block is not allocated yet.
        """
        segment = self.segment_of(position)
        return segment.first_index + (position - segment.first_position) // block_size

    def num_slots(self, block_size: int) -> int:
        """Return the number of positions for which the table has allocated blocks."""
        last = self.segments[-1]
        return last.first_position + (len(self.block_ids) - last.first_index) * block_size

    def slots(self, start: int, stop: int, block_size: int) -> list[int]:
        """Return the slots of positions start to stop - 1. All of them must be allocated."""
        size = block_size
        ids = self.block_ids
        if len(self.segments) == 1:
            return [
                ids[position // size] * size + position % size for position in range(start, stop)
            ]
        found: list[int] = []
        while start < stop:
            segment = self.segment_of(start)
            following = [other.valid_from for other in self.segments if other.valid_from > start]
            end = min([stop, *following])
            places = range(start - segment.first_position, end - segment.first_position)
            found += [
                ids[segment.first_index + place // size] * size + place % size for place in places
            ]
            start = end
        return found

    def num_full_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return how many leading blocks the first `num_tokens` tokens fill completely.

        Blocks from the first span on are excluded, because their KV does not depend on the prefix
        alone.
        """
        whole = (
            num_tokens if len(self.segments) == 1 else min(num_tokens, self.segments[1].valid_from)
        )
        return whole // block_size

    def entries(self, block_size: int, first_index: int = 0) -> list[TableEntry]:
        """Return the blocks from `first_index` on with the positions that they serve."""
        stops = [segment.valid_from for segment in self.segments[1:]] + [self.num_slots(block_size)]
        ends = [segment.first_index for segment in self.segments[1:]] + [len(self.block_ids)]
        found: list[TableEntry] = []
        for segment, stop, end in zip(self.segments, stops, ends, strict=True):
            for index in range(max(segment.first_index, first_index), end):
                first = segment.first_position + (index - segment.first_index) * block_size
                valid = max(first, segment.valid_from), min(first + block_size, stop)
                found.append(TableEntry(self.block_ids[index], first, *valid, segment.delta))
        return found

    def __repr__(self) -> str:
        return (
            f"BlockTable(block_ids={self.block_ids}, num_cached_tokens={self.num_cached_tokens}, "
            f"num_computed_tokens={self.num_computed_tokens})"
        )
