"""`paged_attention`: checks, buffers and threads around the attention kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention import attend
from kvboost_edge.kernels.call import (
    NUM_COUNTERS,
    UNITS_DONE,
    AttentionCall,
    Shape,
    scratch_floats,
    state_floats,
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
# Below this many steps of 4 rows x 64 tokens x 64 dims (0.25 us and more each) the call is nearly over before a helper
# is awake. Measured alone and with one helper: 67 and 67 us at 128 steps, 116 and 89 us at 256, 224 and 146 at 512.
_STEPS_TO_SHARE = 200


class AttentionWorkspace:
    """Threads and buffers that calls share; buffers grow to the largest call and stay."""

    def __init__(self, num_threads: int) -> None:
        self.team = KernelTeam(num_threads)
        self._scratch: Floats = aligned_empty((0,), np.float32)
        self._parts: Floats = aligned_empty((0,), np.float32)

    @property
    def num_threads(self) -> int:
        return self.team.num_threads

    def scratch(self, num_floats: int) -> Floats:
        """float32 [num_threads, num_floats], contents undefined."""
        if self._scratch.size < self.num_threads * num_floats:
            self._scratch = aligned_empty((self.num_threads * num_floats,), np.float32)
        return self._scratch[: self.num_threads * num_floats].reshape(self.num_threads, num_floats)

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
    if options.sinks is not None and options.sinks.shape != (num_q_heads,):
        raise ConfigError(f"sinks of shape {options.sinks.shape} must have one number for each of {num_q_heads} heads")
    space = workspace or AttentionWorkspace(1)
    group = num_q_heads // num_kv_heads
    if plan is None:
        plan = plan_work(batch, group, num_kv_heads, options.window, space.num_threads)
    padded_dim, padded_rows = _round_up(head_dim, LANES), _round_up(plan.tile_rows * group, ROWS)
    shape = Shape(
        num_kv_heads=num_kv_heads,
        heads_per_group=group,
        head_dim=head_dim,
        padded_dim=padded_dim,
        padded_rows=padded_rows,
        state_floats=state_floats(padded_rows, padded_dim),
        scratch_floats=scratch_floats(padded_rows, head_dim, padded_dim),
        block_size=block_size,
        kind=kind,
        window=options.window,
        softcap=float(options.softcap),
        softmax_scale=float(options.softmax_scale),
    )
    out = np.empty((num_tokens, num_q_heads, head_dim), dtype=np.float32)
    lse = np.empty((num_tokens, num_q_heads), dtype=np.float32)
    counters = np.zeros(NUM_COUNTERS + plan.num_groups * num_kv_heads, dtype=np.int64)
    call = AttentionCall(
        queries=_plain(queries, np.float32),
        out=out,
        lse=lse,
        keys=pool.keys.ctypes.data,
        values=pool.values.ctypes.data,
        sinks=_NO_SINKS if options.sinks is None else _plain(options.sinks, np.float32),
        parts=space.parts(plan.num_parts * num_kv_heads, shape.state_floats),
        scratch=space.scratch(shape.scratch_floats),
        counters=counters,
        cu_seqlens_q=_plain(batch.cu_seqlens_q, np.int32),
        seq_lens=_plain(batch.seq_lens, np.int32),
        block_tables=_plain(batch.block_tables, np.int32),
        items=plan.items,
        shape=shape,
    )
    if plan.num_steps * num_kv_heads * head_dim < _STEPS_TO_SHARE * 64:
        attend(call)
    else:
        space.team.run(attend, call, counters, UNITS_DONE, len(plan.items) * num_kv_heads)
    return out, lse


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _plain(array: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """C-contiguous, writable and of the dtype: the same array where it is that already."""
    plain = np.ascontiguousarray(array, dtype=dtype)
    return plain if plain.flags.writeable else plain.copy()
