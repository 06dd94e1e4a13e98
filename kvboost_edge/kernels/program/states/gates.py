"""The two numbers with which a token turns a state, of each head of values: they lie behind the
values in B_VALUE.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.route import sigmoid_f32
from kvboost_edge.kernels.program.table import ProgramJob
from kvboost_edge.kernels.vectors import exp_f32, fma_f32, load_f32, store_f32

__all__ = ["gates", "gates_at", "softplus_f32"]

_MAX_EXPONENT = np.float32(88.0)
_SSD = lt.RULES["ssd"]


@kernel
def softplus_f32(x: Any) -> Any:
    """log(1 + exp(x)) = max(x, 0) + log1p(y), y = exp(-|x|); log1p(y) = 2 artanh(s), s = y / (2 +
    y) <= 1 / 3, by its series, whose first omitted term is below 2e-8.
    """
    one = np.float32(1.0)
    two = np.float32(2.0)
    y = exp_f32(-abs(x))
    s = y / (two + y)
    square = s * s
    series = np.float32(1.0 / 13.0)
    series = fma_f32(series, square, np.float32(1.0 / 11.0))
    series = fma_f32(series, square, np.float32(1.0 / 9.0))
    series = fma_f32(series, square, np.float32(1.0 / 7.0))
    series = fma_f32(series, square, np.float32(1.0 / 5.0))
    series = fma_f32(series, square, np.float32(1.0 / 3.0))
    series = fma_f32(series, square, one)
    return fma_f32(two * s, series, x if x > np.float32(0.0) else np.float32(0.0))


@kernel
def gates(job: ProgramJob, op: Any, params: Any, token: int) -> None:
    """(share, decay) of each head of values, made of a row [b | a]; of RULES["ssd"] (time, decay),
    of a row [dt].
    """
    heads = op[lt.F_HEADS]
    is_ssd = op[lt.F_RULE] == _SSD
    source = job.buffers[op[lt.F_SRC]] + 4 * (token * op[lt.F_SRC_STEP] + op[lt.F_BY_FIRST])
    wide_at = source if is_ssd else source + 4 * heads
    least = params[lt.P_LEAST]
    most = params[lt.P_MOST]
    out = gates_at(job, op) + 8 * token
    for head in range(heads):
        first = softplus_f32(load_f32(wide_at + 4 * head) + load_f32(op[lt.F_DT_BIAS] + 4 * head))
        if is_ssd and first < least:  # and not min() and max(), which may lose a NaN
            first = least
        if is_ssd and first > most:
            first = most
        power = load_f32(op[lt.F_DECAY] + 4 * head) * first
        if power > _MAX_EXPONENT:
            power = _MAX_EXPONENT
        if not is_ssd:
            first = sigmoid_f32(load_f32(source + 4 * head))
        store_f32(out, first)
        store_f32(out + 4, exp_f32(power))
        out += 8 * job.tokens


@kernel
def gates_at(job: ProgramJob, op: Any) -> Any:
    """Address of those of the first token."""
    return job.buffers[lt.B_VALUE] + 4 * job.tokens * op[lt.F_HEADS] * op[lt.F_DIM]
