"""Cold prefill of long prompts: division of its time, and attention relative to its bound.

    python benchmarks/bench/bench_long.py --kernel                  # attention on one thread
    python benchmarks/bench/bench_long.py --shapes 4b --kv 16 8 8,4 4
    python benchmarks/bench/bench_long.py --peers --lengths 2048 8192

The default measures prefills of a random model, each once, layer by layer: linear layers, attention
and KV writes, in seconds. Attention over quantized KV is divided in the proportions of its steps,
which are measured alone on data in the first-level cache:

    fold      key scales folded into queries
    scores    queries times keys
    softmax   exponentials, maxima and sums
    weights   softmax times value scales, rounded to 8 bits
    values    weights times values

A share is the bound divided by the time. The bound of integer work is its number of dot products
(`vpdpbusd` or what replaces it) divided by their measured rate. The bound of float attention is its
number of multiply-adds of 16 lanes divided by theirs. Without a dot-product instruction, four rows
share some of its work, so the share of integer work can exceed 1.

`--kernel` measures attention of 64 tokens in CPU time of one thread. The minimum of several rounds
counts, and both rates are measured in turn with it, so a busy machine affects it little. Its
numbers are per step of four query rows and 64 tokens, in units of the time of one dot product or
multiply-add.

`--peers` times cold prompts in this engine, llama.cpp and OpenVINO GenAI, as in bench_peers.py.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench import bench_peers
from benchmarks.bench.bench_linear import PASS, TimedBackend, TimedRunner, batch
from benchmarks.data.shapes import SHAPES, Shape
from kvboost_edge.backends.base import AttentionParams, KVSpec, LayerKVSpec
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.kernels.attention.float_tiles import ROWS, STRIPS, TILE, softmax_rows
from kvboost_edge.kernels.attention.paged import aligned_empty
from kvboost_edge.kernels.integers import emit_loop
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.lazy import types
from kvboost_edge.kernels.quantized_kv.code_dot import coded_dot_form, emit_dot
from kvboost_edge.kernels.quantized_kv.code_rows import (
    emit_slots,
    float_lanes,
    fold_rows,
    int_lanes,
)
from kvboost_edge.kernels.quantized_kv.code_tiles import coded_scores, coded_values, weigh_rows
from kvboost_edge.kernels.vectors import F32, LANES, emit_fma, emit_splat

BLOCK = 16
NEW = 64  # tokens that --kernel computes after each depth
# Independent chains per rate: enough to hide latency, and few enough for the registers.
CHAINS = 16 if coded_dot_form() == "vnni512" else 4
RATE_ROUNDS = 20_000
REPEATS = 4_096  # runs of a step per measurement, enough to outweigh the first cache misses
GROUPS = 16  # groups of four query rows that share a tile, as in a unit of attention
STEPS = ("fold", "scores", "softmax", "weights", "values")
_SCORES_8 = coded_scores[8]
_SCORES_4 = coded_scores[4]
_VALUES_8 = coded_values[8, 4]
_VALUES_4 = coded_values[4, 4]

Work = dict[str, Callable[[], Any]]


def _emit_chains(b: Any, rounds: Any, start: Any, step: Callable[[Any], Any]) -> Any:
    """Emit `rounds` steps of CHAINS chains, and return a lane of the chains' sum."""
    slots = emit_slots(b, start, CHAINS)
    with emit_loop(b, rounds):
        for slot in slots:
            b.store(step(b.load(slot)), slot)
    add = b.add if start.type == int_lanes(0).type else b.fadd
    total = b.load(slots[0])
    for slot in slots[1:]:
        total = add(total, b.load(slot))
    return b.extract_element(total, ir.Constant(ir.IntType(32), 0))


@intrinsic
def _chain_dots(typing: Any, rounds: Any) -> Any:
    """Compute CHAINS * rounds dot products."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        form = coded_dot_form()
        ones = int_lanes(0x01010101)
        # The sums are also an operand, so that no variant can move its products out of the loop.
        return _emit_chains(
            b, arguments[0], int_lanes(1), lambda sums: emit_dot(b, form, sums, sums, ones)
        )

    return types.int32(types.int64), codegen


@intrinsic
def _chain_fmas(typing: Any, rounds: Any) -> Any:
    """Compute CHAINS * rounds multiply-adds of 16 lanes."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        # LLVM does not know the start, so it cannot compute the result.
        start = emit_splat(b, b.sitofp(arguments[0], F32))
        half = float_lanes(0.5)
        return _emit_chains(b, arguments[0], start, lambda x: emit_fma(b, x, half, half))

    return types.float32(types.int64), codegen


@kernel
def chain_dots(rounds: int) -> int:
    return _chain_dots(rounds)


@kernel
def chain_fmas(rounds: int) -> float:
    return _chain_fmas(rounds)


class Places(NamedTuple):
    """Addresses of the operands of a step; see code_attend.py."""

    rows: int
    zeros: int
    steps: int
    tops: int
    row_steps: int
    planes: int
    dots: int
    table: int
    scores: int
    maxima: int
    scales: int
    middles: int
    codes: int
    numbers: int
    out: int


@kernel
def run_fold(p: Places, dim: int, bits: int, repeats: int) -> None:
    for repeat in range(repeats):
        place = repeat % GROUPS * 4 * ROWS * dim
        fold_rows(p.rows + place, p.row_steps, dim, p.zeros, p.steps, p.planes, p.dots)


@kernel
def run_scores(p: Places, dim: int, bits: int, repeats: int) -> None:
    for _ in range(repeats):
        if bits == 8:
            _SCORES_8(p.planes, p.table, dim, p.tops, p.row_steps, p.dots, p.scores)
        else:
            _SCORES_4(p.planes, p.table, dim, p.tops, p.row_steps, p.dots, p.scores)


@kernel
def run_softmax(p: Places, dim: int, bits: int, repeats: int) -> None:
    for _ in range(repeats):
        softmax_rows(p.scores, p.maxima, p.maxima + 4 * ROWS, p.maxima + 8 * ROWS)


@kernel
def run_weights(p: Places, dim: int, bits: int, repeats: int) -> None:
    middles = p.middles if bits == 4 else 0
    factors = p.numbers + 4 * ROWS
    for _ in range(repeats):
        weigh_rows(p.scores, p.scales, middles, p.codes, factors, factors + 4 * ROWS)


@kernel
def run_values(p: Places, dim: int, bits: int, repeats: int) -> None:
    for repeat in range(repeats):
        out = p.out + repeat % GROUPS * 4 * ROWS * dim
        for channel in range(0, dim, 64):
            if bits == 8:
                _VALUES_8(p.codes, p.table, channel, p.numbers, out, 4 * dim)
            else:
                _VALUES_4(p.codes, p.table, channel, p.numbers, out, 4 * dim)


def step_work(dim: int, bits: tuple[int, int]) -> tuple[Work, Any]:
    """Return the steps of four query rows and 64 tokens, and the arrays that they use."""
    rng = np.random.default_rng(0)
    floats = {
        "rows": GROUPS * ROWS * dim,
        "zeros": STRIPS * dim,
        "steps": STRIPS * dim,
        "tops": LANES,
        "row_steps": LANES,
        "planes": 2 * ROWS * dim,
        "dots": STRIPS * ROWS,
        "table": 32,
        "scores": ROWS * TILE,
        "maxima": 3 * LANES,
        "scales": TILE,
        "middles": TILE,
        "codes": TILE,
        "numbers": 3 * LANES,
        "out": GROUPS * ROWS * dim,
    }
    arena = aligned_empty((sum(floats.values()),), np.float32)
    arena[...] = rng.random(arena.size, np.float32)
    ends = np.cumsum(list(floats.values()))
    arrays = dict(zip(floats, np.split(arena, ends[:-1]), strict=True))
    # A factor below 1 would let the sums decay to subnormal numbers, which are slow on Intel.
    arrays["numbers"][:ROWS] = 1.0
    kv = aligned_empty((STRIPS, 2, BLOCK * dim), np.uint8)
    kv[...] = rng.integers(0, 256, kv.shape)
    table = arrays["table"].view(np.int64).reshape(4, STRIPS)
    for row in (0, 1):
        table[2 * row] = [kv[strip, row].ctypes.data for strip in range(STRIPS)]
        table[2 * row + 1] = 4 * (dim if row else BLOCK)
    places = Places(*(arrays[name].ctypes.data for name in Places._fields))
    kernels = (run_fold, run_scores, run_softmax, run_weights, run_values)

    def bound(work: Any, width: int) -> Callable[[], Any]:
        return lambda: work(places, dim, width, REPEATS)

    widths = (8, bits[0], 8, bits[1], bits[1])
    work = {
        name: bound(one, width) for name, one, width in zip(STEPS, kernels, widths, strict=True)
    }
    return work, (arena, kv)


def num_dots(dim: int) -> int:
    """Return the dot products of a step: the scores in two planes, and the values."""
    return ROWS * STRIPS * 2 * dim // 4 + ROWS * TILE // 4 * dim // LANES


def num_fmas(dim: int) -> int:
    """Return the multiply-adds of a step in float attention."""
    return ROWS * STRIPS * dim + ROWS * TILE * dim // LANES


def attention(shape: Shape, depth: int, bits: tuple[int, int]) -> Callable[[], Any]:
    """Return attention of NEW tokens after `depth` tokens on one thread."""
    rng = np.random.default_rng(depth)
    spec = KVSpec((LayerKVSpec(shape.kv_heads, shape.head_dim),), BLOCK, "float16", bits)
    backend = CPUBackend(spec, (depth + NEW) // BLOCK + 1, num_threads=1)
    for start in range(0, depth + NEW, PASS):
        stop = min(start + PASS, depth + NEW)
        size = (stop - start, shape.kv_heads, shape.head_dim)
        keys, values = (rng.standard_normal(size, np.float32) for _ in range(2))
        backend.write_kv(0, keys, values, backend.prepare(batch(start, stop).layout))
    queries = rng.standard_normal((NEW, shape.heads, shape.head_dim), np.float32)
    prepared = backend.prepare(batch(depth, depth + NEW).layout)
    params = AttentionParams(softmax_scale=shape.head_dim**-0.5)
    return lambda: backend.attention(0, queries, prepared, params)


def least(work: Work, rounds: int) -> dict[str, float]:
    """Return the least CPU seconds of each function over alternating rounds, after a warm-up."""
    best = dict.fromkeys(work, math.inf)
    for number in range(rounds + 1):
        for name, one in work.items():
            started = time.thread_time()
            one()
            if number:
                best[name] = min(best[name], time.thread_time() - started)
    return best


def measure_steps(
    dim: int, bits: tuple[int, int], rounds: int, more: Work
) -> tuple[dict[str, float], float, float]:
    """Return the CPU seconds of `more` and of each step, of a dot product and a multiply-add."""
    steps, kept = step_work(dim, bits) if max(bits) < 16 else ({}, None)
    rates: Work = {
        "dots": lambda: chain_dots(RATE_ROUNDS),
        "fmas": lambda: chain_fmas(RATE_ROUNDS),
    }
    found = least({**rates, **steps, **more}, rounds)
    del kept
    dot, fma = (found.pop(name) / (RATE_ROUNDS * CHAINS) for name in ("dots", "fmas"))
    return {name: s / REPEATS if name in steps else s for name, s in found.items()}, dot, fma


def kernel_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure attention alone, for the shapes, depths and KV formats of the options."""
    rows = []
    for name in options.shapes:
        shape = SHAPES[name]
        dim = shape.head_dim
        for depth in options.lengths:
            count = NEW * shape.heads // ROWS * (depth // TILE)
            for bits in options.kv:
                whole: Work = {"attention": attention(shape, depth, bits)}
                found, dot, fma = measure_steps(dim, bits, options.rounds, whole)
                coded = max(bits) < 16
                unit, bound = (dot, num_dots(dim)) if coded else (fma, num_fmas(dim))
                taken = found["attention"] / count / unit
                rows.append(
                    {
                        "shape": name,
                        "dim": dim,
                        "depth": depth,
                        "kv": _name(bits),
                        "G/s": round(1e-9 / unit, 2),
                        "bound": bound,
                        **{s: round(found[s] / unit) if coded else None for s in STEPS},
                        "attention": round(taken),
                        "share": round(bound / taken, 3),
                    }
                )
    return rows


class LongBackend(TimedBackend):
    """Backend that measures the seconds of attention and of KV writes."""

    writes_s = 0.0

    def write_kv(self, *arguments: Any) -> None:
        started = time.perf_counter()
        CPUBackend.write_kv(self, *arguments)
        self.writes_s += time.perf_counter() - started


def prefill_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure cold prefills of a random model, divided into kinds of work."""
    rows = []
    options.shape = options.shapes[0]
    model = bench_peers.RandomModel.written(options, SHAPES)
    shape = model.shape
    dim = shape.head_dim
    matrices = [dims for name, dims in shape.tensors() if name.startswith("blk.") and len(dims) > 1]
    products = sum(math.prod(dims) for dims in matrices) // 64  # dot products for one token
    for bits in options.kv:
        runner = TimedRunner.from_dir(
            model.path, weights="int4", num_threads=options.threads, kv_bits=bits
        )
        found, dot, fma = measure_steps(dim, bits, options.rounds, {})
        for length in options.lengths:
            backend = LongBackend(
                runner.info.kv_spec, length // BLOCK + 1, num_threads=options.threads
            )
            runner.bind(backend)
            runner.forward(batch(0, BLOCK))  # compiles
            runner.linear_s = TimedBackend.attention_s = backend.writes_s = 0.0
            started = time.perf_counter()
            for first in range(0, length, PASS):
                end = min(first + PASS, length)
                runner.forward(batch(first, end, logits=end == length))
            total = time.perf_counter() - started
            attending = TimedBackend.attention_s
            coded = max(bits) < 16
            each = num_dots(dim) * dot if coded else num_fmas(dim) * fma
            count = shape.layers * shape.heads / ROWS * length * length / 2 / TILE
            alone = sum(found.values())
            row: dict[str, Any] = {"model": model.name, "kv": _name(bits), "tokens": length}
            row |= {"s": total, "linear": runner.linear_s}
            row["linear share"] = products * length * dot / options.threads / runner.linear_s
            row |= {"attention": attending, "share": count * each / options.threads / attending}
            row |= {s: attending * found[s] / alone if coded else None for s in STEPS}
            row |= {"writes": backend.writes_s}
            row["rest"] = total - runner.linear_s - attending - backend.writes_s
            rows.append(row)
            backend.close()
        runner.close()
    return rows


def peer_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure cold prompts in every engine in turn."""
    options.shape = options.shapes[0]
    options.capacity = max(options.lengths) + PASS
    options.short = True
    options.flash_attn = "on"
    model, shape, _ = bench_peers.RandomModel.written(options, SHAPES)
    harness.pack_beforehand(model)
    bench = bench_peers.Bench(bench_peers.start(options, model), shape.vocab, options.rounds)
    for length in options.lengths:
        bench.cold(length)
    for worker in bench.workers:
        worker.close()
    return bench.rows()


def _bits(text: str) -> tuple[int, int]:
    """Parse "8" or "8,4"."""
    keys, _, values = text.partition(",")
    return int(keys), int(values or keys)


def _name(bits: tuple[int, int]) -> str:
    return str(bits[0]) if bits[0] == bits[1] else f"{bits[0]},{bits[1]}"


def main() -> None:
    parser = harness.parser(__doc__ or "")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--kernel", action="store_true", help="measure attention on one thread")
    mode.add_argument("--peers", action="store_true", help="measure cold prompts in every engine")
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=SHAPES,
        default=["0.5b", "4b"],
        help="model shapes; only the first without --kernel (default: 0.5b 4b)",
    )
    parser.add_argument(
        "--quant",
        default="Q4_0",
        choices=bench_peers.QUANTS,
        help="weight format of the model (default: %(default)s)",
    )
    parser.add_argument("--layers", type=int, help="number of first layers (default: all)")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[2048, 8192, 16384, 32768],
        help="prompt lengths or depths in tokens (default: 2048 8192 16384 32768)",
    )
    parser.add_argument(
        "--kv",
        type=_bits,
        nargs="+",
        default=[(16, 16), (8, 8), (8, 4), (4, 4)],
        help="bits per key and value, such as 8 or 8,4 (default: 16 8 8,4 4); not with --peers",
    )
    harness.add_threads(parser, default_num_threads())
    parser.add_argument("--rounds", type=int, default=10, help="rounds (default: 10)")
    parser.add_argument(
        "--models", type=Path, default=Path(__file__).parents[1] / "models", help="model directory"
    )
    parser.add_argument(
        "--peers-python",
        type=Path,
        default=Path(__file__).parents[2] / ".venv-peers" / "bin" / "python",
        help="Python that has the peers",
    )
    parser.add_argument("--only", nargs="+", help="labels of the engines, or prefixes of labels")
    parser.add_argument("--cpu-features", help="CPU features for our kernels")
    options = parser.parse_args()
    if options.quick:
        options.lengths = [1024]
        options.rounds = 2
    measure = kernel_rows if options.kernel else peer_rows if options.peers else prefill_rows
    rows = measure(options)
    shown = [bench_peers.shown(row) for row in rows] if options.peers else None
    harness.report("bench_long", rows, options=options, shown=shown)


if __name__ == "__main__":
    main()
