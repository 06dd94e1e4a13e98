"""Inputs of paged attention: one layer's pool, the flat batch, the options and the work plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.vectors import KIND_BF16, KIND_F16, KIND_F32, LANES
from kvboost_edge.segments import QUERY_BLOCK, Longs, Segment, Segments, valid_to

__all__ = [
    "ITEM_COLUMNS",
    "LOG2_E",
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

LOG2_E = 1.4426950408889634
"""log2(e): kernels compute softmax with powers of two, so they multiply scores by it."""
_TILE = 64  # tokens; see float_tiles.py
# Tokens per partition. Partial results end at multiples of PARTITION and merge in order, so results
# depend on neither the batch nor the chunking of the prompt.
PARTITION = 512
_KINDS: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): KIND_F32,
    np.dtype(np.float16): KIND_F16,
    np.dtype(np.uint16): KIND_BF16,
}
# Number of query rows (tokens x query heads of a KV head) that share one read of KV.
_ROWS_PER_ITEM = 64
# If each thread would get fewer items than this, the partitions of a sequence are split over
# threads.
_ITEMS_PER_THREAD = 4


class KVPool(NamedTuple):
    """KV of one layer in float32, float16 or bfloat16 (as uint16 bit patterns).

    The arrays are C-contiguous. Backends allocate them with `aligned_empty`.

    Attributes:
        keys: [num_blocks, num_kv_heads, head_dim, block_size]; a vector lane is a token.
        values: [num_blocks, num_kv_heads, block_size, head_dim]; a vector lane is a channel.
    """

    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]


class OwnBlocks(NamedTuple):
    """Float16 copies of the blocks that a pass writes.

    A query reads the block that contains its own token from here.

    Attributes:
        pool: float16 buffers, shaped as in `KVPool`.
        tables: int32 [num_seqs, width], the buffers of each sequence's consecutive blocks, starting
            with the first block that the pass writes.
        first: int32 [num_seqs], position of slot 0 of that first block.
    """

    pool: KVPool
    tables: npt.NDArray[np.int32]
    first: npt.NDArray[np.int32]


class PagedBatch(NamedTuple):
    """Query rows and block tables of the sequences in a batch.

    Attributes:
        cu_seqlens_q: int32 [num_seqs + 1], first query row of each sequence.
        seq_lens: int32 [num_seqs], position after each sequence's last query row.
        block_tables: int32 [num_seqs, max_blocks], block ids in order. Entries after the sequence's
            end are not read.
        segments: positions that the entries hold; see segments.py. None means that entry i holds
            the positions from i * block_size on.
        sparse: int32 [num_seqs, 2], the sparse range of each sequence: the first position and the
            end of the positions whose queries attend to selected blocks. None means no ranges.
    """

    cu_seqlens_q: Ints
    seq_lens: Ints
    block_tables: Ints
    segments: Segments = None
    sparse: Ints | None = None

    @property
    def sparse_ranges(self) -> Ints | None:
        """The sparse ranges, or None if no query row of the batch is in one."""
        if self.sparse is None:
            return None
        first = self.seq_lens - np.diff(self.cu_seqlens_q)
        inside = np.maximum(self.sparse[:, 0], first) < np.minimum(self.sparse[:, 1], self.seq_lens)
        return self.sparse if inside.any() else None


class AttentionOptions(NamedTuple):
    """Softmax options of one layer.

    Attributes:
        softmax_scale: factor applied to scores.
        window: sliding window in tokens; a query at position p sees keys at (p - window, p]. 0 lets
            it see all keys up to p.
        softcap: scores become softcap * tanh(score / softcap); 0 disables it.
        sinks: float32 [num_q_heads], an additional logit per head that is part of the denominator
            and has no value; None disables sinks.
        ahead: number of keys after p that are also visible, up to the sequence's end; 0 for causal
            attention. It cannot be combined with segments.
    """

    softmax_scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Floats | None = None
    ahead: int = 0


class QueryRotation(NamedTuple):
    """Queries before RoPE, for segments with a delta.

    A query at position p is rotated by row p - delta of the tables.

    Attributes:
        queries: float32 [num_tokens, num_q_heads, head_dim], before RoPE.
        cos: float32 [num_positions, rotary_dim / 2]; see rope.py.
        sin: float32 [num_positions, rotary_dim / 2].
    """

    queries: Floats
    cos: Floats
    sin: Floats


class Item(NamedTuple):
    """A tile of a sequence's query rows and the partitions that the tile attends to.

    If the tile is split, the item covers one partition. Otherwise it covers all partitions that the
    rows see.

    Attributes:
        sequence: index of the sequence in the batch.
        first_row: first query token, relative to the sequence's first query token in the batch.
        num_rows: number of query tokens.
        first_partition: first partition of the item, in one segment of the sequence's blocks.
        end_partition: end of the item's partitions.
        split: index of the split tile, or -1 if the tile is not split.
        ordinal: index of this partition in the split tile.
        num_partitions: partitions of the split tile.
        first_partial: the split tile's first partial result.
        first_index: the segment's first entry in the block table.
        shift: position of slot 0 of that entry. The item's other positions are relative to it.
        valid_from: first position that the segment serves.
        valid_to: end of the positions that the segment serves, or NO_END if it holds the queries'
            own tokens.
        delta: the segment's delta, by which the queries are rotated back; 0 without a shift.
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
    """Items that threads take one by one; each item is one unit per KV head.

    Attributes:
        items: int32 [num_items, ITEM_COLUMNS], rows of `Item`.
        num_splits: number of split tiles.
        num_partials: partial results of all split tiles.
        tile_rows: maximum number of query tokens per item.
        num_steps: approximate work per KV head, in steps of 4 query rows x 64 tokens.
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
    """Split a batch into items: tiles of query rows, or partitions if there are few rows.

    The plan affects only the speed, because partial results end at absolute positions and merge in
    order. A sequence with several segments is always split, each segment into its own partitions.
    Each query block of a sparse range is an item, which is not split.

    Args:
        batch: query rows and block tables.
        heads_per_kv: query heads per KV head.
        num_kv_heads: number of KV heads.
        window: sliding window in tokens, or 0 for full attention.
        num_threads: number of threads of the call.
        ahead: number of later tokens that a query also sees.

    Raises:
        ConfigError: `ahead` is combined with segments, or a sparse range is combined with segments
            or begins or ends inside a query block.
    """
    if ahead and batch.segments is not None:
        raise ConfigError(
            f"ahead={ahead} is not supported in a batch with segments, where queries cannot see "
            "later keys; use ahead=0"
        )
    tile_rows = max(1, _ROWS_PER_ITEM // heads_per_kv)
    starts = batch.cu_seqlens_q.tolist()
    seq_lens = batch.seq_lens.tolist()
    lengths = tuple(end - first for first, end in pairwise(starts))
    ranges = batch.sparse_ranges if window == 0 else None
    if ranges is not None:
        tile_rows = max(tile_rows, QUERY_BLOCK)
    cut = _Cut(heads_per_kv, num_kv_heads, window, num_threads, tile_rows, ahead)
    if ranges is not None:
        if batch.segments is not None:
            raise ConfigError(
                "sparse ranges cannot be combined with segments; use exact prefill for sequences "
                "that reuse blocks of other positions"
            )
        return _plan_items(lengths, seq_lens, None, cut, ranges)
    if max(lengths, default=0) > tile_rows or (window > 0 and batch.segments is not None):
        return _plan_items(lengths, seq_lens, batch.segments, cut)
    # Decode steps share a cached plan until a sequence starts another tile or a partition leaves
    # the sliding window.
    alike = tuple(
        _last_alike(seq_len, seq_len - length, window)
        for seq_len, length in zip(seq_lens, lengths, strict=True)
    )
    segments = None if batch.segments is None else batch.segments.tobytes()
    return _plan_again(lengths, alike, segments, cut)


def _last_alike(seq_len: int, position: int, window: int) -> int:
    """Return the largest sequence length whose plan equals the plan of `seq_len`.

    `position` is the position of the sequence's first query token.
    """
    tile_end = -(-seq_len // _TILE) * _TILE
    if window == 0:
        return tile_end
    first = max(position - window + 1, 0) // PARTITION
    return min(tile_end, (first + 1) * PARTITION + window - 2 + seq_len - position)


class _Cut(NamedTuple):
    """Inputs of a plan besides lengths and segments."""

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
    """Return the cached result of `_plan_items`; `segments` are the bytes of int32 rows."""
    rows = (
        None
        if segments is None
        else np.frombuffer(segments, dtype=np.int32).reshape(-1, len(Segment._fields))
    )
    return _plan_items(lengths, seq_lens, rows, cut)


def _sparse_tiles(
    lengths: Longs, seq_lens: Longs, tile_rows: int, ranges: Ints
) -> tuple[Longs, Longs, Longs, Longs, npt.NDArray[np.bool_]]:
    """Return the tiles of query rows of a batch with sparse ranges.

    Returns:
        The number of tiles per sequence, then for each tile its sequence, first row, number of rows
        and whether it is in a sparse range.
    """
    tiles = np.zeros(lengths.size, np.int64)
    found: list[tuple[int, int, int, bool]] = []
    for sequence, (length, seq_len) in enumerate(
        zip(lengths.tolist(), seq_lens.tolist(), strict=True)
    ):
        before = seq_len - length
        first, end = (min(max(at - before, 0), length) for at in ranges[sequence].tolist())
        end = max(first, end)
        if end > first and ((before + first) % QUERY_BLOCK or (end - first) % QUERY_BLOCK):
            raise ConfigError(
                f"positions {before + first} to {before + end} of a sparse range must be computed "
                f"in query blocks of {QUERY_BLOCK}; align the chunks of the prompt"
            )
        parts = ((0, first, tile_rows), (first, end, QUERY_BLOCK), (end, length, tile_rows))
        for part, (start, stop, size) in enumerate(parts):
            for row in range(start, stop, size):
                found.append((sequence, row, min(size, stop - row), part == 1))
                tiles[sequence] += 1
    columns = np.array(found, np.int64).reshape(-1, 4).T
    return tiles, columns[0], columns[1], columns[2], columns[3].astype(np.bool_)


class _Walks(NamedTuple):
    """The ranges of partitions that tiles of query rows attend to, one range per tile and segment.

    Arrays are int64 [num_walks]. If every sequence has one segment, some fields are an int for all
    ranges. Other fields have the same meaning as in `Item`.

    Attributes:
        tile: index of the tile of query rows.
        position: position of the tile's first query.
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
        """Return the fields that locate a segment, for the given indices."""
        names = ("first_index", "shift", "valid_from", "valid_to", "delta")
        return {
            name: one if isinstance(one := getattr(self, name), int) else one[source]
            for name in names
        }


def _plan_items(
    new: Sequence[int],
    known: Sequence[int],
    segments: Segments,
    cut: _Cut,
    ranges: Ints | None = None,
) -> WorkPlan:
    """Return the plan for sequences with `new` query rows each and lengths `known`.

    `ranges` are the sparse ranges.
    """
    lengths = np.array(new, np.int64)
    seq_lens = np.array(known, np.int64)
    tile_rows = cut.tile_rows
    if ranges is None:
        tiles = -(-lengths // tile_rows)
        sequence = np.repeat(np.arange(lengths.size), tiles)
        first_row = (
            np.arange(sequence.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        ) * tile_rows
        rows = np.minimum(lengths[sequence] - first_row, tile_rows)
        is_sparse = np.zeros(sequence.size, np.bool_)
    else:
        tiles, sequence, first_row, rows, is_sparse = _sparse_tiles(
            lengths, seq_lens, tile_rows, ranges
        )
    position = seq_lens[sequence] - lengths[sequence] + first_row
    seen = np.minimum(seq_lens[sequence], position + rows + cut.ahead) - position
    walks = _walks(sequence, position, seen, segments, cut.window)
    if is_sparse.any():
        # The kept key blocks are attended to with the tile of the first row.
        first = np.where(is_sparse, position // _TILE * _TILE // PARTITION, walks.first_partition)
        walks = walks._replace(first_partition=first)
    totals = counts = walks.end_partition - walks.first_partition
    if segments is not None:
        totals = np.bincount(walks.tile, counts, sequence.size).astype(np.int64)
    few = (tiles == 1) | (tiles * cut.num_kv_heads < _ITEMS_PER_THREAD * cut.num_threads)
    split = few[sequence] & (totals > 1) & (cut.num_threads > 1) & ~is_sparse
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
    # Put the longest items first, so no thread is left with a long item at the end. The sort is
    # stable, which keeps the partitions of a tile together.
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
    """Return the partitions that each tile attends to.

    Args:
        sequence: int64 [num_tiles].
        position: int64 [num_tiles], position of the tile's first query row.
        seen: int64 [num_tiles], number of tokens visible from `position` on: the tile's rows, and
            more if queries look ahead.
        segments: segments of the batch.
        window: sliding window in tokens, or 0 for full attention.
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
    """Return each index i repeated counts[i] times, and a counter that restarts at 0 for each i."""
    source = np.repeat(np.arange(counts.size), counts)
    return source, np.arange(source.size) - np.repeat(np.cumsum(counts) - counts, counts)


def storage_kind(pool: KVPool) -> int:
    """Return the dtype of a pool as KIND_F32, KIND_F16 or KIND_BF16.

    Raises:
        ConfigError: the dtype is not supported, the shapes do not match, or an array is not
            C-contiguous.
    """
    kind = _KINDS.get(pool.keys.dtype)
    if kind is None or pool.values.dtype != pool.keys.dtype:
        raise ConfigError(
            f"pool dtypes {pool.keys.dtype}, {pool.values.dtype} must both be one of "
            f"{[kind.name for kind in _KINDS]}"
        )
    if not (pool.keys.flags.c_contiguous and pool.values.flags.c_contiguous):
        raise ConfigError(
            "the pool's keys and values must be C-contiguous; allocate them with aligned_empty"
        )
    num_blocks, kv_heads, head_dim, block_size = pool.keys.shape
    if pool.values.shape != (num_blocks, kv_heads, block_size, head_dim) or block_size % LANES:
        raise ConfigError(
            f"keys {pool.keys.shape} and values {pool.values.shape} must be [blocks, heads, dim, "
            f"block] and [blocks, heads, block, dim], where block is a multiple of {LANES}"
        )
    return kind


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialized C-contiguous array, aligned to a cache line (64 bytes)."""
    # An aligned vector never straddles two cache lines.
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    raw = np.empty(size + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(kind).reshape(shape)
