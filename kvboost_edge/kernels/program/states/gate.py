"""What follows the states' results: a norm of each head, times silu of its gate."""

from __future__ import annotations

from typing import Any

from kvboost_edge.kernels.attention.rope import copy_floats
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.norms import ACT_SILU, activate_vectors, norm_row
from kvboost_edge.kernels.program.states.scan import value_at
from kvboost_edge.kernels.program.table import ProgramJob
from kvboost_edge.kernels.program.tiles import tile_scratch
from kvboost_edge.kernels.vectors import LANES

__all__ = ["gate"]


@kernel
def gate(job: ProgramJob, op: Any, eps: float, token: int) -> None:
    """A token's row of results, from where OP_SCAN left them and the gates in its source row."""
    heads, dim, scratch = op[lt.F_HEADS], op[lt.F_DIM], tile_scratch()
    gates = job.buffers[op[lt.F_SRC]] + 4 * (token * op[lt.F_SRC_STEP] + op[lt.F_SRC_FIRST])
    out = job.buffers[op[lt.F_DST]] + 4 * token * op[lt.F_DST_STEP]
    vectors = dim // LANES
    for head in range(heads):
        for index in range(vectors):
            copy_floats(value_at(job, head * vectors + index, token), LANES, scratch + 4 * LANES * index)
        norm_row(scratch, op[lt.F_WEIGHT], dim, eps, scratch)
        place = 4 * head * dim
        activate_vectors(gates + place, scratch, ACT_SILU, dim, vectors, out + place)
