"""Entry point of paged attention over quantized KV: argument checks, buffers and threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.call import UNITS_DONE
from kvboost_edge.kernels.attention.float_launch import (
    AttentionWorkspace,
    check_shapes,
    check_turning,
    is_small,
    make_call,
)
from kvboost_edge.kernels.attention.paged import (
    AttentionOptions,
    Floats,
    OwnBlocks,
    PagedBatch,
    QueryRotation,
    WorkPlan,
    plan_work,
)
from kvboost_edge.kernels.quantized_kv.code_attend import (
    CodedCall,
    attend_coded,
    coded_scratch_floats,
)
from kvboost_edge.kernels.quantized_kv.code_layout import CodeLayout
from kvboost_edge.kernels.quantized_kv.sparse_code_attend import (
    SparseCodedCall,
    attend_sparse_coded,
)

__all__ = ["paged_attention_coded"]


def paged_attention_coded(
    queries: Floats,
    codes: npt.NDArray[np.uint8],
    layout: CodeLayout,
    batch: PagedBatch,
    own: OwnBlocks,
    options: AttentionOptions,
    workspace: AttentionWorkspace | None = None,
    plan: WorkPlan | None = None,
    turning: QueryRotation | None = None,
) -> tuple[Floats, Floats]:
    """Compute causal attention over quantized blocks and the float16 copies of own blocks.

    Block ids and lengths are not checked.

    Args:
        queries: float32 [num_tokens, num_q_heads, head_dim].
        codes: uint8 [num_blocks, num_kv_heads, layout.nbytes], C-contiguous.
        layout: sizes and offsets of the codes of one block and KV head.
        batch: query rows and block tables of each sequence.
        own: float16 copies of the blocks that the pass writes.
        options: softmax scale, window, softcap, sinks.
        workspace: threads and buffers; None uses one thread and temporary buffers.
        plan: result of `plan_work` for this batch, head counts and window; None computes it.
        turning: queries before RoPE; required if the batch has segments with a delta.

    Returns:
        (out, lse): float32 like `queries`, float32 [num_tokens, num_q_heads].

    Raises:
        ConfigError: shapes do not match, `turning` is missing, or `options.ahead` is set.
    """
    if options.ahead:
        raise ConfigError(
            f"ahead={options.ahead} is not supported, because attention over quantized KV is "
            "causal; use ahead=0"
        )
    space = workspace or AttentionWorkspace(1)
    heads_per_kv = check_shapes(queries, own.pool, options)
    check_turning(queries, batch, turning)
    if plan is None:
        plan = plan_work(batch, heads_per_kv, codes.shape[1], options.window, space.num_threads)
    own_batch = batch._replace(block_tables=own.tables)
    plain = make_call(
        queries, own.pool, own_batch, options, space, plan, coded_scratch_floats, turning
    )
    tables = np.ascontiguousarray(batch.block_tables, dtype=np.int32)
    first = np.ascontiguousarray(own.first, dtype=np.int32)
    call = CodedCall(plain, codes.ctypes.data, layout, tables, tables.shape[1], first)
    ranges = batch.sparse_ranges
    kernel: Any = attend_coded if ranges is None else attend_sparse_coded
    given: Any = call
    if ranges is not None:
        given = SparseCodedCall(call, np.ascontiguousarray(ranges, dtype=np.int32))
    if is_small(plain, plan):
        kernel(given)
    else:
        num_units = len(plan.items) * codes.shape[1]
        space.team.run(kernel, given, plain.counters, UNITS_DONE, num_units)
    return plain.out, plain.lse
