"""RoPE settings recovered from the tables of cosines and sines in an ONNX graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.rope_kinds import RopeKind, rope_kind
from kvboost_edge.models.onnx.file import OnnxTensor
from kvboost_edge.models.onnx.tensors import read_rows

__all__ = ["rope_difference", "rope_settings"]

Doubles = npt.NDArray[np.float64]
# Rounding error of the tables' dtype, plus that of the float32 computation that made them.
_ROUNDING = {"F32": 1e-4, "F16": 1.5e-3, "BF16": 1e-2}
_PER_RADIAN = 3e-7
_THETAS = (1e4, 1e5, 5e5, 1e6, 1e7, 2e6, 3e6, 5e6, 1.5e5, 1.3e5, 1e3, 25e4, 2.5e5)
_DIGITS = 5

Tables = tuple[OnnxTensor, OnnxTensor]


def rope_difference(tables: Tables, kind: RopeKind, max_context: int) -> str:
    """Describe the first difference between tables and a RoPE, at positions below `max_context`.

    The result is "" if they agree except for rounding errors.
    """
    cosines, sines = tables
    for table in tables:
        if table.shape != cosines.shape or table.shape[1] != kind.half:
            return (
                f"table {table.name!r} has shape {table.shape}, but the config's RoPE has "
                f"{kind.half} pairs"
            )
    if cosines.shape[0] < max_context:
        return (
            f"table {cosines.name!r} has {cosines.shape[0]} positions, but the context has "
            f"{max_context}"
        )
    frequencies = np.array(kind.frequencies, dtype=np.float64)
    for row in _sample(min(cosines.shape[0], max_context)):
        angles = row * frequencies
        allowed = _ROUNDING[cosines.dtype] * max(kind.factor, 1.0) + _PER_RADIAN * angles
        for table, wanted in ((cosines, np.cos(angles)), (sines, np.sin(angles))):
            off = np.abs(_row(table, row) - kind.factor * wanted)
            if not (off <= allowed).all():
                pair = int(np.argmax(np.nan_to_num(off - allowed, nan=np.inf)))
                return (
                    f"table {table.name!r} has {_row(table, row)[pair]:.6g} at position {row}, "
                    f"pair {pair}, but the config's RoPE gives {kind.factor * wanted[pair]:.6g}"
                )
    return ""


def rope_settings(tables: Tables, head_dim: int, max_context: int) -> dict[str, Any]:
    """Return `rope_parameters` that reproduce the tables.

    The RoPE type is default, linear, or one with a divisor for each frequency.

    Raises:
        ModelFormatError: no settings reproduce the tables, because frequencies depend on the
            position or cosines are scaled.
    """
    cosines, sines = tables
    if min(cosines.shape[0], sines.shape[0]) < 2 or cosines.shape != sines.shape:
        raise ModelFormatError(
            f"{cosines.path}: tables {cosines.name!r} and {sines.name!r} are not RoPE tables"
        )
    frequencies = np.arctan2(_row(sines, 1), _row(cosines, 1))
    if not ((frequencies > 0) & (frequencies < math.pi)).all():
        raise ModelFormatError(
            f"{cosines.path}: tables {cosines.name!r} and {sines.name!r} do not contain RoPE angles"
        )
    problem = ""
    for settings in _candidates(frequencies):
        if 2 * cosines.shape[1] != head_dim:
            settings["partial_rotary_factor"] = 2 * cosines.shape[1] / head_dim
        try:
            kind = rope_kind(settings, head_dim, max_context)
        except ModelFormatError as error:
            problem = problem or str(error)
            continue
        difference = rope_difference(tables, kind, min(max_context, cosines.shape[0]))
        if not difference:
            return settings
        problem = difference
    raise ModelFormatError(
        f"{cosines.path}: no constant RoPE frequencies reproduce the tables ({problem}); put the "
        "model's config.json next to the file"
    )


def _candidates(frequencies: Doubles) -> Iterator[dict[str, Any]]:
    half = len(frequencies)
    first = float(frequencies[0])
    exact_theta = (first / float(frequencies[-1])) ** (half / (half - 1)) if half > 1 else 1e4
    theta = _rounded(exact_theta)
    for base in (theta, float(f"{exact_theta:.7g}"), *_THETAS):
        yield {"rope_type": "default", "rope_theta": base}
        if abs(first - 1) > 1e-3:
            yield {"rope_type": "linear", "rope_theta": base, "factor": _rounded(1 / first)}
    exact = np.power(theta, -np.arange(half) / half)
    yield {
        "rope_type": "factors",
        "rope_theta": theta,
        "factors": [float(f) for f in exact / frequencies],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _sample(count: int) -> list[int]:
    """Return the positions to compare: the first ones, then at growing distances, and the last."""
    rows = [0, 1]
    step = 1
    while rows[-1] + step < count:
        rows.append(rows[-1] + step)
        step = max(1, rows[-1] // 4)
    return [*(row for row in rows if row < count), count - 1]


def _row(table: OnnxTensor, row: int) -> Doubles:
    found: Doubles = read_rows(table, row, row + 1).astype(np.float64)[0]
    return found
