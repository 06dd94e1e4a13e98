"""What the paged kernels take: the pool of one layer, the flat batch, the softmax options, and the plan of the work."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.vectors import KIND_BF16, KIND_F16, KIND_F32, LANES

__all__ = [
    "ITEM_COLUMNS",
    "PARTITION",
    "AttentionOptions",
    "Item",
    "KVPool",
    "OwnBlocks",
    "PagedBatch",
    "WorkPlan",
    "aligned_empty",
    "plan_work",
    "query_positions",
    "storage_kind",
]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_TILE = 64  # tokens, see tiles.py
PARTITION = 512  # tokens; partial results end at multiples of it whatever the batch or the chunking, and merge in order
_KINDS: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): KIND_F32,
    np.dtype(np.float16): KIND_F16,
    np.dtype(np.uint16): KIND_BF16,
}
_ROWS_PER_ITEM = 64  # query rows (tokens x heads of a kv head) that share one reading of the keys and values
_ITEMS_PER_THREAD = 4  # fewer items than this per thread: split the sequence's partitions over the threads


class KVPool(NamedTuple):
    """Keys and values of one layer, in float32, float16 or (as uint16 bits) bfloat16.

    keys    [num_blocks, num_kv_heads, head_dim, block_size]   a lane is a token
    values  [num_blocks, num_kv_heads, block_size, head_dim]   a lane is a channel
    """

    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]


class OwnBlocks(NamedTuple):
    """The blocks that a pass writes, in float16: a query reads its own block here.

    pool   float16 buffers as in KVPool;  tables int32 [num_seqs, width]: the buffer of the sequence's first block that
    the pass writes, of the next, ...;  first int32 [num_seqs]: the number of that first block within the sequence.
    """

    pool: KVPool
    tables: npt.NDArray[np.int32]
    first: npt.NDArray[np.int32]


class PagedBatch(NamedTuple):
    """Which query rows belong to which sequence and where the sequences' blocks are.

    cu_seqlens_q  int32 [num_seqs + 1]           first query row of each sequence
    seq_lens      int32 [num_seqs]               tokens of each sequence, those of the query rows included
    block_tables  int32 [num_seqs, max_blocks]   block ids in order; not read beyond the sequence's end
    """

    cu_seqlens_q: Ints
    seq_lens: Ints
    block_tables: Ints


class AttentionOptions(NamedTuple):
    """A query at position p sees keys at (p - window, p], window 0: all up to p. softcap 0: none.

    sinks: float32 [num_q_heads], one more logit per head that joins the denominator and has no value.
    """

    softmax_scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Floats | None = None


class Item(NamedTuple):
    """A tile of a sequence's query rows, over all partitions it sees; or over one of them, where the tile is split.

    first_row, num_rows              query tokens, counted from the sequence's first one in the batch
    first_partition, end_partition   what this item walks
    split                            number of the split tile, -1: not split
    split_partition, num_partitions  the split tile's first partition, and how many it has
    first_part                       the split tile's first partial result
    """

    sequence: Any
    first_row: Any
    num_rows: Any
    first_partition: Any
    end_partition: Any
    split: Any
    split_partition: Any
    num_partitions: Any
    first_part: Any


ITEM_COLUMNS = len(Item._fields)


class WorkPlan(NamedTuple):
    """Items that threads take one by one; each item stands for one unit per kv head.

    items        int32 [num_items, ITEM_COLUMNS], rows of `Item`
    num_splits   tiles of query rows whose partitions are split
    num_parts    partial results of all of them
    tile_rows    most query tokens in one item
    num_steps    (4 query rows x 64 tokens) of all items, about: the size of the work per kv head
    """

    items: Ints
    num_splits: int
    num_parts: int
    tile_rows: int
    num_steps: int


def query_positions(batch: PagedBatch) -> npt.NDArray[np.int64]:
    """Absolute position of every query row, int64 [num_tokens]."""
    lengths = np.diff(batch.cu_seqlens_q).astype(np.int64)
    first = batch.seq_lens - lengths - batch.cu_seqlens_q[:-1]
    return np.repeat(first, lengths) + np.arange(int(batch.cu_seqlens_q[-1]))


def plan_work(batch: PagedBatch, heads_per_kv: int, num_kv_heads: int, window: int, num_threads: int) -> WorkPlan:
    """Cut a batch into items: tiles of query rows, and for few rows over many tokens one item per partition.

    How the batch is cut decides speed only: partial results end at absolute positions and merge in order either way.
    """
    tile_rows = max(1, _ROWS_PER_ITEM // heads_per_kv)
    lengths = np.diff(batch.cu_seqlens_q)
    cut = _Cut(heads_per_kv, num_kv_heads, window, num_threads, tile_rows)
    if window > 0 or lengths.max(initial=0) > tile_rows:
        return _plan_items(lengths.astype(np.int64), batch.seq_lens.astype(np.int64), cut)
    # Steps of decoding: the same plan until a sequence begins another tile.
    seq_lens = (batch.seq_lens + (_TILE - 1)) // _TILE * _TILE
    return _plan_again(lengths.astype(np.int32).tobytes(), seq_lens.astype(np.int32).tobytes(), cut)


class _Cut(NamedTuple):
    """What decides, beside lengths, how a batch is cut."""

    heads_per_kv: int
    num_kv_heads: int
    window: int
    num_threads: int
    tile_rows: int


@lru_cache(maxsize=64)
def _plan_again(lengths: bytes, seq_lens: bytes, cut: _Cut) -> WorkPlan:
    """`_plan_items`, for lengths whose bytes it has met before the same again; int32."""
    one, other = (np.frombuffer(data, dtype=np.int32).astype(np.int64) for data in (lengths, seq_lens))
    return _plan_items(one, other, cut)


def _plan_items(lengths: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64], cut: _Cut) -> WorkPlan:
    heads_per_kv, num_kv_heads, window, num_threads, tile_rows = cut
    tiles = -(-lengths // tile_rows)
    sequence = np.repeat(np.arange(lengths.size), tiles)
    first_row = (np.arange(sequence.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_rows
    rows = np.minimum(lengths[sequence] - first_row, tile_rows)
    position = seq_lens[sequence] - lengths[sequence] + first_row
    first_partition = np.maximum(position - window + 1, 0) // PARTITION if window > 0 else np.zeros_like(position)
    end_partition = -(-(position + rows) // PARTITION)
    few = (tiles == 1) | (tiles * num_kv_heads < _ITEMS_PER_THREAD * num_threads)
    split = few[sequence] & (end_partition - first_partition > 1) & (num_threads > 1)

    partitions = np.where(split, end_partition - first_partition, 1)
    source = np.repeat(np.arange(sequence.size), partitions)
    within = np.arange(source.size) - np.repeat(np.cumsum(partitions) - partitions, partitions)
    is_split = split[source]
    begin = np.where(is_split, first_partition[source] + within, first_partition[source])
    columns = Item(
        sequence=sequence[source],
        first_row=first_row[source],
        num_rows=rows[source],
        first_partition=begin,
        end_partition=np.where(is_split, begin + 1, end_partition[source]),
        split=np.where(is_split, (np.cumsum(split) - 1)[source], -1),
        split_partition=first_partition[source],
        num_partitions=partitions[source],
        first_part=(np.cumsum(np.where(split, partitions, 0)) - np.where(split, partitions, 0))[source],
    )
    items = np.stack(columns, axis=1).astype(np.int32)
    # Longest first, so that no thread is left with a long item at the end; partitions of one tile stay side by side.
    cost = (columns.end_partition - columns.first_partition) * columns.num_rows
    items = np.ascontiguousarray(items[np.argsort(-cost, kind="stable")])
    row_steps, tile_steps = -(-rows * heads_per_kv // 4), -(-(position + rows - first_partition * PARTITION) // _TILE)
    num_parts, num_steps = int(np.where(split, partitions, 0).sum()), int((row_steps * tile_steps).sum())
    return WorkPlan(items, int(split.sum()), num_parts, tile_rows, num_steps)


def storage_kind(pool: KVPool) -> int:
    """KIND_F32, KIND_F16 or KIND_BF16 of a pool; ConfigError for another dtype or a pool that is not contiguous."""
    kind = _KINDS.get(pool.keys.dtype)
    if kind is None or pool.values.dtype != pool.keys.dtype:
        raise ConfigError(
            f"pool dtypes {pool.keys.dtype}, {pool.values.dtype} must both be one of {[kind.name for kind in _KINDS]}"
        )
    if not (pool.keys.flags.c_contiguous and pool.values.flags.c_contiguous):
        raise ConfigError("the pool's arrays must be C-contiguous")
    num_blocks, kv_heads, head_dim, block_size = pool.keys.shape
    if pool.values.shape != (num_blocks, kv_heads, block_size, head_dim) or block_size % LANES:
        raise ConfigError(
            f"keys {pool.keys.shape} and values {pool.values.shape} must be [blocks, heads, dim, block] and "
            f"[blocks, heads, block, dim] with block a multiple of {LANES}"
        )
    return kind


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised C-contiguous array that starts at a cache line: vectors in it never straddle two lines."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    raw = np.empty(size + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(kind).reshape(shape)
