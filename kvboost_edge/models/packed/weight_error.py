"""How far packed weights are from those of the checkpoint, tensor by tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvboost_edge.host.cpu import default_num_threads
from kvboost_edge.kernels.reference.weights import unpack_rows
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.packed.file import Packable, Progress
from kvboost_edge.models.packed.pack_plan import (
    VECTOR,
    PackEntry,
    check_tensors,
    pack_plan,
    plan_bytes,
    row_tables,
)
from kvboost_edge.models.packed.stream import pack_stream, read_rows
from kvboost_edge.models.weights.source import WeightSource

__all__ = ["MatrixError", "WeightReport", "measure_plan", "weight_error"]


@dataclasses.dataclass(frozen=True, slots=True)
class MatrixError:
    """One packed matrix: `kind` is its packed kind, `nbytes` what it takes packed.

    error, energy: sums of (weight - packed weight)^2 and of weight^2
    largest        the greatest |weight - packed weight|
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
    """All matrices of a model in a weight format. `nbytes`: of the packed sections, vectors
    included.
    """

    weights: str
    matrices: tuple[MatrixError, ...]
    nbytes: int

    @property
    def relative(self) -> float:
        """Relative L2 error over all matrices together."""
        energy = sum(matrix.energy for matrix in self.matrices)
        return (
            float((sum(matrix.error for matrix in self.matrices) / energy) ** 0.5)
            if energy
            else 0.0
        )

    @property
    def bits_per_weight(self) -> float:
        """Packed bits of the matrices, scales and minima included, for each of their weights."""
        return (
            8 * sum(m.nbytes for m in self.matrices) / sum(m.rows * m.inputs for m in self.matrices)
        )

    @property
    def worst(self) -> MatrixError:
        """The matrix of the largest relative error."""
        return max(self.matrices, key=lambda matrix: matrix.relative)


def weight_error(
    model: Packable, weights: str, *, progress: Progress | None = None
) -> WeightReport:
    """Pack a model's matrices in memory and compare each with the checkpoint's weights, in float64.

    weights: as in `pack_plan`. progress: called with (bytes packed, bytes in all). Raises
    ModelFormatError for models the native runner does not know and for weights the format cannot
    hold.
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
    """The report of a plan; `weights` is its name only."""
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
