"""Operations of a layer program over arrays of a test: matrices with what comes before and after
them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.linear.panel import LARGEST_CELL, panel_tokens
from kvboost_edge.kernels.linear.weights import NUMBERS, PackedRows
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.entries import kernel_table
from kvboost_edge.kernels.program.run import run_program
from kvboost_edge.kernels.team import KernelTeam

Floats = npt.NDArray[np.float32]


class Program:
    """One or more operations over buffers of this test."""

    def __init__(self, tokens: int, matrix: int = 0) -> None:
        self.tokens = tokens
        self.matrix = matrix
        self.buffers = np.zeros(lt.B_TABLES + 2, np.int64)
        self.arrays: list[npt.NDArray[np.generic]] = []
        self.ops: list[npt.NDArray[np.int64]] = []
        self.params: list[Floats] = []

    def buffer(self, number: int, array: npt.NDArray[np.generic]) -> None:
        self.arrays.append(array)
        self.buffers[number] = array.ctypes.data

    def add(
        self, code: int, fields: dict[int, int], params: dict[int, float] | None = None
    ) -> None:
        row = np.zeros(lt.NUM_FIELDS, np.int64)
        row[lt.F_OP] = code
        floats = np.zeros(lt.NUM_PARAMS, np.float32)
        floats[[lt.P_FACTOR, lt.P_SUM_FACTOR]] = 1.0
        for field, value in fields.items():
            row[field] = value
        for field, number in (params or {}).items():
            floats[field] = number
        self.ops.append(row)
        self.params.append(floats)

    def kernels(self) -> npt.NDArray[np.int64]:
        """Of the kinds that the operations read."""
        of = (lt.OP_LINEAR, lt.OP_GATED, lt.OP_EXPERTS_GATED, lt.OP_EXPERTS_DOWN)
        kinds = [int(op[lt.F_KIND]) for op in self.ops if op[lt.F_OP] in of]
        return kernel_table(kinds, [int(op[lt.F_OP]) for op in self.ops])

    def run(self, threads: int = 1) -> None:
        count = len(self.ops)
        counters = np.zeros(lt.COUNTERS_PER_OP * (count + 1), np.int64)
        table = np.array(self.ops), np.array(self.params)
        job = lt.ProgramJob(
            *table, self.buffers, counters, self.kernels(), 0, count, self.tokens, self.matrix
        )
        team = KernelTeam(threads)
        team.run(run_program, job, counters, lt.COUNTERS_PER_OP * count, threads)
        team.close()


class Extra(NamedTuple):
    """What a matrix does beside multiplying, and how it is run."""

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


def matrix_fields(program: Program, packed: PackedRows) -> dict[int, int]:
    """Fields of an operation with a packed matrix."""
    program.arrays += packed[:3]
    addresses = [array.ctypes.data for array in packed[:3]]
    return {lt.F_WEIGHT: addresses[0], lt.F_SCALE: addresses[1], lt.F_MINIMA: addresses[2]}


def run_linear(
    kind: str, x: Floats, packed: PackedRows, rows: int, extra: Extra
) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """The result, and the panel of quantized tokens."""
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
    program.buffer(lt.B_WIDE, out)
    source = {lt.F_SRC: lt.B_ATTENDED, lt.F_SRC_STEP: groups * 32}
    fine = int(extra.fine)
    quantized = {lt.F_QUANT: NUMBERS[kind], lt.F_PANEL: lt.B_PANEL, lt.F_FINE: fine}
    if kind not in ("f32", "bf16"):
        program.add(lt.OP_QUANT, {**source, **quantized, lt.F_COUNT: inputs})
    weights = {
        **matrix_fields(program, packed),
        lt.F_KIND: NUMBERS[kind],
        lt.F_UNIT: 3,
        lt.F_PANEL_IN: lt.B_PANEL,
    }
    target = {
        lt.F_DST: lt.B_WIDE,
        lt.F_DST_STEP: padded,
        lt.F_COUNT: rows,
        lt.F_INPUTS: inputs,
        lt.F_FINE_IN: fine,
    }
    rest = {
        lt.F_BIAS: 0 if extra.bias is None else biases.ctypes.data,
        lt.F_ADD: int(extra.add is not None),
    }
    program.add(lt.OP_LINEAR, {**source, **weights, **target, **rest}, {lt.P_FACTOR: extra.factor})
    program.run(extra.threads)
    return out[:, :rows], panel
