"""What the paged kernels take: the pool of one layer, the flat batch, the softmax options, and the
plan of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.vectors import KIND_BF16, KIND_F16, KIND_F32, LANES
from kvboost_edge.segments import Longs, Segment, Segments, valid_to

__all__ = [
    "ITEM_COLUMNS",
    "NO_END",
    "PARTITION",
    "AttentionOptions",
    "Item",
    "KVPool",
    "OwnBlocks",
    "PagedBatch",
    "QueryRotation",
    "WorkPlan",
    "aligned_empty",
    "plan_work",
    "storage_kind",
]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_TILE = 64  # tokens, see float_tiles.py
# Tokens; partial results end at multiples of it whatever the batch or the chunking, and merge in
# order.
PARTITION = 512
_KINDS: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): KIND_F32,
    np.dtype(np.float16): KIND_F16,
    np.dtype(np.uint16): KIND_BF16,
}
_ROWS_PER_ITEM = (
    64  # query rows (tokens x heads of a kv head) that share one reading of the keys and values
)
_ITEMS_PER_THREAD = (
    4  # fewer items than this per thread: split the sequence's partitions over the threads
)


class KVPool(NamedTuple):
    """Keys and values of one layer, in float32, float16 or (as uint16 bits) bfloat16.

    Attributes:
        keys ([num_blocks, num_kv_heads, head_dim, block_size]): a lane is a token.
        values ([num_blocks, num_kv_heads, block_size, head_dim]): a lane is a channel.
    """

    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]


class OwnBlocks(NamedTuple):
    """The blocks that a pass writes, in float16: a query reads its own block here.

    pool   float16 buffers as in KVPool;  tables int32 [num_seqs, width]: the buffer of the
           sequence's first block that
    the pass writes, of the next, ...;  first int32 [num_seqs]: the position of that first block's
                                        slot 0.
    """

    pool: KVPool
    tables: npt.NDArray[np.int32]
    first: npt.NDArray[np.int32]


class PagedBatch(NamedTuple):
    """Which query rows belong to which sequence and where the sequences' blocks are.

    Attributes:
        cu_seqlens_q (int32 [num_seqs + 1]): first query row of each sequence.
        seq_lens (int32 [num_seqs]): the position behind each sequence's last query row.
        block_tables (int32 [num_seqs, max_blocks]): block ids in order; not read beyond the
            sequence's end.
        segments: which positions the blocks hold, see segments.py; None: block i holds those from i
            * block_size on.
    """

    cu_seqlens_q: Ints
    seq_lens: Ints
    block_tables: Ints
    segments: Segments = None


class AttentionOptions(NamedTuple):
    """A query at position p sees keys at (p - window, p], window 0: all up to p. softcap 0: none.

    sinks: float32 [num_q_heads], one more logit per head that joins the denominator and has no
    value. ahead: so many keys behind p are seen too, as far as the sequence goes; 0: causal. Only
    where no batch has segments.
    """

    softmax_scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Floats | None = None
    ahead: int = 0


class QueryRotation(NamedTuple):
    """What queries over segments with a delta are made of: one at position p is rotated by row p -
    delta of the tables.

    Attributes:
        queries: float32 [num_tokens, num_q_heads, head_dim], before rotation.
        cos, sin: float32 [num_positions, rotary_dim / 2], see rope.py.
    """

    queries: Floats
    cos: Floats
    sin: Floats


class Item(NamedTuple):
    """A tile of a sequence's query rows, over all partitions it sees; or over one of them, where
    the tile is split.

    Attributes:
        first_row, num_rows: query tokens, counted from the sequence's first one in the batch.
        first_partition, end_partition: what this item walks, of one segment of the sequence's
            blocks.
        split: number of the split tile, -1: not split.
        ordinal, num_partitions: which of the split tile's partitions this is, and how many it has.
        first_partial: the split tile's first partial result.
        first_index: the segment's first entry in the block table.
        shift: position of that entry's slot 0; the item's other positions are counted from there.
        valid_from, valid_to: what the segment serves; NO_END: the queries themselves are in it.
        delta: of the segment: 0, or how far back the queries are turned.
    """

    sequence: Any
    first_row: Any
    num_rows: Any
    first_partition: Any
    end_partition: Any
    split: Any
    ordinal: Any
    num_partitions: Any
    first_partial: Any
    first_index: Any
    shift: Any
    valid_from: Any
    valid_to: Any
    delta: Any


NO_END = np.iinfo(np.int32).max
ITEM_COLUMNS = len(Item._fields)


class WorkPlan(NamedTuple):
    """Items that threads take one by one; each item stands for one unit per kv head. Lengths are
    int32, and so every number of an item fits.

    items        int32 [num_items, ITEM_COLUMNS], rows of `Item`
    num_splits   tiles of query rows whose partitions are split
    num_partials partial results of all of them
    tile_rows    most query tokens in one item
    num_steps    (4 query rows x 64 tokens) of all items, about: the size of the work per kv head
    """

    items: Ints
    num_splits: int
    num_partials: int
    tile_rows: int
    num_steps: int


def plan_work(
    batch: PagedBatch,
    heads_per_kv: int,
    num_kv_heads: int,
    window: int,
    num_threads: int,
    ahead: int = 0,
) -> WorkPlan:
    """Cut a batch into items: tiles of query rows, and for few rows over many tokens one item per
    partition.

    How the batch is cut decides speed only: partial results end at absolute positions and merge in
    order either way. A sequence of several segments is always split, each segment into partitions
    of its own. ConfigError for segments and `ahead`.
    """
    if ahead and batch.segments is not None:
        raise ConfigError(
            f"ahead={ahead}: keys behind a query are not seen where a sequence has segments"
        )
    tile_rows = max(1, _ROWS_PER_ITEM // heads_per_kv)
    starts = batch.cu_seqlens_q.tolist()
    seq_lens = batch.seq_lens.tolist()
    lengths = tuple(end - first for first, end in pairwise(starts))
    cut = _Cut(heads_per_kv, num_kv_heads, window, num_threads, tile_rows, ahead)
    if max(lengths, default=0) > tile_rows or (window > 0 and batch.segments is not None):
        return _plan_items(lengths, seq_lens, batch.segments, cut)
    # Steps of decoding: the same plan until a sequence begins another tile, or leaves a partition
    # behind its window.
    alike = tuple(
        _last_alike(seq_len, seq_len - length, window)
        for seq_len, length in zip(seq_lens, lengths, strict=True)
    )
    segments = None if batch.segments is None else batch.segments.tobytes()
    return _plan_again(lengths, alike, segments, cut)


def _last_alike(seq_len: int, position: int, window: int) -> int:
    """The greatest length for which a sequence is cut like one of `seq_len` whose first query is at
    `position`.
    """
    tile_end = -(-seq_len // _TILE) * _TILE
    if window == 0:
        return tile_end
    first = max(position - window + 1, 0) // PARTITION
    return min(tile_end, (first + 1) * PARTITION + window - 2 + seq_len - position)


class _Cut(NamedTuple):
    """What decides, beside lengths, how a batch is cut."""

    heads_per_kv: int
    num_kv_heads: int
    window: int
    num_threads: int
    tile_rows: int
    ahead: int


@lru_cache(maxsize=64)
def _plan_again(
    lengths: tuple[int, ...], seq_lens: tuple[int, ...], segments: bytes | None, cut: _Cut
) -> WorkPlan:
    """`_plan_items`, for lengths and segments, int32, that it has met before the same again."""
    rows = (
        None
        if segments is None
        else np.frombuffer(segments, dtype=np.int32).reshape(-1, len(Segment._fields))
    )
    return _plan_items(lengths, seq_lens, rows, cut)


class _Walks(NamedTuple):
    """What tiles of query rows walk: one walk for each segment of the tile's sequence. int64
    [num_walks] each.

    Attributes:
        tile: the tile; position: of its first query;  partitions [first, end) and what else there
            is as in `Item`: one number stands for all walks where every sequence has one segment.
    """

    tile: Longs
    position: Longs
    first_partition: Longs
    end_partition: Longs
    first_index: Longs | int
    shift: Longs | int
    valid_from: Longs | int
    valid_to: Longs | int
    delta: Longs | int

    def places(self, source: Longs) -> dict[str, Longs | int]:
        """The last five, for walks of these numbers."""
        names = ("first_index", "shift", "valid_from", "valid_to", "delta")
        return {
            name: one if isinstance(one := getattr(self, name), int) else one[source]
            for name in names
        }


def _plan_items(
    new: Sequence[int], known: Sequence[int], segments: Segments, cut: _Cut
) -> WorkPlan:
    """new, known: query rows and tokens of each sequence."""
    lengths = np.array(new, np.int64)
    seq_lens = np.array(known, np.int64)
    tile_rows = cut.tile_rows
    tiles = -(-lengths // tile_rows)
    sequence = np.repeat(np.arange(lengths.size), tiles)
    first_row = (np.arange(sequence.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_rows
    rows = np.minimum(lengths[sequence] - first_row, tile_rows)
    position = seq_lens[sequence] - lengths[sequence] + first_row
    seen = np.minimum(seq_lens[sequence], position + rows + cut.ahead) - position
    walks = _walks(sequence, position, seen, segments, cut.window)
    totals = counts = walks.end_partition - walks.first_partition
    if segments is not None:
        totals = np.bincount(walks.tile, counts, sequence.size).astype(np.int64)
    few = (tiles == 1) | (tiles * cut.num_kv_heads < _ITEMS_PER_THREAD * cut.num_threads)
    split = few[sequence] & (totals > 1) & (cut.num_threads > 1)
    if segments is not None:
        split |= np.bincount(walks.tile, minlength=sequence.size) > 1

    source, within = _repeated(np.where(split[walks.tile], counts, 1))
    tile = walks.tile[source]
    is_split = split[tile]
    partials = np.where(split, totals, 0)
    first_partial = np.cumsum(partials) - partials
    begin = walks.first_partition[source] + np.where(is_split, within, 0)
    columns = Item(
        sequence=sequence[tile],
        first_row=first_row[tile],
        num_rows=rows[tile],
        first_partition=begin,
        end_partition=np.where(is_split, begin + 1, walks.end_partition[source]),
        split=np.where(is_split, (np.cumsum(split) - 1)[tile], -1),
        ordinal=within
        if segments is None
        else np.where(is_split, np.cumsum(is_split) - 1 - first_partial[tile], 0),
        num_partitions=np.where(is_split, totals[tile], 1),
        first_partial=first_partial[tile],
        **walks.places(source),
    )
    items = np.empty((source.size, ITEM_COLUMNS), dtype=np.int32)
    for index, column in enumerate(columns):
        items[:, index] = column
    # Longest first, so that no thread is left with a long item at the end; partitions of one tile
    # stay side by side.
    cost = (columns.end_partition - columns.first_partition) * columns.num_rows
    items = np.ascontiguousarray(items[np.argsort(-cost, kind="stable")])
    row_steps = -(-rows * cut.heads_per_kv // 4)[walks.tile]
    tile_steps = -(
        -(walks.position + seen[walks.tile] - walks.first_partition * PARTITION) // _TILE
    )
    num_steps = int((row_steps * np.minimum(tile_steps, counts * (PARTITION // _TILE))).sum())
    return WorkPlan(items, int(split.sum()), int(partials.sum()), tile_rows, num_steps)


def _walks(
    sequence: Longs, position: Longs, seen: Longs, segments: Segments, window: int
) -> _Walks:
    """The walks of tiles whose first query row is at `position` of `sequence`; what is `seen` from
    there on is the tile's rows, and more where queries look ahead.
    """
    if segments is None:
        first = (
            np.maximum(position - window + 1, 0) // PARTITION
            if window > 0
            else np.zeros_like(position)
        )
        return _Walks(
            np.arange(sequence.size),
            position,
            first,
            -(-(position + seen) // PARTITION),
            0,
            0,
            0,
            NO_END,
            0,
        )
    tile, number = np.nonzero(sequence[:, None] == segments[:, 0])
    segment = Segment(*segments[number].astype(np.int64).T)
    end = valid_to(segments)[number]
    position = position[tile] - segment.first_position
    valid_from = segment.valid_from - segment.first_position
    end = np.where(end == NO_END, NO_END, end - segment.first_position)
    low = np.maximum(valid_from, position - window + 1) if window > 0 else valid_from
    first = low // PARTITION
    last = np.maximum(-(-np.minimum(end, position + seen[tile]) // PARTITION), first)
    return _Walks(
        tile,
        position,
        first,
        last,
        segment.first_index,
        segment.first_position,
        valid_from,
        end,
        segment.delta,
    )


def _repeated(counts: Longs) -> tuple[Longs, Longs]:
    """Index i, counts[i] times, for every i; and 0, 1, ... counts[i] - 1 beside it."""
    source = np.repeat(np.arange(counts.size), counts)
    return source, np.arange(source.size) - np.repeat(np.cumsum(counts) - counts, counts)


def storage_kind(pool: KVPool) -> int:
    """KIND_F32, KIND_F16 or KIND_BF16 of a pool; ConfigError for another dtype or a pool that is
    not contiguous.
    """
    kind = _KINDS.get(pool.keys.dtype)
    if kind is None or pool.values.dtype != pool.keys.dtype:
        raise ConfigError(
            f"pool dtypes {pool.keys.dtype}, {pool.values.dtype} must both be one of "
            f"{[kind.name for kind in _KINDS]}"
        )
    if not (pool.keys.flags.c_contiguous and pool.values.flags.c_contiguous):
        raise ConfigError("the pool's arrays must be C-contiguous")
    num_blocks, kv_heads, head_dim, block_size = pool.keys.shape
    if pool.values.shape != (num_blocks, kv_heads, block_size, head_dim) or block_size % LANES:
        raise ConfigError(
            f"keys {pool.keys.shape} and values {pool.values.shape} must be [blocks, heads, dim, "
            f"block] and [blocks, heads, block, dim] with block a multiple of {LANES}"
        )
    return kind


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised C-contiguous array that starts at a cache line: vectors in it never straddle
    two lines.
    """
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    raw = np.empty(size + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(kind).reshape(shape)
