"""What follows the states' results in plain NumPy, in float64 or with the kernels' rounding
steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.reference.conv import silu_rows
from kvboost_edge.kernels.reference.floats import norm_rows_f32

__all__ = ["gated_rows"]

Floats = npt.NDArray[np.floating[Any]]


def gated_rows(
    rows: Floats, gates: Floats, weight: Floats | None, groups: int, eps: float, *, gate_first: bool
) -> Floats:
    """rows [tokens, width] times silu(gates), and an RMS norm of each of `groups` groups of a row,
    behind that or before it; none without weights. These are [width], or those of one group for
    all.
    """
    if weight is None:
        return _gated(rows, gates)
    if gate_first:
        return _normed(_gated(rows, gates), weight, groups, eps)
    return _gated(_normed(rows, weight, groups, eps), gates)


def _gated(rows: Floats, gates: Floats) -> Floats:
    result: Floats = silu_rows(gates) * rows
    return result


def _normed(rows: Floats, weight: Floats, groups: int, eps: float) -> Floats:
    cut = rows.reshape(len(rows), groups, rows.shape[1] // groups)
    each = weight.reshape(-1, cut.shape[2])
    if rows.dtype == np.float64:
        normed = cut / np.sqrt((cut * cut).mean(-1, keepdims=True) + eps) * each
    else:
        normed = norm_rows_f32(cut, each.astype(np.float32), eps)
    result: Floats = normed.reshape(rows.shape)
    return result
