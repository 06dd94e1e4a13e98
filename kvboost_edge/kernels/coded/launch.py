"""`paged_attention_coded`: buffers and threads around the attention kernel of quantized blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.attention.call import UNITS_DONE
from kvboost_edge.kernels.attention.launch import AttentionWorkspace, check_shapes, is_small, make_call
from kvboost_edge.kernels.attention.paged import AttentionOptions, Floats, OwnBlocks, PagedBatch, WorkPlan, plan_work
from kvboost_edge.kernels.coded.attend import CodedCall, attend_coded, coded_scratch_floats
from kvboost_edge.kernels.coded.layout import KVRecord

__all__ = ["paged_attention_coded"]


def paged_attention_coded(
    queries: Floats,
    records: npt.NDArray[np.uint8],
    record: KVRecord,
    batch: PagedBatch,
    own: OwnBlocks,
    options: AttentionOptions,
    workspace: AttentionWorkspace | None = None,
    plan: WorkPlan | None = None,
) -> tuple[Floats, Floats]:
    """Causal attention over quantized blocks, and over the float16 copy of each query's own block.

    queries    float32 [num_tokens, num_q_heads, head_dim]
    records    uint8 [num_blocks, num_kv_heads, record.nbytes], C-contiguous
    workspace  None: one thread and buffers of its own
    plan       the batch's `plan_work` for these head counts and this window, if it is known already

    Returns (out float32 like queries, lse float32 [num_tokens, num_q_heads]). Block ids and lengths are trusted.
    """
    space = workspace or AttentionWorkspace(1)
    group = check_shapes(queries, own.pool, options)
    if plan is None:
        plan = plan_work(batch, group, records.shape[1], options.window, space.num_threads)
    own_batch = PagedBatch(batch.cu_seqlens_q, batch.seq_lens, own.tables)
    plain = make_call(queries, own.pool, own_batch, options, space, plan, coded_scratch_floats)
    call = CodedCall(
        plain,
        records.ctypes.data,
        record,
        np.ascontiguousarray(batch.block_tables, dtype=np.int32),
        np.ascontiguousarray(own.first, dtype=np.int32),
    )
    if is_small(plain, plan):
        attend_coded(call)
    else:
        space.team.run(attend_coded, call, plain.counters, UNITS_DONE, len(plan.items) * records.shape[1])
    return plain.out, plain.lse
