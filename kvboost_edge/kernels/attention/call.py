"""Arguments and buffers of one paged attention call, and their sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.attention.float_tiles import STRIPS, TILE
from kvboost_edge.kernels.attention.paged import Floats, Ints
from kvboost_edge.kernels.vectors import LANES

__all__ = [
    "NEXT_UNIT",
    "NUM_COUNTERS",
    "NUM_SCRATCH_USERS",
    "UNITS_DONE",
    "AttentionCall",
    "AttentionShape",
    "Job",
    "RotationPointers",
    "Unit",
    "scratch_floats",
    "state_floats",
]

# Counters of a job, int64. The number of finished partitions of each (split tile, KV head) follows.
NEXT_UNIT = 0
NUM_SCRATCH_USERS = 1
UNITS_DONE = 2
NUM_COUNTERS = 3


class AttentionShape(NamedTuple):
    """Sizes and options of one layer's attention.

    Attributes:
        num_kv_heads: KV heads.
        heads_per_kv: query heads per KV head (grouped-query attention).
        head_dim: channels of a head.
        padded_dim: head_dim rounded up to a multiple of 16.
        padded_rows: query rows of the largest unit, rounded up to a multiple of 4.
        state_floats: floats of a softmax state; see `state_floats`.
        scratch_floats: floats of scratch per thread.
        block_size: tokens of a block.
        kind: KIND_F32, KIND_F16 or KIND_BF16, the dtype of the pool.
        window: sliding window in tokens; 0: none.
        softcap: softcap of scores; 0: none.
        softmax_scale: factor of scores.
        ahead: later tokens that a query also sees; 0: causal.
    """

    num_kv_heads: int
    heads_per_kv: int
    head_dim: int
    padded_dim: int
    padded_rows: int
    state_floats: int
    scratch_floats: int
    block_size: int
    kind: int
    window: int
    softcap: float
    softmax_scale: float
    ahead: int


class AttentionCall(NamedTuple):
    """Arguments that the threads of one call share.

    Arrays are C-contiguous and writable, so that one compilation fits all calls. Those of a
    rotation are empty, and its numbers 0, if no segment has a delta.

    Attributes:
        queries: float32 [num_tokens, num_q_heads, head_dim].
        out: float32 like `queries`, written.
        lse: float32 [num_tokens, num_q_heads], written: log-sum-exp of the scores.
        keys: address of the pool's keys.
        values: address of the pool's values.
        sinks: float32 [num_q_heads], or [0] for none.
        partials: float32 [num_partials * num_kv_heads, state_floats], states of split partitions,
            aligned to 64 bytes.
        scratch: float32 [num_threads, scratch_floats], aligned to 64 bytes; a thread takes a row
            when it joins.
        counters: int64; see NUM_COUNTERS.
        cu_seqlens_q: int32, as in `PagedBatch`.
        seq_lens: int32, as in `PagedBatch`.
        block_tables: int32, as in `PagedBatch`.
        max_blocks: columns of block_tables.
        items: int32, as in `WorkPlan`.
        num_items: rows of items.
        num_threads: rows of scratch.
        unrotated: float32, the queries before RoPE.
        unrotated_step: floats from one token to the next in `unrotated`.
        cos: float32, as in `QueryRotation`.
        sin: float32, as in `QueryRotation`.
        half: rotary pairs of a head.
        shape: sizes and options.
    """

    queries: Floats
    out: Floats
    lse: Floats
    keys: int
    values: int
    sinks: Floats
    partials: Floats
    scratch: Floats
    counters: npt.NDArray[np.int64]
    cu_seqlens_q: Ints
    seq_lens: Ints
    block_tables: Ints
    max_blocks: int
    items: Ints
    num_items: int
    num_threads: int
    unrotated: Floats
    unrotated_step: int
    cos: Floats
    sin: Floats
    half: int
    shape: AttentionShape


class Job(NamedTuple):
    """An AttentionCall with addresses instead of arrays, without the fields of `RotationPointers`.

    `sinks` is 0 for none.
    """

    # Passing arrays from function to function would cost atomic reference counts.
    queries: int
    out: int
    lse: int
    keys: int
    values: int
    sinks: int
    partials: int
    scratch: int
    counters: int
    cu_seqlens_q: int
    seq_lens: int
    block_tables: int
    max_blocks: int
    items: int
    num_items: int
    num_threads: int
    shape: AttentionShape


class RotationPointers(NamedTuple):
    """The AttentionCall's fields for segments with a delta; addresses instead of arrays."""

    # Not part of `Job`: all numbers of a Job are passed on for every 16 tokens.
    unrotated: int
    unrotated_step: int
    cos: int
    sin: int
    half: int


class Unit(NamedTuple):
    """Query rows of one item and KV head, the tokens that they see, and their scratch.

    Positions count from `shift`. A softmax state is float32 sums [padded_rows, padded_dim], maxima
    [padded_rows], totals [padded_rows].

    Attributes:
        sequence: index of the sequence in the batch.
        first_index: entry of the block table that holds the tokens from `shift` on.
        shift: position of slot 0 of that entry.
        whole: 0; or `high` if the rows' own tokens are in another segment: then all rows see all
            tokens before it.
        head: KV head.
        num_rows: query rows (tokens x query heads of the KV head).
        first_position: position of the first query token.
        low: first token that a row sees.
        high: end of the tokens that a row sees.
        query: address of float32 [padded_rows, head_dim], scaled; rows that pad the last 4 are 0.
        scores: address of float32 [padded_rows, 64].
        rescale: address of float32 [padded_rows].
        stage: address of the staged strips: 4 x keys [head_dim, 16], 4 x values [16, padded_dim],
            a row of zeros [padded_dim].
        table: address of the tile table; see float_tiles.py.
    """

    sequence: Any
    first_index: Any
    shift: Any
    whole: Any
    head: int
    num_rows: Any
    first_position: Any
    low: Any
    high: Any
    query: int
    scores: int
    rescale: int
    stage: int
    table: int


def state_floats(padded_rows: int, padded_dim: int) -> int:
    """Return the floats of one softmax state: sums, maxima, totals.

    A multiple of 16, so that consecutive states stay aligned to cache lines.
    """
    return -(-padded_rows * (padded_dim + 2) // LANES) * LANES


def scratch_floats(padded_rows: int, head_dim: int, padded_dim: int) -> int:
    """Return the floats of scratch that one thread needs, a multiple of 16."""
    rows = padded_rows * (head_dim + TILE + 1)
    stage = STRIPS * LANES * (head_dim + padded_dim) + padded_dim
    total = 2 * state_floats(padded_rows, padded_dim) + rows + stage + 12 * STRIPS + 8 * LANES
    return -(-total // LANES) * LANES
