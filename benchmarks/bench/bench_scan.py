"""Recurrent layers: nanoseconds per token for 16 value columns of one head, on one thread.

    python benchmarks/bench/bench_scan.py [--tokens 256 64 16 1] [--layers 24] [--key-dim 128]
    [--quick] [--out FILE]

Rules and numbers of tokens alternate. The best and the median round are reported. A pass runs
through several layers in order, each with a state of 2 MiB, as in real models. With few tokens,
states therefore come from memory. Results are the next layer's values, so numbers may overflow,
which costs no time. The last line is JSON.
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

from benchmarks.harness import alternate, parser, report
from kvboost_edge.backends.base import BatchLayout, LayerStateSpec, PassStates
from kvboost_edge.backends.state_pool import StatePool
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.entries import kernel_table
from kvboost_edge.kernels.program.interpreter import run_program
from kvboost_edge.kernels.team import KernelTeam
from kvboost_edge.runners.native.recurrent_layers import pass_states

LANES = 16
STATE_BYTES = 2 << 20
VALUE_DIM = {"delta": 128, "ssd": 64}


class Scans:
    """`ScanOp` of all layers over the rows of one sequence."""

    def __init__(self, rule: str, tokens: int, layers: int, key_dim: int) -> None:
        dim = VALUE_DIM[rule]
        heads = STATE_BYTES // (4 * key_dim * dim)
        rng = np.random.default_rng(0)
        self._pool = StatePool([LayerStateSpec(0, 0, heads, key_dim, dim)] * layers, 1)
        self._pool.write_slots([0], np.zeros((1, self._pool.slot_bytes), np.uint8))
        keys = heads * tokens * key_dim
        arrays: dict[int, npt.NDArray[Any]] = {
            number: rng.uniform(-1, 1, count).astype(np.float32)
            for number, count in (
                (lt.B_QUERY, keys),
                (lt.B_KEY, keys),
                (lt.B_VALUE, heads * tokens * (dim + 2)),
            )
        }
        arrays[lt.B_VALUE][-2 * heads * tokens :] = 0.9  # decay and the other gates
        arrays[lt.B_STATES] = pass_states(_one_sequence(tokens), self._pool)
        self._held = [skip := np.ones(heads, np.float32), *arrays.values()]
        self._buffers = np.zeros(lt.B_TABLES + 2, np.int64)
        self._buffers[list(arrays)] = [array.ctypes.data for array in arrays.values()]
        self._buffers[lt.B_SEQUENCES] = 1
        key_heads = 1 if rule == "ssd" else heads // 2
        state_heads = lt.StateHeads(key_heads, key_dim, heads, dim, 0, lt.RULES[rule])
        self._ops = lt.table_of(
            [
                lt.ScanOp(state_heads, self._pool.offset(layer), skip.ctypes.data)
                for layer in range(layers)
            ]
        )
        self._tokens = tokens
        self.tiles = layers * heads * dim // LANES

    def run(self, team: KernelTeam) -> None:
        count = len(self._ops)
        counters = np.zeros((count + 1) * lt.COUNTERS_PER_OP, np.int64)
        table = self._ops, self._buffers, counters, kernel_table([], [lt.ScanOp])
        job = lt.ProgramJob(*table, 0, count, self._tokens, 0)
        team.run(run_program, job, counters, count * lt.COUNTERS_PER_OP, team.num_threads)


def _one_sequence(tokens: int) -> BatchLayout:
    """Return one sequence whose state is read from the slot that it is written to."""
    ends = np.array([0, tokens], np.int32)
    slot = np.zeros(1, np.int32)
    states = PassStates(slot, slot, np.zeros((0, 3), np.int32))
    blocks = np.zeros((1, -(-tokens // 16)), np.int32)
    return BatchLayout(ends, ends[1:], blocks, np.zeros(tokens, np.int64), states=states)


def measure(options: argparse.Namespace, team: KernelTeam) -> list[dict[str, Any]]:
    scans = {
        (rule, tokens): Scans(rule, tokens, options.layers, options.key_dim)
        for rule in lt.RULES
        for tokens in options.tokens
    }
    contenders: dict[str, Callable[[], object]] = {
        f"{rule}, {tokens}": lambda one=one: one.run(team) for (rule, tokens), one in scans.items()
    }
    rounds = alternate(contenders, rounds=options.rounds)
    rows = []
    for (rule, tokens), one in scans.items():
        each = [1e9 * seconds / (one.tiles * tokens) for seconds in rounds[f"{rule}, {tokens}"]]
        rows.append(
            {
                "rule": rule,
                "tokens": tokens,
                "best_ns": min(each),
                "median_ns": statistics.median(each),
            }
        )
    return rows


def main() -> None:
    options_parser = parser(__doc__ or "")
    options_parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        default=(256, 64, 16, 1),
        help="numbers of tokens of a pass (default: %(default)s)",
    )
    options_parser.add_argument(
        "--layers", type=int, default=24, help="number of layers (default: %(default)s)"
    )
    options_parser.add_argument(
        "--key-dim",
        type=int,
        default=128,
        help="key dimension of the heads, a power of 2 up to 256",
    )
    options = options_parser.parse_args()
    options.rounds = 3 if options.quick else 9
    team = KernelTeam(1)
    rows = measure(options, team)
    team.close()
    report("bench_scan", rows, options=options)


if __name__ == "__main__":
    main()
