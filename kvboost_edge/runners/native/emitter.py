"""Emission of operations that all kinds of layers use."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.linear.weight_formats import FORMATS, GROUP
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import (
    ACT_CLAMPED_SWIGLU,
    ACT_GATED_RELU2,
    ACT_GELU_TANH,
    ACT_RELU2,
    ACT_SILU,
)
from kvboost_edge.kernels.program.table import BufferRows
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.models.config.spec import ModelSpec
from kvboost_edge.models.packed.pack_plan import PackEntry, run_name
from kvboost_edge.models.packed.weight_file import PackedWeights
from kvboost_edge.runners.native.buffer_sizes import Sizes, padded

__all__ = ["ACTIVATIONS", "MAX_TILES", "Emitter"]

# Long runs stream weights from memory fastest: 2 units per thread give 20 to 50% more GB/s than 8.
_UNITS_PER_THREAD = 2
MAX_TILES = 256
# Matrices whose inputs are quantized to 16 bits. Errors in queries, keys and logits matter most,
# and the cost is lowest there.
_FINE = ("qkv", "embed", "head")
ACTIVATIONS = {
    "silu": ACT_SILU,
    "gelu_tanh": ACT_GELU_TANH,
    "clamped_swiglu": ACT_CLAMPED_SWIGLU,
    "relu2": ACT_RELU2,
    "gated_relu2": ACT_GATED_RELU2,
}


def _is_fine(name: str) -> bool:
    """Return whether the inputs of a matrix, or of some of its rows, are quantized to 16 bits."""
    return name.rpartition(".")[2].partition("+")[0] in _FINE


class Emitter:
    """Builder for the list of operations of a program.

    Attributes:
        ops: operations emitted so far.
        scaled_vectors: vectors created by `scaled`, by name. Operations contain their addresses.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: list[PackEntry],
        packed: PackedWeights,
        num_threads: int,
        *,
        is_wide: bool = False,
    ) -> None:
        self._is_wide = is_wide
        self.spec = spec
        self.packed = packed
        self.num_threads = num_threads
        self.entries = {entry.name: entry for entry in plan}
        self.sizes = Sizes.of(spec)
        self.hidden = BufferRows(lt.B_HIDDEN, self.sizes.hidden)
        self.normed = BufferRows(lt.B_NORMED, self.sizes.hidden)
        self.projected = BufferRows(lt.B_PROJECTED, self.sizes.projected)
        self.ops: list[lt.Operation] = []
        self.scaled_vectors: dict[str, npt.NDArray[np.float32]] = {}

    def kind(self, name: str) -> int:
        return FORMATS[self.entries[name].kind].kind

    def is_quantized(self, name: str) -> bool:
        return not FORMATS[self.entries[name].kind].is_float

    def is_wide(self, name: str) -> bool:
        """Return whether a matrix is multiplied in wide arithmetic: those of layers, not the head.

        Experts have their own operations, which are exact.
        """
        return self._is_wide and name.startswith("layer") and self.is_quantized(name)

    def read_by(self, name: str) -> int:
        """Return the weight format that a matrix's inputs are quantized for; 0 for floats."""
        return self.kind(name) if self.is_quantized(name) else 0

    def panel(self, reader: str, buffer: int = lt.B_PANEL) -> lt.PanelTarget:
        """Return the panel that receives the quantized input of the matrix `reader`.

        In wide arithmetic there is none, and `widen` must follow.
        """
        if not self.is_quantized(reader) or self.is_wide(reader):
            return lt.PanelTarget()
        return lt.PanelTarget(self.kind(reader), buffer, int(_is_fine(reader)))

    def widen(self, source: BufferRows, count: int, reader: str, buffer: int = lt.B_PANEL) -> None:
        """Emit the input of the matrix `reader` in wide arithmetic, if it is multiplied in it."""
        if self.is_wide(reader):
            panel = lt.PanelTarget(0, buffer, int(_is_fine(reader)))
            self.ops.append(lt.WidePanelOp(source, count, panel))

    def scaled(self, name: str, factors: npt.NDArray[np.float32]) -> int:
        """Return the address of a packed vector with its first elements times `factors`."""
        if (factors == 1).all():
            return self.packed.address(name)
        if name not in self.scaled_vectors:
            self.scaled_vectors[name] = self.packed.array(name).view(np.float32).copy()
            self.scaled_vectors[name][: len(factors)] *= factors
        return self.scaled_vectors[name].ctypes.data

    def norm(self, weight: str, reader: str, *, factor: float = 1.0) -> None:
        """Emit a norm of the hidden state as input of the matrix `reader`.

        Args:
            weight: name of the norm's weight.
            reader: name of the matrix.
            factor: factor applied to the result.
        """
        size = self.spec.hidden_size
        address = self.scaled(weight, np.full(size, factor, dtype=np.float32))
        self.ops.append(
            lt.NormOp(self.hidden, self.normed, size, address, self.spec.eps, self.panel(reader))
        )
        self.widen(self.normed, size, reader)

    def sub_norm(
        self, weight: str, rows: BufferRows, size: int, reader: str, *, buffer: int = lt.B_PANEL
    ) -> None:
        """Emit a norm of rows, in place, as input of the matrix `reader`.

        Args:
            weight: name of the norm's weight.
            rows: the rows.
            size: number of channels.
            reader: name of the matrix.
            buffer: panel that a quantized matrix reads.
        """
        panel = self.panel(reader, buffer)
        address = self.packed.address(weight)
        self.ops.append(lt.NormOp(rows, rows, size, address, self.spec.eps, panel))
        self.widen(rows, size, reader, buffer)

    def quantize(self, source: BufferRows, count: int, reader: str) -> None:
        if self.is_wide(reader):
            self.widen(source, count, reader)
        elif self.is_quantized(reader):
            self.ops.append(lt.QuantizeOp(source, count, self.panel(reader)))

    def matrix(self, name: str, unit: int, num_units: int, panel: int) -> lt.PackedMatrix:
        """Return a matrix and its bias, divided into runs of tiles or groups.

        Args:
            name: name of the matrix.
            unit: maximum number of tiles or groups in a run.
            num_units: number of tiles or groups in the matrix.
            panel: buffer of the quantized inputs.
        """
        return lt.PackedMatrix(
            self.kind(name),
            self.entries[name].inputs,
            self.packed.address(name),
            self.packed.address(f"{name}.scales"),
            self.packed.address(f"{name}.minima"),
            self.packed.address(f"{name}_bias"),
            max(1, min(unit, num_units // (_UNITS_PER_THREAD * self.num_threads))),
            panel,
            int(_is_fine(name)),
        )

    def linear(
        self,
        name: str,
        source: BufferRows,
        out: BufferRows,
        *,
        add: bool = False,
        factor: float = 1.0,
        panel: int = lt.B_PANEL,
        most_rows: int | None = None,
    ) -> None:
        """Emit the product with a matrix, which may be stored in several runs of rows.

        A matrix with float weights reads `source`. Other matrices read `panel`. Rows of the matrix
        after the first `most_rows` are not computed.
        """
        bias = self.packed.address(f"{name}_bias")
        done = 0
        index = 0
        while (run := run_name(name, index)) in self.entries:
            rows = self.entries[run].rows
            if most_rows is not None:
                rows = min(rows, most_rows - done)
            matrix = self.matrix(run, MAX_TILES, -(-rows // LANES), panel)
            matrix = matrix._replace(bias=bias + 4 * done if bias else 0)
            to = out._replace(first=out.first + done)
            if self.is_wide(run):
                self.ops.append(lt.WideLinearOp(to, matrix, rows, int(add), factor))
            else:
                self.ops.append(lt.LinearOp(source, to, matrix, rows, int(add), factor))
            done += rows
            index += 1

    def gated(self, layer: str, source: BufferRows, inner: int, scalar: float) -> None:
        """Emit an MLP that adds to the hidden state, then multiply the hidden state by `scalar`."""
        rows = self.inner(layer, source, inner)
        factor = self.spec.factors.mlp_out
        names = (f"{layer}down", f"{layer}mlp_out")
        self.into_hidden(
            names[0], rows, names[1], panel=lt.B_INNER, sum_factor=scalar, factor=factor
        )

    def inner(self, layer: str, source: BufferRows, inner: int) -> BufferRows:
        """Emit the gate and up projections (or up alone) and the activation.

        Returns:
            The rows that a float down projection reads. A quantized one reads B_INNER.
        """
        spec = self.spec
        way_in = layer + spec.family.way_in
        down = f"{layer}down"
        rows = BufferRows(lt.B_NORMED, padded(inner, GROUP))
        act = ACTIVATIONS[spec.activation]
        sub_norms = bool(spec.family.sub_norms)
        is_quantized = self.is_quantized(way_in) and self.is_quantized(down)
        if inner % GROUP == 0 and is_quantized and not sub_norms:
            matrix = self.matrix(way_in, MAX_TILES // 4, inner // GROUP, lt.B_PANEL)
            channels = lt.InnerChannels(inner, act, self.kind(down))
            kind = lt.WideGatedOp if self.is_wide(way_in) else lt.GatedOp
            self.ops.append(kind(matrix, channels, lt.B_INNER))
        else:
            self.linear(way_in, source, self.projected)
            # Without a gate, `by` is ignored but needs a valid address.
            by = BufferRows() if spec.family.gated else self.projected
            panel = lt.PanelTarget() if sub_norms else self.panel(down, lt.B_INNER)
            self.ops.append(lt.ActivateOp(self.projected, rows, inner, act, by, panel))
            if sub_norms:
                self.sub_norm(f"{layer}mlp_sub", rows, inner, down, buffer=lt.B_INNER)
            else:
                self.widen(rows, inner, down, lt.B_INNER)
        return rows

    def into_hidden(
        self,
        name: str,
        source: BufferRows,
        norm: str,
        *,
        panel: int = lt.B_PANEL,
        sum_factor: float = 1.0,
        factor: float = 1.0,
    ) -> None:
        """Emit a matrix product that is added to the hidden state.

        Args:
            name: name of the matrix.
            source: input rows.
            norm: name of the norm after the product, for families that have one.
            panel: buffer of the quantized inputs.
            sum_factor: factor applied to the hidden state after the addition. It requires `norm`.
            factor: factor of the product.
        """
        spec = self.spec
        if spec.family.norms == "pre":
            factor *= spec.residual_factor
            self.linear(name, source, self.hidden, add=True, factor=factor, panel=panel)
            return
        self.linear(name, source, self.projected, panel=panel, factor=factor)
        self.ops.append(
            lt.AddNormOp(
                self.projected,
                self.hidden,
                spec.hidden_size,
                self.packed.address(norm),
                spec.eps,
                spec.residual_factor,
                sum_factor,
            )
        )
