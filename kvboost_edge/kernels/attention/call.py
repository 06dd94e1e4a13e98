"""Arguments, buffers and buffer sizes of one paged attention call."""

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

# Indices of a job's int64 counters. They are followed by one counter per split tile and KV head:
# its number of finished partitions.
NEXT_UNIT = 0
NUM_SCRATCH_USERS = 1
UNITS_DONE = 2
NUM_COUNTERS = 3


class AttentionShape(NamedTuple):
    """Sizes and options of one layer's attention.

    Attributes:
        num_kv_heads: number of KV heads.
        heads_per_kv: query heads per KV head (grouped-query attention).
        head_dim: channels per head.
        padded_dim: head_dim rounded up to a multiple of 16.
        padded_rows: query rows of the largest unit, rounded up to a multiple of 4.
        state_floats: size of a softmax state in floats; see the function `state_floats`.
        scratch_floats: scratch per thread in floats.
        block_size: tokens per block.
        kind: dtype of the pool: KIND_F32, KIND_F16 or KIND_BF16.
        window: sliding window in tokens, or 0 for full attention.
        softcap: softcap of scores times log2(e), or 0 for no softcap.
        softmax_scale: factor applied to scores, times log2(e).
        ahead: number of later tokens that a query also sees, or 0 for causal attention.
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
    """Arguments shared by all threads of one call.

    Arrays are C-contiguous and writable, so one compiled kernel fits all calls. If no segment has a
    delta, the arrays for rotating queries are empty and `unrotated_step` and `half` are 0.

    Attributes:
        queries: float32 [num_tokens, num_q_heads, head_dim].
        out: float32 like `queries`, written.
        lse: float32 [num_tokens, num_q_heads], written: log-sum-exp of the scores.
        keys: address of the pool's keys.
        values: address of the pool's values.
        sinks: float32 [num_q_heads], or [0] without sinks.
        partials: float32 [num_partials * num_kv_heads, state_floats], softmax states of split
            partitions, aligned to 64 bytes.
        scratch: float32 [num_threads, scratch_floats], aligned to 64 bytes; each thread takes a row
            when it joins.
        counters: int64; see NUM_COUNTERS.
        cu_seqlens_q: int32; see `PagedBatch`.
        seq_lens: int32; see `PagedBatch`.
        block_tables: int32; see `PagedBatch`.
        max_blocks: number of columns of block_tables.
        items: int32; see `WorkPlan`.
        num_items: number of rows of items.
        num_threads: number of rows of scratch.
        unrotated: float32, the queries before RoPE.
        unrotated_step: distance between two tokens in `unrotated`, in floats.
        cos: float32; see `QueryRotation`.
        sin: float32; see `QueryRotation`.
        half: rotary pairs per head.
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
    """The fields of an AttentionCall except those of `RotationPointers`; arrays become addresses.

    `sinks` is 0 if there are no sinks.
    """

    # Passing arrays between functions would cost atomic reference-count updates.
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
    """The AttentionCall's fields for rotating queries, with addresses for arrays."""

    # These fields are not part of `Job`, because all fields of a Job are passed on for every 16
    # tokens.
    unrotated: int
    unrotated_step: int
    cos: int
    sin: int
    half: int


class Unit(NamedTuple):
    """Query rows of one item and KV head, the range of tokens that they see, and their scratch.

    Positions are relative to `shift`. A softmax state consists of float32 sums [padded_rows,
    padded_dim], maxima [padded_rows] and totals [padded_rows].

    Attributes:
        sequence: index of the sequence in the batch.
        first_index: index of the block-table entry that holds the tokens from `shift` on.
        shift: position of slot 0 of that entry.
        whole: 0 if the rows' own tokens are in this segment. Otherwise `high`, and every row sees
            all tokens before it.
        head: index of the KV head.
        num_rows: query rows (tokens x query heads of the KV head).
        first_position: position of the first query token.
        low: first token that a row sees.
        high: end of the tokens that a row sees.
        query: address of float32 [padded_rows, head_dim], scaled. Padding rows are 0.
        scores: address of float32 [padded_rows, 64].
        rescale: address of float32 [padded_rows].
        stage: address of the staged strips: 4 x keys [head_dim, 16], 4 x values [16, padded_dim],
            and a row of zeros [padded_dim].
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
    """Return the size in floats of one softmax state: sums, maxima and totals.

    The size is a multiple of 16, which keeps consecutive states aligned to cache lines.
    """
    return -(-padded_rows * (padded_dim + 2) // LANES) * LANES


def scratch_floats(padded_rows: int, head_dim: int, padded_dim: int) -> int:
    """Return the scratch that one thread needs, in floats; a multiple of 16."""
    rows = padded_rows * (head_dim + TILE + 1)
    stage = STRIPS * LANES * (head_dim + padded_dim) + padded_dim
    total = 2 * state_floats(padded_rows, padded_dim) + rows + stage + 12 * STRIPS + 8 * LANES
    return -(-total // LANES) * LANES
