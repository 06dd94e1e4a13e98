"""What the threads of one attention call share, where a unit works, and how large the buffers
are.
"""

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

# Counters of a job, int64; one per (split tile, kv head) follows, the number of its finished
# partitions.
NEXT_UNIT = 0
NUM_SCRATCH_USERS = 1
UNITS_DONE = 2
NUM_COUNTERS = 3


class AttentionShape(NamedTuple):
    """Sizes of one layer's attention. `padded_rows` is a multiple of 4, `padded_dim` of 16."""

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
    """All that the threads of one call share; arrays are C-contiguous and writable, so that one
    compilation serves all.

    Attributes:
        queries, out (float32 [num_tokens, num_q_heads, head_dim];): lse float32 [num_tokens,
            num_q_heads].
        keys, values: addresses of the pool's arrays.
        sinks: float32 [num_q_heads], or [0] for none.
        partials: float32 [num_partials * num_kv_heads, state_floats]: states of split partitions.
        scratch: float32 [num_threads, scratch_floats]; a thread takes a row when it joins.
        counters: int64, see NUM_COUNTERS.
        max_blocks: columns of block_tables; num_items: rows of items;  num_threads: rows of
            scratch.
        cu_seqlens_q, seq_lens, block_tables, items: int32, as in PagedBatch and WorkPlan.
        unrotated: the queries before rotation, a token's every `unrotated_step` floats; cos, sin:
            as in QueryRotation; half: rotary pairs. All empty or 0 where no segment has a delta.
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
    """An AttentionCall as addresses: handing arrays from function to function would cost atomic
    reference counts.

    Its fields are those of the call, without what is in RotationPointers; `sinks` is 0 for none.
    """

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
    """What an AttentionCall has for segments with a delta, as addresses; apart from a Job, of which
    every number is handed on with each 16 tokens.
    """

    unrotated: int
    unrotated_step: int
    cos: int
    sin: int
    half: int


class Unit(NamedTuple):
    """Where a unit works. Positions are counted from `shift`; the rows see tokens [low, high) at
    most.

    Attributes:
        first_index: entry of the block table that holds the tokens from `shift` on.
        whole: 0, or `high` where the rows' own tokens are in another segment: then all rows see all
            up to there.

    Attributes:
        query: address of float32 [padded_rows, head_dim], scaled; rows that fill up the last 4 are
            0.
        scores: address of float32 [padded_rows, 64]; rescale of [padded_rows].
        stage: address of the staged strips: 4 x keys [head_dim, 16], 4 x values [16, padded_dim], a
            row of zeros.
        table: address of the tile table, see float_tiles.py.

    A state is float32 sums [padded_rows, padded_dim], maxima [padded_rows], totals [padded_rows].
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
    """Floats of one state: sums, maxima, totals; a multiple of 16, so that states in a row stay
    aligned.
    """
    return -(-padded_rows * (padded_dim + 2) // LANES) * LANES


def scratch_floats(padded_rows: int, head_dim: int, padded_dim: int) -> int:
    """Floats of scratch that one thread needs, a multiple of 16."""
    rows = padded_rows * (head_dim + TILE + 1)
    stage = STRIPS * LANES * (head_dim + padded_dim) + padded_dim
    total = 2 * state_floats(padded_rows, padded_dim) + rows + stage + 12 * STRIPS + 8 * LANES
    return -(-total // LANES) * LANES
