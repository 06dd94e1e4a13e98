"""Driver for operations of a layer program over a test's arrays: matrices with the steps before and
after them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from helpers.kernels.weight_formats import kind_of
from kvboost_edge.kernels.linear.amx_choice import amx_choice
from kvboost_edge.kernels.linear.panel import LARGEST_CELL, panel_tokens
from kvboost_edge.kernels.linear.weights import PackedRows
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.entries import kernel_table
from kvboost_edge.kernels.program.interpreter import run_program
from kvboost_edge.kernels.team import KernelTeam

Floats = npt.NDArray[np.float32]


class Program:
    """One or more operations over a test's buffers."""

    def __init__(self, tokens: int, matrix: int = 0) -> None:
        self.tokens = tokens
        self.tile_registers = matrix
        if matrix:
            amx_choice()  # asks Linux for access to the tile registers, without which they trap
        self.buffers = np.zeros(lt.B_TABLES + 2, np.int64)
        self.arrays: list[npt.NDArray[np.generic]] = []
        self.ops: list[lt.Operation] = []

    def buffer(self, number: int, array: npt.NDArray[np.generic]) -> None:
        self.arrays.append(array)
        self.buffers[number] = array.ctypes.data

    def matrix(self, kind: str, inputs: int, packed: PackedRows, **how: int) -> lt.PackedMatrix:
        """Return a packed matrix, cut into units of 3 tiles, that reads B_PANEL."""
        self.arrays += packed[:3]
        addresses = (array.ctypes.data for array in packed[:3])
        fields = {"unit": 3, "panel": lt.B_PANEL, **how}
        return lt.PackedMatrix(kind_of(kind), inputs, *addresses, **fields)

    def kernels(self) -> npt.NDArray[np.int64]:
        """Return the kernel table for the weight formats that the operations read."""
        of = (lt.LinearOp, lt.GatedOp, lt.ExpertsGatedOp, lt.ExpertsDownOp)
        of += (lt.WideLinearOp, lt.WideGatedOp)
        kinds = [op.matrix.kind for op in self.ops if isinstance(op, of)]
        return kernel_table(kinds, {type(op) for op in self.ops})

    def run(self, threads: int = 1) -> None:
        count = len(self.ops)
        counters = np.zeros(lt.COUNTERS_PER_OP * (count + 1), np.int64)
        job = lt.ProgramJob(
            lt.table_of(self.ops),
            self.buffers,
            counters,
            self.kernels(),
            0,
            count,
            self.tokens,
            self.tile_registers,
        )
        team = KernelTeam(threads)
        team.run(run_program, job, counters, lt.COUNTERS_PER_OP * count, threads)
        team.close()


class Extra(NamedTuple):
    """Options of a matrix product: additional terms, and settings of its execution."""

    bias: Floats | None = None
    add: Floats | None = None
    factor: float = 1.0
    threads: int = 1
    fine: bool = False
    matrix: int = 0


PLAIN = Extra()


def panel_sizes(tokens: int, extra: Extra) -> list[int]:
    sizes: list[int] = []
    while sum(sizes) < tokens:
        sizes.append(panel_tokens(tokens - sum(sizes), tokens, int(extra.fine), extra.matrix))
    return sizes


def run_linear(
    kind: str, x: Floats, packed: PackedRows, rows: int, extra: Extra
) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """Return the result and the panel of quantized tokens."""
    tokens, inputs = x.shape
    groups = -(-inputs // 32)
    padded = -(-rows // 16) * 16
    program = Program(tokens, extra.matrix)
    wide = np.zeros((tokens, groups * 32), np.float32)
    wide[:, :inputs] = x
    out = np.full((tokens, padded), np.nan, np.float32)
    if extra.add is not None:
        out[:, :rows] = extra.add
    biases = np.zeros(padded, np.float32)
    if extra.bias is not None:
        biases[:rows] = extra.bias
    panel = np.zeros(tokens * groups * LARGEST_CELL, np.uint8)
    program.buffer(lt.B_ATTENDED, wide)
    program.buffer(lt.B_PANEL, panel)
    program.buffer(lt.B_PROJECTED, out)
    source = lt.BufferRows(lt.B_ATTENDED, groups * 32)
    fine = int(extra.fine)
    if kind not in ("f32", "bf16"):
        target = lt.PanelTarget(kind_of(kind), lt.B_PANEL, fine)
        program.ops.append(lt.QuantizeOp(source, inputs, target))
    bias = 0 if extra.bias is None else biases.ctypes.data
    matrix = program.matrix(kind, inputs, packed, bias=bias, fine=fine)
    add = int(extra.add is not None)
    rows_out = lt.BufferRows(lt.B_PROJECTED, padded)
    program.ops.append(lt.LinearOp(source, rows_out, matrix, rows, add, extra.factor))
    program.run(extra.threads)
    return out[:, :rows], panel
