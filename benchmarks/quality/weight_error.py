"""Errors of packed weights, measured against the checkpoint for each matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.kernels.reference.weights import unpack_rows
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.packed.pack_plan import (
    VECTOR,
    PackEntry,
    check_tensors,
    pack_plan,
    plan_bytes,
    row_tables,
)
from kvboost_edge.models.packed.stream import pack_stream, read_rows
from kvboost_edge.models.packed.weight_file import Packable, Progress
from kvboost_edge.models.weights.weight_source import WeightSource

__all__ = ["MatrixError", "WeightReport", "measure_plan", "weight_error"]


@dataclasses.dataclass(frozen=True, slots=True)
class MatrixError:
    """Error of one packed matrix.

    Attributes:
        kind: packed format.
        nbytes: packed size in bytes.
        error: sum of (weight - packed weight)^2.
        energy: sum of weight^2.
        largest: largest |weight - packed weight|.
    """

    name: str
    kind: str
    rows: int
    inputs: int
    nbytes: int
    error: float
    energy: float
    largest: float

    @property
    def relative(self) -> float:
        """Relative error in the L2 norm; 0 for a matrix of zeros."""
        return float((self.error / self.energy) ** 0.5) if self.energy else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class WeightReport:
    """Errors of all matrices of a model in a weight format.

    Attributes:
        nbytes: size of the packed sections in bytes, including vectors.
    """

    weights: str
    matrices: tuple[MatrixError, ...]
    nbytes: int

    @property
    def relative(self) -> float:
        """Relative L2 error over all matrices."""
        energy = sum(matrix.energy for matrix in self.matrices)
        return (
            float((sum(matrix.error for matrix in self.matrices) / energy) ** 0.5)
            if energy
            else 0.0
        )

    @property
    def bits_per_weight(self) -> float:
        """Packed bits per weight of the matrices, including scales and minima."""
        return (
            8 * sum(m.nbytes for m in self.matrices) / sum(m.rows * m.inputs for m in self.matrices)
        )

    @property
    def worst(self) -> MatrixError:
        """Matrix with the largest relative error."""
        return max(self.matrices, key=lambda matrix: matrix.relative)


def weight_error(
    model: Packable, weights: str, *, progress: Progress | None = None
) -> WeightReport:
    """Pack a model's matrices in memory and compare each with the checkpoint, in float64.

    Args:
        model: the model.
        weights: weight format, see `pack_plan`.
        progress: called with (bytes packed, total bytes).

    Raises:
        ModelFormatError: the native runner does not support the model, or the format cannot
            represent a weight.
    """
    with model.open_source() as source:
        spec = describe_model(model.config)
        plan = pack_plan(spec, weights, source)
        check_tensors(plan, source, row_tables(spec))
        return measure_plan(plan, source, weights, progress=progress)


def measure_plan(
    plan: Sequence[PackEntry],
    source: WeightSource,
    weights: str,
    *,
    progress: Progress | None = None,
) -> WeightReport:
    """Return the errors of a plan. `weights` is the format's name for the report."""
    matrices = [entry for entry in plan if entry.kind != VECTOR]
    total = sum(sum(entry.sizes) for entry in matrices)
    done = 0
    found: list[MatrixError] = []
    error = energy = largest = 0.0
    for piece, packed in pack_stream(matrices, source, default_num_threads()):
        entry = piece.entry
        wanted = read_rows(piece, source).astype(np.float64)
        off = unpack_rows(packed, piece.stop - piece.start, entry.inputs, entry.kind) - wanted
        error = error + float(np.vdot(off, off))
        energy = energy + float(np.vdot(wanted, wanted))
        largest = max(largest, float(np.abs(off).max()))
        done += sum(len(section) for section in packed[:3])
        if progress is not None:
            progress(done, total)
        if piece.is_last:
            found.append(
                MatrixError(
                    entry.name,
                    entry.kind,
                    entry.rows,
                    entry.inputs,
                    sum(entry.sizes),
                    error,
                    energy,
                    largest,
                )
            )
            error = energy = largest = 0.0
    return WeightReport(weights, tuple(found), plan_bytes(plan))
