"""The append-only list of blocks that holds one sequence's keys and values, and the copy operations
on blocks.
"""

from __future__ import annotations

import bisect
from operator import attrgetter
from typing import NamedTuple

from kvboost_edge.kvcache.hashing import BlockAddress

__all__ = ["WHOLE", "BlockTable", "CopyOp", "PrefixEntry", "Span", "TableEntry", "TableSegment"]

_VALID_FROM = attrgetter("valid_from")


class CopyOp(NamedTuple):
    """Copy the whole block `src` onto block `dst` (all layers) before the next forward pass."""

    src: int
    dst: int


class PrefixEntry(NamedTuple):
    """What makes a full block matchable.

    Attributes:
        prefix_hash: chain hash of the block and all before it; equal hashes alone prove nothing.
        tokens: the block's own tokens, little-endian u32; for the first block of a chain the root
            precedes them.
        parent_serial: identity of the block before it (ROOT_SERIAL for the first).
        serial: identity of this prefix: counted up, never reused.
        parent_hash: chain hash of the block before it, for those who keep blocks elsewhere: nothing
            here compares it.
        root, depth: whose prompts may share it at other positions (where its chain starts, see
            `LoneRoot`), and how many blocks of it come before: for those who find blocks by other
            means, nothing here compares them either.
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
        """The block's address, in which a root does not precede the tokens of the first block."""
        tokens = self.tokens if self.parent_serial else self.tokens[len(self.parent_hash) :]
        return BlockAddress(self.prefix_hash, self.parent_hash, tokens)


class TableEntry(NamedTuple):
    """One block of a table, as attention may use it. Positions are those of the table's sequence.

    Attributes:
        block_id: where its keys and values are.
        first_position: the position of its slot 0.
        valid_from, valid_to: it serves positions [valid_from, valid_to), and nothing else of it may
            be read.
        delta: how far its keys are from the positions they were computed at; 0: exact.
    """

    block_id: int
    first_position: int
    valid_from: int
    valid_to: int
    delta: int


class TableSegment(NamedTuple):
    """Consecutive blocks of a table that hold consecutive positions: what its entries have in
    common.

    Attributes:
        first_index: index in the table of its first block.
        first_position: the position of that block's slot 0, at most `valid_from`.
        valid_from: the first position it serves; it serves all up to the next segment's, the last
            segment to the end.
        delta: see TableEntry.
    """

    first_index: int
    first_position: int
    valid_from: int
    delta: int


class Span(NamedTuple):
    """Blocks of another context that serve positions [start, stop) of a table, where they are.

    Attributes:
        block_ids: consecutive blocks of one chain.
        first_position: the position of the first one's slot 0, at most `start`; below 0 where the
            prompt has fewer tokens before the span than the block has.
        delta: start less the position at which that token was computed.
    """

    block_ids: tuple[int, ...]
    first_position: int
    start: int
    stop: int
    delta: int


WHOLE = TableSegment(0, 0, 0, 0)
"""The one segment of a table whose blocks hold its tokens from position 0 on, without a gap."""


class BlockTable:
    """The blocks of one sequence, in order; made, changed and freed by a `KVCacheManager` alone.

    The positions of a sequence, the blocks that hold them, and who gives them back:

        0            num_cached_tokens         num_computed_tokens             end
        |   shared    |        computed here         |        reserved         |
        | matched in  | own blocks; each is          | own blocks that         |
        | the index   | published once it is full    | `extend` made, empty    |
        [ block_ids[0], block_ids[1], ...                                      ]
        |-- chained: the blocks `_num_chained` counts --|

    `free` gives back all of them, tail first; what is published stays matchable until it is taken.
    A shared block that must be written (a forked tail; the last block of a prompt cached to its
    end) is replaced by a copy first.

    Example, block_size 16: a prompt of 40 tokens whose first 32 were cached opens as block_ids [7,
    2], num_cached_tokens 32, num_computed_tokens 32. `extend(table, 40)` appends a block, [7, 2,
    9]; slots 9*16 .. 9*16+7 take tokens 32..39; `commit` with 40 computed tokens publishes nothing
    new, with 48 it publishes block 9.

    Attributes:
        block_ids: ids of the blocks, in order. The list grows at its end. An entry changes by
            copy-on-write, and where an equal block replaces it (`DuplicateBlocks`).
        segments: positions that the blocks hold; `[WHOLE]` unless one begins inside a block.
        num_cached_tokens: tokens served by the cache when the table was opened.
        num_matched_tokens: tokens whose KV was cached then; more than num_cached_tokens where a
            snapshot of the recurrent state was missing.
        num_computed_tokens: tokens whose KV is in the pool.
        root: 32-byte root hash the chain starts from.
        spans: KV reused from other positions, in order.
        reserve: own blocks in no segment yet, for tokens of spans that are recomputed.
        owner: tenant of the blocks, for the eviction policy.
        miss_reason: why the token after the cached ones was not served, see `Lookup.miss_reason`.
        missed_hash: prefix hash of that token's full block; None without one, or without a lookup.
    """

    __slots__ = (
        "_chain_hash",
        "_chain_serial",
        "_claims",
        "_counts_spans",
        "_duplicates",
        "_goes_on",
        "_num_chained",
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
        # The chain so far: how many full blocks it covers, the hash and the identity of the last of
        # them.
        self._num_chained = 0
        self._chain_hash = root
        self._chain_serial = 0
        self._publishes = publishes
        # whether it uses the cache: else it reads nothing but what it computed
        self._shares = shares
        # whether its blocks count as used again: it found a published chain to its end, see `Uses`,
        # or is told so
        self._goes_on = again
        # tokens the lookup left to compute, until the first extend counts the lookup (at least one
        # is always left)
        self._uncounted_misses = 0
        # whether what it shares at other positions counts: its sequence was not preempted before
        self._counts_spans = False
        # block index -> prefix hash this table promised to compute (single flight)
        self._claims: dict[int, bytes] = {}
        # block index -> the published equal of a block this table holds privately, and its entry,
        # see `DuplicateBlocks`
        self._duplicates: dict[int, tuple[int, PrefixEntry]] = {}
        # block index -> entry taken out of the index while this table, its only holder, rewrites
        # the block
        self._withdrawn: dict[int, PrefixEntry] = {}

    def __len__(self) -> int:
        return len(self.block_ids)

    def segment_of(self, position: int) -> TableSegment:
        """The segment that serves a position, or will once there are blocks for it."""
        segments = self.segments
        if len(segments) == 1:
            return segments[0]
        return segments[bisect.bisect_right(segments, position, key=_VALID_FROM) - 1]

    def index_of(self, position: int, block_size: int) -> int:
        """Index of the block that holds a position; at least `len(table)` where there is none
        yet.
        """
        segment = self.segment_of(position)
        return segment.first_index + (position - segment.first_position) // block_size

    def num_slots(self, block_size: int) -> int:
        """Positions that its blocks have room for."""
        last = self.segments[-1]
        return last.first_position + (len(self.block_ids) - last.first_index) * block_size

    def slots(self, start: int, stop: int, block_size: int) -> list[int]:
        """Slots of positions start .. stop - 1, all of which its blocks have room for."""
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
        """Blocks from the beginning on that `num_tokens` tokens fill: those their tokens alone
        determine.
        """
        whole = (
            num_tokens if len(self.segments) == 1 else min(num_tokens, self.segments[1].valid_from)
        )
        return whole // block_size

    def num_unchained_tokens(self, block_size: int) -> int:
        """Computed tokens behind those full blocks."""
        return (
            self.num_computed_tokens
            - self.num_full_blocks(self.num_computed_tokens, block_size) * block_size
        )

    def entries(self, block_size: int) -> list[TableEntry]:
        """Every block with the positions it serves."""
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
