"""One matrix in every integer weight format: time of one token, and rate of many tokens.

    python benchmarks/bench/bench_weight_formats.py [--formats int4 int4t] [--rows 17920]
    [--inputs 1536] [--threads 2] [--quick] [--out FILE]

The shape is that of Qwen2-1.5B's gate and up matrix. One token runs through enough copies of the
matrix to take some 200 MB, so that weights come from memory. Both precisions of a token's codes are
timed (`fine` has 16 bits, as for queries and logits). Formats alternate in one process with one
team of threads. The best round counts. The last column is the median over rounds of the time
relative to int4's in the same round. The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.harness import add_threads, alternate, parser, report
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.kernels.linear.amx_choice import amx_choice
from kvboost_edge.kernels.linear.panel import LARGEST_CELL
from kvboost_edge.kernels.linear.weight_formats import FORMATS
from kvboost_edge.kernels.linear.weights import packed_sizes
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.entries import kernel_table
from kvboost_edge.kernels.program.interpreter import run_program
from kvboost_edge.kernels.team import KernelTeam

QUANTIZED = tuple(name for name, form in FORMATS.items() if not form.is_float)
MEMORY = 200 << 20
MANY = 256


class Matrices:
    """Copies of a random matrix in a format, and a number of tokens to multiply."""

    def __init__(
        self, kind: str, options: argparse.Namespace, tokens: int, *, fine: bool, copies: int
    ) -> None:
        rows = options.rows
        inputs = options.inputs
        rng = np.random.default_rng(0)
        sizes = packed_sizes(rows, inputs, kind)
        self.nbytes = sum(sizes)
        halves = (rng.random(max(sizes[1:]) // 2 + 1) / 100).astype(np.float16).view(np.uint8)
        one = [
            rng.integers(0, 256, sizes[0], dtype=np.uint8),
            halves[: sizes[1]].copy(),
            halves[: sizes[2]].copy(),
        ]
        self._held: list[list[npt.NDArray[Any]]] = [
            [array.copy() for array in one] for _ in range(copies)
        ]
        x = rng.standard_normal((tokens, inputs)).astype(np.float32)
        panel = np.zeros(tokens * inputs // 32 * LARGEST_CELL, np.uint8)
        out = np.zeros((tokens, rows), np.float32)
        self._buffers = np.zeros(lt.B_TABLES + 2, np.int64)
        for number, array in ((lt.B_ATTENDED, x), (lt.B_PANEL, panel), (lt.B_PROJECTED, out)):
            self._held.append([array])
            self._buffers[number] = array.ctypes.data
        source = lt.BufferRows(lt.B_ATTENDED, inputs)
        target = lt.PanelTarget(FORMATS[kind].kind, lt.B_PANEL, int(fine))
        table: list[lt.Operation] = [lt.QuantizeOp(source, inputs, target)]
        for arrays in self._held[:copies]:
            matrix = lt.PackedMatrix(
                FORMATS[kind].kind,
                inputs,
                *(array.ctypes.data for array in arrays),
                unit=rows // 16 // (2 * options.threads),
                panel=lt.B_PANEL,
                fine=int(fine),
            )
            table.append(lt.LinearOp(source, lt.BufferRows(lt.B_PROJECTED, rows), matrix, rows))
        self._ops = lt.table_of(table)
        self._tokens = tokens
        self._copies = copies
        self._kernels = kernel_table([FORMATS[kind].kind], [lt.LinearOp])

    def run(self, team: KernelTeam) -> None:
        count = len(self._ops)
        counters = np.zeros((count + 1) * lt.COUNTERS_PER_OP, np.int64)
        matrix = int(amx_choice().used)
        table = self._ops, self._buffers, counters, self._kernels
        job = lt.ProgramJob(*table, 0, count, self._tokens, matrix)
        team.run(run_program, job, counters, count * lt.COUNTERS_PER_OP, team.num_threads)


def measure(
    options: argparse.Namespace, team: KernelTeam, tokens: int, *, fine: bool
) -> list[dict[str, Any]]:
    """Return microseconds per matrix, GB/s of its bytes, TOPS, and the time relative to int4's."""
    weights = options.rows * options.inputs
    copies = max(1, MEMORY // weights * 2) if tokens == 1 else 1
    formats = [kind for kind in QUANTIZED if kind in ("int4", *options.formats)]
    found = {kind: Matrices(kind, options, tokens, fine=fine, copies=copies) for kind in formats}
    contenders: dict[str, Callable[[], object]] = {
        kind: lambda one=one: one.run(team) for kind, one in found.items()
    }
    rounds = alternate(contenders, rounds=options.rounds)
    seconds = {kind: min(times) / copies for kind, times in rounds.items()}
    return [
        {
            "format": kind,
            "tokens": tokens,
            "fine": fine,
            "bytes_a_weight": found[kind].nbytes / weights,
            "us": 1e6 * seconds[kind],
            "gb_s": found[kind].nbytes / seconds[kind] / 1e9,
            "tops": 2 * weights * tokens / seconds[kind] / 1e12,
            "times_int4": seconds[kind] / seconds["int4"],
            "median_times_int4": statistics.median(
                one / other for one, other in zip(rounds[kind], rounds["int4"], strict=True)
            ),
        }
        for kind in formats
    ]


def main() -> None:
    options_parser = parser(__doc__ or "")
    options_parser.add_argument(
        "--formats",
        nargs="+",
        default=QUANTIZED,
        choices=QUANTIZED,
        help="formats to measure in addition to int4",
    )
    options_parser.add_argument(
        "--rows", type=int, default=17920, help="number of rows, a multiple of 16"
    )
    options_parser.add_argument(
        "--inputs", type=int, default=1536, help="number of inputs, a multiple of 256"
    )
    add_threads(options_parser, default_num_threads())
    options = options_parser.parse_args()
    options.rounds = 5 if options.quick else 15
    team = KernelTeam(options.threads)
    rows = [
        row
        for tokens, fine in ((1, False), (1, True), (MANY, False), (MANY, True))
        for row in measure(options, team, tokens, fine=fine)
    ]
    team.close()
    report("bench_weight_formats", rows, options=options)


if __name__ == "__main__":
    main()
