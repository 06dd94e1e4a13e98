"""Block table of a sequence, the segments and spans that it consists of, and copy operations."""

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
    """Identity of a full block in the prefix index.

    The index compares `prefix_hash`, `tokens` and `parent_serial`. The other fields serve code that
    stores blocks elsewhere or finds them by other means.

    Attributes:
        prefix_hash: chain hash of the block and all blocks before it. Equal hashes alone prove
            nothing.
        tokens: the block's own tokens, little-endian u32, preceded by the root in the first block
            of a chain.
        parent_serial: `serial` of the block before it, `ROOT_SERIAL` for the first block.
        serial: number of this prefix, increasing and never reused.
        parent_hash: chain hash of the block before it.
        root: root whose prompts may share the block at other positions, see `LoneRoot`.
        depth: number of blocks before it in its chain.
    """

    prefix_hash: bytes
    tokens: bytes
    parent_serial: int
    serial: int
    parent_hash: bytes = b""
    root: bytes = b""
    depth: int = 0

    @property
    def address(self) -> BlockAddress:
        """Address of the block. Its tokens do not include the root."""
        tokens = self.tokens if self.parent_serial else self.tokens[len(self.parent_hash) :]
        return BlockAddress(self.prefix_hash, self.parent_hash, tokens)


class TableEntry(NamedTuple):
    """One block of a table, as attention may use it. Positions belong to the table's sequence.

    Attributes:
        block_id: the block that holds the KV.
        first_position: position of its slot 0.
        valid_from: first position that it serves.
        valid_to: end of the served positions, exclusive. Its other slots must not be read.
        delta: distance between these positions and those at which the keys were computed; 0 if
            exact.
    """

    block_id: int
    first_position: int
    valid_from: int
    valid_to: int
    delta: int


class TableSegment(NamedTuple):
    """Run of blocks in a table that hold consecutive positions.

    A segment serves all positions from `valid_from` to that of the next segment. The last segment
    serves all positions to the end.

    Attributes:
        first_index: index of its first block in the table.
        first_position: position of that block's slot 0, at most `valid_from`.
        valid_from: first position that it serves.
        delta: see `TableEntry`.
    """

    first_index: int
    first_position: int
    valid_from: int
    delta: int


class Span(NamedTuple):
    """Blocks of another context that serve positions [start, stop) of a table.

    Attributes:
        block_ids: consecutive blocks of one chain.
        first_position: position of slot 0 of the first block, at most `start`. Negative if the
            block has more tokens before the span than the prompt has.
        start: first position that the span serves.
        stop: end of the served positions, exclusive.
        delta: `start` minus the position at which that token was computed.
    """

    block_ids: tuple[int, ...]
    first_position: int
    start: int
    stop: int
    delta: int


WHOLE = TableSegment(0, 0, 0, 0)
"""Only segment of a table whose blocks hold its tokens from position 0 without a gap."""


class BlockTable:
    """Blocks of one sequence, in order. Only a `KVCacheManager` creates, changes and frees tables.

    Layout of a table:

        0            num_cached_tokens         num_computed_tokens             end
        |   shared    |        computed here         |        reserved         |
        | matched in  | own blocks, each             | own blocks, empty,      |
        | the index   | published once it is full    | added by `extend`       |
        [ block_ids[0], block_ids[1], ...                                      ]
        |-- chained: the first `_num_hashed` blocks --|

    `free` releases all blocks, last one first. Published blocks stay matchable until they are
    evicted. A shared block is copied before it is written. This affects the tail of a forked table,
    and the last block of a prompt that is cached to its end.

    Example with block_size 16: a prompt of 40 tokens, of which 32 are cached, opens with block_ids
    [7, 2], num_cached_tokens 32 and num_computed_tokens 32. `extend(table, 40)` appends block 9;
    slots 9*16 to 9*16+7 take tokens 32 to 39. `commit` with 40 computed tokens publishes nothing
    new. With 48 it publishes block 9.

    Attributes:
        block_ids: ids of the blocks, in order. The list grows at its end. An entry changes by
            copy-on-write, or when an equal block replaces it (`DuplicateBlocks`).
        segments: positions that the blocks hold; `[WHOLE]` unless a segment begins inside a block.
        num_cached_tokens: tokens that the cache served when the table was opened.
        num_matched_tokens: tokens whose KV was cached then. Exceeds num_cached_tokens if a snapshot
            of the recurrent state was missing.
        num_computed_tokens: tokens whose KV is in the pool.
        root: 32-byte root hash of the chain.
        spans: KV reused from other positions, in order.
        reserve: own blocks that are in no segment yet, for span tokens that are recomputed.
        owner: tenant of the blocks, for the eviction policy.
        miss_reason: reason why the token after the cached ones was not served, see
            `Lookup.miss_reason`.
        missed_hash: prefix hash of the full block with that token. None if that block is not full,
            or if no lookup was made.
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
        # The published chain: its number of full blocks, and the hash and serial of the last one.
        self._num_hashed = 0
        self._chain_hash = root
        self._chain_serial = 0
        self._publishes = publishes
        # False: the table bypasses the cache and reads only KV that it computed itself.
        self._shares = shares
        # Whether its blocks count as used again: it matched a published chain to the end (see
        # `Uses`), or the caller asked for it.
        self._extends_chain = again
        # Misses of the lookup, at least one, until the first `extend` adds them to the counters.
        self._uncounted_misses = 0
        # Whether its spans count as reused tokens. False after a preemption: they counted before.
        self._counts_spans = False
        # Block index -> prefix hash that this table has claimed to compute (single flight).
        self._claims: dict[int, bytes] = {}
        # Index of a private block -> the published block of equal content, and its entry, see
        # `DuplicateBlocks`.
        self._duplicates: dict[int, tuple[int, PrefixEntry]] = {}
        # Block index -> entry that is out of the index while this table, its only holder, rewrites
        # the block.
        self._withdrawn: dict[int, PrefixEntry] = {}

    def __len__(self) -> int:
        return len(self.block_ids)

    def segment_of(self, position: int) -> TableSegment:
        """Return the segment that serves a position, or will serve it once the table has grown."""
        segments = self.segments
        if len(segments) == 1:
            return segments[0]
        return segments[bisect.bisect_right(segments, position, key=_VALID_FROM) - 1]

    def index_of(self, position: int, block_size: int) -> int:
        """Return the index of the block for a position, `len(table)` or more if it has no block."""
        segment = self.segment_of(position)
        return segment.first_index + (position - segment.first_position) // block_size

    def num_slots(self, block_size: int) -> int:
        """Return the number of positions that the blocks have room for."""
        last = self.segments[-1]
        return last.first_position + (len(self.block_ids) - last.first_index) * block_size

    def slots(self, start: int, stop: int, block_size: int) -> list[int]:
        """Return the slots of positions start to stop - 1, all of which must be allocated."""
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
        """Return the number of leading blocks that `num_tokens` tokens fill.

        Blocks from the first reused span on are excluded: their content depends on more than their
        tokens.
        """
        whole = (
            num_tokens if len(self.segments) == 1 else min(num_tokens, self.segments[1].valid_from)
        )
        return whole // block_size

    def num_unchained_tokens(self, block_size: int) -> int:
        """Return the number of computed tokens after those full blocks."""
        return (
            self.num_computed_tokens
            - self.num_full_blocks(self.num_computed_tokens, block_size) * block_size
        )

    def entries(self, block_size: int) -> list[TableEntry]:
        """Return every block with the positions that it serves."""
        stops = [segment.valid_from for segment in self.segments[1:]] + [self.num_slots(block_size)]
        ends = [segment.first_index for segment in self.segments[1:]] + [len(self.block_ids)]
        found: list[TableEntry] = []
        for segment, stop, end in zip(self.segments, stops, ends, strict=True):
            for index in range(segment.first_index, end):
                first = segment.first_position + (index - segment.first_index) * block_size
                valid = max(first, segment.valid_from), min(first + block_size, stop)
                found.append(TableEntry(self.block_ids[index], first, *valid, segment.delta))
        return found

    def __repr__(self) -> str:
        return (
            f"BlockTable(block_ids={self.block_ids}, num_cached_tokens={self.num_cached_tokens}, "
            f"num_computed_tokens={self.num_computed_tokens})"
        )
