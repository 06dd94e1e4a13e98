"""What follows the states' results: times silu of their gates, and a norm of a row's groups before
or behind that.
"""

from __future__ import annotations

from typing import Any

from kvboost_edge.kernels.attention.rope import copy_floats
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import ACT_SILU, activate_vectors
from kvboost_edge.kernels.program.norms import norm_row
from kvboost_edge.kernels.program.states.scan import value_at
from kvboost_edge.kernels.program.table import ProgramJob
from kvboost_edge.kernels.vectors import LANES

__all__ = ["gate"]


@kernel
def gate(job: ProgramJob, op: Any, eps: float, token: int) -> None:
    """A token's row of results, from where OP_SCAN left them and the gates in its source row."""
    width = op[lt.F_HEADS] * op[lt.F_DIM]
    groups = op[lt.F_GROUPS]
    gates = job.buffers[op[lt.F_SRC]] + 4 * (token * op[lt.F_SRC_STEP] + op[lt.F_SRC_FIRST])
    out = job.buffers[op[lt.F_DST]] + 4 * token * op[lt.F_DST_STEP]
    for tile in range(width // LANES):
        copy_floats(value_at(job, tile, token), LANES, out + 4 * LANES * tile)
    for stage in range(2):
        if stage != op[lt.F_GATE_FIRST]:
            activate_vectors(gates, out, ACT_SILU, width, width // LANES, out)
            continue
        for group in range(groups):
            count = width // groups
            at = out + 4 * group * count
            norm_row(at, op[lt.F_WEIGHT] + 4 * group * op[lt.F_WEIGHT_STEP], count, eps, at)
