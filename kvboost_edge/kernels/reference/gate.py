"""Gate and norm of recurrent layers in plain NumPy, in float64 or with float32 rounding steps."""

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
    """Return rows * silu(gates) with an RMS norm of each group of channels.

    Args:
        rows: [tokens, width].
        gates: [tokens, width].
        weight: [width], or [width / groups] shared by all groups; None for no norm.
        groups: number of groups per row.
        eps: epsilon of the norm.
        gate_first: True applies the gate before the norm.
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
    """Return rows with each of their `groups` parts normed separately."""
    cut = rows.reshape(len(rows), groups, rows.shape[1] // groups)
    each = weight.reshape(-1, cut.shape[2])
    if rows.dtype == np.float64:
        normed = cut / np.sqrt((cut * cut).mean(-1, keepdims=True) + eps) * each
    else:
        normed = norm_rows_f32(cut, each.astype(np.float32), eps)
    result: Floats = normed.reshape(rows.shape)
    return result
