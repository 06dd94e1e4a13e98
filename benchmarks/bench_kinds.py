"""Matrices of two weight formats side by side: one token, and the tokens of a prompt.

    python benchmarks/bench_kinds.py [--kinds int4,int4t] [--threads 2] [--rows 9728] [--inputs 2560] [--out FILE]

Random bytes as weights, ordinary scales. Of one token as many matrices as come from memory, in GB/s of packed bytes; of
a prompt one matrix, in TOPS. Formats are timed in turn; the last column is the first format's median time over this
one's. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from harness import alternate, parser, report
from kvboost_edge.host.cpu import default_num_threads
from kvboost_edge.kernels.linear.amx_choice import amx_choice, linear_path
from kvboost_edge.kernels.linear.panel import LARGEST_CELL
from kvboost_edge.kernels.linear.weights import BLOCK_FORMATS, NUMBERS, packed_sizes
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.entries import kernel_table
from kvboost_edge.kernels.program.run import run_program
from kvboost_edge.kernels.team import KernelTeam

TOKENS = (1, 8, 64, 512)
FROM_MEMORY = 256 << 20  # bytes of the matrices that one token goes through
UNIT = 32  # tiles, as the native runner cuts


class Matrices:
    """Matrices of a format behind one another, and the quantized tokens that they read."""

    def __init__(self, kind: str, tokens: int, options: argparse.Namespace, team: KernelTeam) -> None:
        rng, rows, inputs = np.random.default_rng(0), options.rows, options.inputs
        sizes = packed_sizes(rows, inputs, NUMBERS[kind])
        self.count = max(1, FROM_MEMORY // sum(sizes)) if tokens == 1 else 1
        self.nbytes = self.count * sum(sizes)
        self._arrays = [rng.integers(0, 256, size * self.count, dtype=np.uint8) for size in sizes]
        halves = self._arrays[2 if kind in BLOCK_FORMATS else 1].view(np.float16)
        halves[:] = rng.uniform(0.001, 0.01, halves.size)
        wide = rng.standard_normal((tokens, inputs), np.float32)
        out, panel = np.zeros((tokens, rows), np.float32), np.zeros(tokens * -(-inputs // 32) * LARGEST_CELL, np.uint8)
        self._arrays += [wide, out, panel]
        buffers = np.zeros(lt.B_TABLES, np.int64)
        for number, array in ((lt.B_ATTENDED, wide), (lt.B_WIDE, out), (lt.B_PANEL, panel)):
            buffers[number] = array.ctypes.data
        self._buffers, self._kernels = buffers, kernel_table([NUMBERS[kind]])
        self._tokens, self._team = tokens, team
        shape = {lt.F_SRC: lt.B_ATTENDED, lt.F_SRC_STEP: inputs, lt.F_QUANT: NUMBERS[kind], lt.F_PANEL: lt.B_PANEL}
        self._run([{**shape, lt.F_OP: lt.OP_QUANT, lt.F_COUNT: inputs}])
        fields = {
            lt.F_OP: lt.OP_LINEAR, lt.F_KIND: NUMBERS[kind], lt.F_UNIT: UNIT, lt.F_PANEL_IN: lt.B_PANEL,
            lt.F_DST: lt.B_WIDE, lt.F_DST_STEP: rows, lt.F_COUNT: rows, lt.F_INPUTS: inputs,
        }  # fmt: skip
        self._ops = []
        for index in range(self.count):
            at = [array.ctypes.data + index * size for array, size in zip(self._arrays, sizes, strict=False)]
            self._ops.append({**fields, lt.F_WEIGHT: at[0], lt.F_SCALE: at[1], lt.F_MINIMA: at[2]})

    def run(self) -> None:
        self._run(self._ops)

    def _run(self, ops: list[dict[int, int]]) -> None:
        table = np.zeros((len(ops), lt.NUM_FIELDS), np.int64)
        for row, fields in zip(table, ops, strict=True):
            row[list(fields)] = list(fields.values())
        params = np.zeros((len(ops), lt.NUM_PARAMS), np.float32)
        params[:, lt.P_FACTOR] = 1.0
        counters = np.zeros((len(ops) + 1) * lt.COUNTERS_PER_OP, np.int64)
        matrix = int(amx_choice().used)
        job = lt.ProgramJob(
            table, params, self._buffers, counters, self._kernels, 0, len(ops), self._tokens, matrix
        )  # fmt: skip
        self._team.run(run_program, job, counters, len(ops) * lt.COUNTERS_PER_OP, self._team.num_threads)


def measure(kinds: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    team, rows = KernelTeam(options.threads), []
    for tokens in TOKENS:
        found = {kind: Matrices(kind, tokens, options, team) for kind in kinds}
        contenders: dict[str, Callable[[], object]] = {
            kind: functools.partial(Matrices.run, one) for kind, one in found.items()
        }
        seconds = alternate(contenders, rounds=options.rounds)
        first = statistics.median(seconds[kinds[0]])
        for kind, times in seconds.items():
            middle, one = statistics.median(times), found[kind]
            work = 2 * options.rows * options.inputs * tokens * one.count
            rows.append({
                "tokens": tokens, "kind": kind, "ms": 1e3 * middle, "best_ms": 1e3 * min(times),
                "gb_s": one.nbytes / middle / 1e9, "tops": work / middle / 1e12, "rate_to_first": first / middle,
            })  # fmt: skip
    return rows


def main() -> None:
    options_parser = parser(__doc__ or "")
    options_parser.add_argument("--kinds", default="int4,int4t", help=f"formats, of {', '.join(NUMBERS)}")
    options_parser.add_argument("--threads", type=int, default=default_num_threads())
    options_parser.add_argument("--rows", type=int, default=9728)
    options_parser.add_argument("--inputs", type=int, default=2560)
    options = options_parser.parse_args()
    options.rounds = 5 if options.quick else 21
    kinds = options.kinds.split(",")
    found = measure(kinds, options)
    report("bench_kinds", found, options=options, path=linear_path(), threads=options.threads)


if __name__ == "__main__":
    main()
