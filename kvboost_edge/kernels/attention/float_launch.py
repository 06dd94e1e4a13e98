"""Entry point of paged attention over float KV: argument checks, buffers and threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.block_selection import selection_floats
from kvboost_edge.kernels.attention.call import (
    NUM_COUNTERS,
    UNITS_DONE,
    AttentionCall,
    AttentionShape,
    scratch_floats,
    state_floats,
)
from kvboost_edge.kernels.attention.float_attend import attend
from kvboost_edge.kernels.attention.float_tiles import ROWS
from kvboost_edge.kernels.attention.paged import (
    LOG2_E,
    AttentionOptions,
    Floats,
    KVPool,
    PagedBatch,
    QueryRotation,
    WorkPlan,
    aligned_empty,
    plan_work,
    storage_kind,
)
from kvboost_edge.kernels.attention.sparse_attend import SparseCall, attend_sparse
from kvboost_edge.kernels.team import KernelTeam
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.segments import Segment, has_delta, turned_positions

__all__ = [
    "AttentionWorkspace",
    "check_shapes",
    "check_turning",
    "is_small",
    "make_call",
    "paged_attention",
]

_NO_SINKS = np.empty(0, dtype=np.float32)
_NO_TURNING = QueryRotation(
    np.empty((0, 0, 0), np.float32), np.empty((0, 0), np.float32), np.empty((0, 0), np.float32)
)
# A call with fewer steps of 4 rows x 64 tokens x 64 dims (at least 0.25 us each) is nearly over
# before a helper is awake. Times alone and with one helper: 67 and 67 us at 128 steps, 116 and 89
# us at 256 steps, 224 and 146 us at 512 steps.
_STEPS_TO_SHARE = 200


class AttentionWorkspace:
    """A thread team, and buffers that grow to the size of the largest call."""

    def __init__(self, num_threads: int) -> None:
        self.team = KernelTeam(num_threads)
        self._scratch: Floats = aligned_empty((0,), np.float32)
        self._partials: Floats = aligned_empty((0,), np.float32)

    @property
    def num_threads(self) -> int:
        return self.team.num_threads

    def scratch(self, num_floats: int) -> Floats:
        """Return float32 [num_threads, num_floats], uninitialized, aligned to 64 bytes."""
        if self._scratch.size < self.num_threads * num_floats:
            self._scratch = aligned_empty((self.num_threads * num_floats,), np.float32)
        return self._scratch[: self.num_threads * num_floats].reshape(self.num_threads, num_floats)

    def partials(self, count: int, num_floats: int) -> Floats:
        """Return float32 [count, num_floats], uninitialized, aligned to 64 bytes."""
        if self._partials.size < count * num_floats:
            self._partials = aligned_empty((count * num_floats,), np.float32)
        return self._partials[: count * num_floats].reshape(count, num_floats)

    def close(self) -> None:
        """Stop the threads and free the buffers."""
        self._scratch = aligned_empty((0,), np.float32)
        self._partials = aligned_empty((0,), np.float32)
        self.team.close()


def paged_attention(
    queries: Floats,
    pool: KVPool,
    batch: PagedBatch,
    options: AttentionOptions,
    workspace: AttentionWorkspace | None = None,
    plan: WorkPlan | None = None,
    turning: QueryRotation | None = None,
) -> tuple[Floats, Floats]:
    """Compute attention of a flat batch over its sequences' blocks.

    Attention is causal unless `options.ahead` is set. Block ids and lengths are not checked.

    Args:
        queries: float32 [num_tokens, num_q_heads, head_dim].
        pool: KV of one layer.
        batch: query rows and block tables of each sequence.
        options: softmax scale, window, softcap, sinks.
        workspace: threads and buffers; None uses one thread and temporary buffers.
        plan: result of `plan_work` for this batch, head counts and window; None computes it.
        turning: queries before RoPE; required if the batch has segments with a delta.

    Returns:
        (out, lse): float32 like `queries`, float32 [num_tokens, num_q_heads].

    Raises:
        ConfigError: shapes do not match, or `turning` is missing.
    """
    space = workspace or AttentionWorkspace(1)
    heads_per_kv = check_shapes(queries, pool, options)
    check_turning(queries, batch, turning)
    if plan is None:
        plan = plan_work(
            batch,
            heads_per_kv,
            pool.keys.shape[1],
            options.window,
            space.num_threads,
            options.ahead,
        )
    call = make_call(queries, pool, batch, options, space, plan, turning=turning)
    ranges = batch.sparse_ranges
    kernel: Any = attend if ranges is None else attend_sparse
    given = call if ranges is None else SparseCall(call, _plain(ranges, np.int32))
    if is_small(call, plan):
        kernel(given)
    else:
        num_units = len(plan.items) * call.shape.num_kv_heads
        space.team.run(kernel, given, call.counters, UNITS_DONE, num_units)
    return call.out, call.lse


def check_shapes(queries: Floats, pool: KVPool, options: AttentionOptions) -> int:
    """Return the query heads per KV head; raise ConfigError if the shapes do not match."""
    num_kv_heads, head_dim = pool.keys.shape[1:3]
    _, num_q_heads, query_dim = queries.shape
    if query_dim != head_dim or num_q_heads % num_kv_heads:
        raise ConfigError(
            f"queries {queries.shape} do not fit {num_kv_heads} KV heads of size {head_dim}: the "
            "dims must be equal, and the query heads must be a multiple of the KV heads"
        )
    if options.sinks is not None and options.sinks.shape != (num_q_heads,):
        raise ConfigError(
            f"sinks have shape {options.sinks.shape}, expected ({num_q_heads},): one per query head"
        )
    return int(num_q_heads // num_kv_heads)


def check_turning(queries: Floats, batch: PagedBatch, turning: QueryRotation | None) -> None:
    """Raise ConfigError if segments have a delta and `turning` is missing or too short."""
    if batch.segments is None or not has_delta(batch.segments):
        return
    if turning is None:
        deltas = Segment(*batch.segments.T).delta.tolist()
        raise ConfigError(
            f"segments with delta {deltas} contain keys computed at other positions; pass the "
            "queries before RoPE (turning)"
        )
    needed = turned_positions(batch.segments, batch.seq_lens)
    rows = min(len(turning.cos), len(turning.sin))
    if turning.queries.shape != queries.shape or rows < needed:
        raise ConfigError(
            f"queries before RoPE must have shape {queries.shape}, got {turning.queries.shape}, "
            f"and RoPE tables must have at least {needed} positions, got {rows}"
        )


def make_call(
    queries: Floats,
    pool: KVPool,
    batch: PagedBatch,
    options: AttentionOptions,
    space: AttentionWorkspace,
    plan: WorkPlan,
    more_scratch: Callable[[int, int], int] | None = None,
    turning: QueryRotation | None = None,
) -> AttentionCall:
    """Return a call with newly allocated outputs and the workspace's buffers.

    Args:
        queries: float32 [num_tokens, num_q_heads, head_dim].
        pool: KV of one layer.
        batch: query rows and block tables of each sequence.
        options: softmax scale, window, softcap, sinks.
        space: threads and buffers.
        plan: result of `plan_work`.
        more_scratch: function (padded_rows, padded_dim) -> floats per thread to add to the scratch
            of float attention.
        turning: queries before RoPE, for segments with a delta.
    """
    num_kv_heads, head_dim, block_size = pool.keys.shape[1:]
    num_tokens, num_q_heads, _ = queries.shape
    heads_per_kv = num_q_heads // num_kv_heads
    padded_dim = _round_up(head_dim, LANES)
    padded_rows = _round_up(plan.tile_rows * heads_per_kv, ROWS)
    extra = 0 if more_scratch is None else _round_up(more_scratch(padded_rows, padded_dim), LANES)
    if batch.sparse_ranges is not None:
        longest = int(batch.seq_lens.max())
        extra += _round_up(selection_floats(heads_per_kv, padded_dim, longest), LANES)
    shape = AttentionShape(
        num_kv_heads=num_kv_heads,
        heads_per_kv=heads_per_kv,
        head_dim=head_dim,
        padded_dim=padded_dim,
        padded_rows=padded_rows,
        state_floats=state_floats(padded_rows, padded_dim),
        scratch_floats=scratch_floats(padded_rows, head_dim, padded_dim) + extra,
        block_size=block_size,
        kind=storage_kind(pool),
        window=options.window,
        softcap=float(options.softcap) * LOG2_E,
        softmax_scale=float(options.softmax_scale) * LOG2_E,
        ahead=options.ahead,
    )
    tables = _plain(batch.block_tables, np.int32)
    scratch = space.scratch(shape.scratch_floats)
    unrotated, cos, sin = (_plain(array, np.float32) for array in turning or _NO_TURNING)
    return AttentionCall(
        queries=_plain(queries, np.float32),
        out=np.empty((num_tokens, num_q_heads, head_dim), dtype=np.float32),
        lse=np.empty((num_tokens, num_q_heads), dtype=np.float32),
        keys=pool.keys.ctypes.data,
        values=pool.values.ctypes.data,
        sinks=_NO_SINKS if options.sinks is None else _plain(options.sinks, np.float32),
        partials=space.partials(plan.num_partials * num_kv_heads, shape.state_floats),
        scratch=scratch,
        counters=np.zeros(NUM_COUNTERS + plan.num_splits * num_kv_heads, dtype=np.int64),
        cu_seqlens_q=_plain(batch.cu_seqlens_q, np.int32),
        seq_lens=_plain(batch.seq_lens, np.int32),
        block_tables=tables,
        max_blocks=tables.shape[1],
        items=plan.items,
        num_items=len(plan.items),
        num_threads=len(scratch),
        unrotated=unrotated,
        unrotated_step=num_q_heads * head_dim,
        cos=cos,
        sin=sin,
        half=cos.shape[1],
        shape=shape,
    )


def is_small(call: AttentionCall, plan: WorkPlan) -> bool:
    """Return whether the call would end before a helper is awake."""
    return plan.num_steps * call.shape.num_kv_heads * call.shape.head_dim < _STEPS_TO_SHARE * 64


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _plain(array: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return a C-contiguous, writable array of the dtype; copy only if needed."""
    plain = np.ascontiguousarray(array, dtype=dtype)
    return plain if plain.flags.writeable else plain.copy()
