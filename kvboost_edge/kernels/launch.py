"""`paged_attention`: checks, buffers and threads around the attention kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention import (
    NUM_COUNTERS,
    UNITS_DONE,
    AttentionJob,
    Shape,
    attend,
    part_floats,
    scratch_floats,
)
from kvboost_edge.kernels.paged import (
    AttentionOptions,
    Floats,
    KVPool,
    PagedBatch,
    WorkPlan,
    aligned_empty,
    plan_work,
    storage_kind,
)
from kvboost_edge.kernels.team import KernelTeam
from kvboost_edge.kernels.tiles import ROWS
from kvboost_edge.kernels.vectors import LANES

__all__ = ["AttentionWorkspace", "paged_attention"]

_NO_SINKS = np.empty(0, dtype=np.float32)


class AttentionWorkspace:
    """Threads and buffers that calls share; buffers grow to the largest call and stay."""

    def __init__(self, num_threads: int) -> None:
        self.team = KernelTeam(num_threads)
        self._scratch: Floats = aligned_empty((0, 0), np.float32)
        self._parts: Floats = aligned_empty((0,), np.float32)

    @property
    def num_threads(self) -> int:
        return self.team.num_threads

    def scratch(self, num_floats: int) -> Floats:
        """float32 [num_threads, at least num_floats], rows aligned to cache lines, contents undefined."""
        if self._scratch.shape[1] < num_floats:
            self._scratch = aligned_empty((self.num_threads, num_floats), np.float32)
        return self._scratch

    def parts(self, num_parts: int, num_floats: int) -> Floats:
        """float32 [num_parts, num_floats], contents undefined."""
        if self._parts.size < num_parts * num_floats:
            self._parts = aligned_empty((num_parts * num_floats,), np.float32)
        return self._parts[: num_parts * num_floats].reshape(num_parts, num_floats)

    def close(self) -> None:
        self.team.close()


def paged_attention(
    queries: Floats,
    pool: KVPool,
    batch: PagedBatch,
    options: AttentionOptions,
    workspace: AttentionWorkspace | None = None,
    plan: WorkPlan | None = None,
) -> tuple[Floats, Floats]:
    """Causal attention of a flat batch over its sequences' blocks.

    queries    float32 [num_tokens, num_q_heads, head_dim]
    workspace  None: one thread and buffers of its own
    plan       the batch's `plan_work` for these head counts and this window, if it is known already

    Returns (out float32 like queries, lse float32 [num_tokens, num_q_heads]). Block ids and lengths are trusted.
    """
    kind = storage_kind(pool)
    _, num_kv_heads, head_dim, block_size = pool.keys.shape
    num_tokens, num_q_heads, query_dim = queries.shape
    if query_dim != head_dim or num_q_heads % num_kv_heads:
        raise ConfigError(
            f"queries {queries.shape} do not fit {num_kv_heads} kv heads of {head_dim}: the dims must be equal and the "
            "query heads a multiple of the kv heads"
        )
    space = workspace or AttentionWorkspace(1)
    group = num_q_heads // num_kv_heads
    if plan is None:
        plan = plan_work(batch, group, num_kv_heads, options.window, space.num_threads)
    shape = Shape(
        num_kv_heads=num_kv_heads,
        heads_per_group=group,
        head_dim=head_dim,
        padded_dim=_round_up(head_dim, LANES),
        padded_rows=_round_up(plan.tile_rows * group, ROWS),
        block_size=block_size,
        kind=kind,
        window=options.window,
        softcap=float(options.softcap),
        softmax_scale=float(options.softmax_scale),
    )
    out = np.empty((num_tokens, num_q_heads, head_dim), dtype=np.float32)
    lse = np.empty((num_tokens, num_q_heads), dtype=np.float32)
    counters = np.zeros(NUM_COUNTERS + plan.num_groups * num_kv_heads, dtype=np.int64)
    job = AttentionJob(
        queries=np.ascontiguousarray(queries, dtype=np.float32),
        out=out,
        lse=lse,
        keys=pool.keys.ctypes.data,
        values=pool.values.ctypes.data,
        cu_seqlens_q=_int32(batch.cu_seqlens_q),
        seq_lens=_int32(batch.seq_lens),
        block_tables=_int32(batch.block_tables),
        items=plan.items,
        sinks=_NO_SINKS if options.sinks is None else np.ascontiguousarray(options.sinks, dtype=np.float32),
        counters=counters,
        scratch=space.scratch(scratch_floats(shape)),
        parts=space.parts(plan.num_parts * num_kv_heads, part_floats(shape)),
        shape=shape,
    )
    space.team.run(attend, job, counters, UNITS_DONE, len(plan.items) * num_kv_heads)
    return out, lse


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _int32(array: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(array, dtype=np.int32)
