"""Operations of a pass as rows of numbers: what layers of all kinds are written with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.linear.weight_tiles import GROUP
from kvboost_edge.kernels.linear.weights import NUMBERS
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import (
    ACT_CLAMPED_SWIGLU,
    ACT_GELU_TANH,
    ACT_RELU2,
    ACT_SILU,
)
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.models.config.spec import ModelSpec
from kvboost_edge.models.packed.file import PackedWeights
from kvboost_edge.models.packed.plan import PackEntry, run_name
from kvboost_edge.runners.native.sizes import Sizes, padded

__all__ = ["ACTIVATIONS", "MAX_TILES", "Emitter", "Rows"]

# Where weights stream from memory long runs are best: 2 units a thread instead of 8 raise GB/s by a
# fifth to a half.
_UNITS_PER_THREAD = 2
MAX_TILES = 256
# Matrices whose inputs are quantized to 16 bits: errors of queries, keys and logits show most, and
# the cost is least.
_FINE = ("qkv", "embed", "head")
Rows = tuple[int, int]
"""A buffer and the floats in a row of it."""
ACTIVATIONS = {
    "silu": ACT_SILU,
    "gelu_tanh": ACT_GELU_TANH,
    "clamped_swiglu": ACT_CLAMPED_SWIGLU,
    "relu2": ACT_RELU2,
}


def _is_fine(name: str) -> bool:
    """Whether the inputs of a matrix have 16-bit codes."""
    return name.rpartition(".")[2] in _FINE


class Emitter:
    """rows, floats: of each operation so far, what of its fields and parameters is not usual.
    scaled_vectors: by the names of what they were made of, see `scaled`; operations point to them.
    """

    def __init__(
        self, spec: ModelSpec, plan: list[PackEntry], packed: PackedWeights, num_threads: int
    ) -> None:
        self.spec = spec
        self.packed = packed
        self.num_threads = num_threads
        self.entries = {entry.name: entry for entry in plan}
        self.sizes = Sizes.of(spec)
        self.rows: list[dict[int, int]] = []
        self.floats: list[dict[int, float]] = []
        self.scaled_vectors: dict[str, npt.NDArray[np.float32]] = {}

    def add(self, op: int, fields: dict[int, int], **params: float) -> None:
        names = {
            "factor": lt.P_FACTOR,
            "eps": lt.P_EPS,
            "cap": lt.P_CAP,
            "sum_factor": lt.P_SUM_FACTOR,
        }
        names |= {"least": lt.P_LEAST, "most": lt.P_MOST}
        self.rows.append({lt.F_OP: op, **fields})
        self.floats.append(
            {
                lt.P_FACTOR: 1.0,
                lt.P_SUM_FACTOR: 1.0,
                **{names[name]: value for name, value in params.items()},
            }
        )

    def kind(self, name: str) -> int:
        return NUMBERS[self.entries[name].kind]

    def is_quantized(self, name: str) -> bool:
        return self.entries[name].kind not in ("f32", "bf16")

    def panel(self, reader: str, buffer: int = lt.B_PANEL) -> dict[int, int]:
        """Fields of an operation whose result the matrix `reader` reads: quantized for it, or
        not.
        """
        if not self.is_quantized(reader):
            return {}
        return {lt.F_QUANT: self.kind(reader), lt.F_PANEL: buffer, lt.F_FINE: int(_is_fine(reader))}

    def scaled(self, name: str, factors: npt.NDArray[np.float32]) -> int:
        """The address of a packed vector whose first elements are multiplied with `factors`."""
        if (factors == 1).all():
            return self.packed.address(name)
        if name not in self.scaled_vectors:
            self.scaled_vectors[name] = self.packed.array(name).view(np.float32).copy()
            self.scaled_vectors[name][: len(factors)] *= factors
        return self.scaled_vectors[name].ctypes.data

    def norm(self, weight: str, reader: str, *, factor: float = 1.0) -> None:
        """Norm of the hidden state, times `factor`, for the matrix `reader`."""
        self.add(
            lt.OP_NORM,
            {
                lt.F_SRC: lt.B_HIDDEN,
                lt.F_SRC_STEP: self.sizes.hidden,
                lt.F_DST: lt.B_NORMED,
                lt.F_DST_STEP: self.sizes.hidden,
                lt.F_COUNT: self.spec.hidden_size,
                lt.F_WEIGHT: self.scaled(
                    weight, np.full(self.spec.hidden_size, factor, dtype=np.float32)
                ),
                **self.panel(reader),
            },
            eps=self.spec.eps,
        )

    def quantize(self, source: int, step: int, count: int, reader: str) -> None:
        if self.is_quantized(reader):
            fields = {lt.F_SRC: source, lt.F_SRC_STEP: step, lt.F_COUNT: count}
            self.add(lt.OP_QUANT, {**fields, **self.panel(reader)})

    def weights(self, name: str, unit: int, num_units: int, panel: int) -> dict[int, int]:
        """Fields of an operation with the matrix `name`, without a bias, cut into runs of `unit` of
        its num_units tiles (or groups).
        """
        return {
            lt.F_INPUTS: self.entries[name].inputs,
            lt.F_KIND: self.kind(name),
            lt.F_WEIGHT: self.packed.address(name),
            lt.F_SCALE: self.packed.address(f"{name}.scales"),
            lt.F_MINIMA: self.packed.address(f"{name}.minima"),
            lt.F_UNIT: max(1, min(unit, num_units // (_UNITS_PER_THREAD * self.num_threads))),
            lt.F_PANEL_IN: panel,
        }

    def linear(
        self,
        name: str,
        source: Rows,
        out: Rows,
        *,
        add: bool = False,
        factor: float = 1.0,
        panel: int = lt.B_PANEL,
        first: int = 0,
    ) -> None:
        """The matrix `name`, or its runs; it reads `source` where its weights are floats, and
        `panel` otherwise. first: the first float of a row of `out` that is written.
        """
        fields = {
            lt.F_SRC: source[0],
            lt.F_SRC_STEP: source[1],
            lt.F_DST: out[0],
            lt.F_DST_STEP: out[1],
        }
        bias = self.packed.address(f"{name}_bias")
        start = first
        index = 0
        while (run := run_name(name, index)) in self.entries:
            rows = self.entries[run].rows
            weights = self.weights(run, MAX_TILES, -(-rows // LANES), panel)
            place = {
                lt.F_COUNT: rows,
                lt.F_DST_FIRST: first,
                lt.F_BIAS: bias + 4 * (first - start) if bias else 0,
            }
            rest = {lt.F_ADD: int(add), lt.F_FINE_IN: int(_is_fine(name))}
            self.add(lt.OP_LINEAR, {**fields, **weights, **place, **rest}, factor=factor)
            first = first + rows
            index = index + 1

    def gated(self, layer: str, source: Rows, inner: int, scalar: float) -> None:
        """The ways in, the activation, and down; the hidden state is then multiplied with
        `scalar`.
        """
        rows = self.inner(layer, source, inner)
        factor = self.spec.factors.mlp_out
        names = (f"{layer}down", f"{layer}mlp_out")
        self.into_hidden(
            names[0], rows, names[1], panel=lt.B_INNER, sum_factor=scalar, factor=factor
        )

    def inner(self, layer: str, source: Rows, inner: int) -> Rows:
        """Gate and up, or up alone, and the activation: where they leave what the way down reads,
        beside B_INNER.
        """
        sizes = self.sizes
        spec = self.spec
        names = (layer + spec.family.way_in, f"{layer}down")
        rows = (lt.B_NORMED, padded(inner, GROUP))
        fields = {
            lt.F_COUNT: inner,
            lt.F_ACT: ACTIVATIONS[spec.activation],
            **self.panel(names[1], lt.B_INNER),
        }
        if inner % GROUP == 0 and all(self.is_quantized(name) for name in names):
            weights = self.weights(names[0], MAX_TILES // 4, inner // GROUP, lt.B_PANEL)
            self.add(
                lt.OP_GATED,
                {**weights, **fields, lt.F_BIAS: self.packed.address(f"{names[0]}_bias")},
            )
        else:
            self.linear(names[0], source, (lt.B_WIDE, sizes.wide))
            steps = {
                lt.F_SRC: lt.B_WIDE,
                lt.F_SRC_STEP: sizes.wide,
                lt.F_DST: rows[0],
                lt.F_DST_STEP: rows[1],
            }
            if not spec.family.gated:  # what is read for up has no meaning, but must be there
                steps |= {lt.F_BY: lt.B_WIDE, lt.F_BY_STEP: sizes.wide}
            self.add(lt.OP_ACT, {**steps, **fields})
        return rows

    def into_hidden(
        self,
        name: str,
        source: Rows,
        norm: str,
        *,
        panel: int = lt.B_PANEL,
        sum_factor: float = 1.0,
        factor: float = 1.0,
    ) -> None:
        """Add a matrix's result times `factor` to the hidden state, through a norm where the family
        has one behind.
        `sum_factor`: only with such a norm.
        """
        spec = self.spec
        hidden = (lt.B_HIDDEN, self.sizes.hidden)
        wide = (lt.B_WIDE, self.sizes.wide)
        if spec.family.norms == "pre":
            self.linear(
                name, source, hidden, add=True, factor=spec.residual_factor * factor, panel=panel
            )
            return
        self.linear(name, source, wide, panel=panel, factor=factor)
        fields = {
            lt.F_SRC: wide[0],
            lt.F_SRC_STEP: wide[1],
            lt.F_DST: hidden[0],
            lt.F_DST_STEP: hidden[1],
        }
        count = {lt.F_COUNT: spec.hidden_size, lt.F_WEIGHT: self.packed.address(norm)}
        factors = {"factor": spec.residual_factor, "sum_factor": sum_factor}
        self.add(lt.OP_ADD_NORM, {**fields, **count}, eps=spec.eps, **factors)
