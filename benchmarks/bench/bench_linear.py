"""Linear layers of the native runner at the shape of Qwen2-0.5B with random weights.

    python benchmarks/bench/bench_linear.py [--weights int4] [--threads 2] [--quick] [--model DIR]
    [--out FILE]

Measures bandwidth, integer rate and the division of time, in four tables:

    1. A decode step at depth 16, and each of its matrices over all layers, so that weights come
       from memory. Results are GB/s and the share of a plain read of the same bytes by as many
       threads (median and best). All are timed in turn by one running team of threads. The read
       by one thread is also shown. The step's time includes attention and norms, its bytes do not.
    2. The rate of one matrix on one thread for several numbers of tokens.
    3. A decode step at several depths, divided into linear layers, attention (including KV writes)
       and the rest.
    4. A prefill, divided in the same way.

Tables 3 and 4 have medians of the steps and of three prefills. Table 2 has the fastest rounds. The
last line is JSON. The random model is packed once and kept in the cache directory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.bench.plain_read import plain_read, token_weights
from benchmarks.harness import add_threads, alternate, parser, report
from kvboost_edge.backends.base import Backend, BatchLayout
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.host.file_memo import cache_directory
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.kernels.linear.amx_choice import amx_choice
from kvboost_edge.kernels.linear.panel import LARGEST_CELL
from kvboost_edge.kernels.linear.weight_formats import GROUP
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.entries import kernel_table
from kvboost_edge.kernels.program.interpreter import run_program
from kvboost_edge.kernels.team import KernelTeam
from kvboost_edge.runners.base import ForwardBatch
from kvboost_edge.runners.native.runner import NativeRunner

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
BLOCK = 16
STEP_DEPTH = 16
DEPTHS = (STEP_DEPTH, 512, 2048, 8192)
PROMPTS = (512, 2112)
TOKENS = (1, 2, 4, 8, 16, 64, 512, 2048)
_PREFILLS = 3  # measured prefills of each length
PASS = 512  # tokens in a pass, the size of the engine's prompt chunks


def write_random_model(directory: Path, layers: int) -> None:
    """Write a checkpoint of random float16 weights in the shape of CONFIG."""
    rng = np.random.default_rng(0)
    hidden = CONFIG["hidden_size"]
    wide = CONFIG["intermediate_size"]
    kv = 128

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns), np.float32) / columns**0.5).astype(np.float16)

    tensors = {"model.embed_tokens.weight": matrix(CONFIG["vocab_size"], hidden)}
    tensors["model.norm.weight"] = np.ones(hidden, np.float16)
    for index in range(layers):
        at = f"model.layers.{index}."
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = matrix(rows, hidden)
            tensors[f"{at}self_attn.{name}_proj.bias"] = np.zeros(rows, np.float16)
        tensors[f"{at}self_attn.o_proj.weight"] = matrix(hidden, hidden)
        for name, shape in (
            ("gate", (wide, hidden)),
            ("up", (wide, hidden)),
            ("down", (hidden, wide)),
        ):
            tensors[f"{at}mlp.{name}_proj.weight"] = matrix(*shape)
        for name in ("input", "post_attention"):
            tensors[f"{at}{name}_layernorm.weight"] = np.ones(hidden, np.float16)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))


class TimedRunner(NativeRunner):
    """Runner that measures the seconds of its linear programs."""

    linear_s = 0.0

    def bind(self, backend: Backend) -> None:
        super().bind(backend)
        if isinstance(backend, TimedBackend):
            self._whole = None  # layer by layer, but with one team of threads

    def _run(self, *arguments: Any) -> None:
        started = time.perf_counter()
        super()._run(*arguments)
        self.linear_s += time.perf_counter() - started


class TimedBackend(CPUBackend):
    """Backend that measures the seconds of attention and KV writes."""

    attention_s = 0.0

    def attention(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        result = super().attention(*arguments)
        TimedBackend.attention_s += time.perf_counter() - started
        return result

    def write_kv(self, *arguments: Any) -> None:
        started = time.perf_counter()
        super().write_kv(*arguments)
        TimedBackend.attention_s += time.perf_counter() - started


def batch(start: int, stop: int, *, logits: bool = True) -> ForwardBatch:
    """Return the tokens [start, stop) of one sequence in blocks 0, 1, 2, ..."""
    positions = np.arange(start, stop, dtype=np.int64)
    layout = BatchLayout(
        cu_seqlens_q=np.array([0, stop - start], np.int32),
        seq_lens=np.array([stop], np.int32),
        block_tables=np.arange(-(-stop // BLOCK), dtype=np.int32)[None],
        slot_mapping=positions,
    )
    rows = [stop - start - 1] if logits else []
    return ForwardBatch(positions * 7919 % 1000, positions, layout, np.array(rows, np.int64))


class LinearOps:
    """Single operations of a runner's program, on rows that are already quantized."""

    def __init__(self, runner: NativeRunner, tokens: int, team: KernelTeam) -> None:
        self._program = runner._program
        self._kernels = kernel_table(runner.kinds, runner._program.kinds)
        self._last: Sequence[int] = ()
        self._team = team
        self._buffers = runner._buffers.addresses(tokens, 1)
        self._logits = np.empty(
            (tokens, runner._buffers.sizes.logits) if tokens <= 8 else 1, np.float32
        )
        self._buffers[lt.B_LOGITS] = self._logits.ctypes.data
        self._tokens = tokens

    def clear_panel(self) -> None:
        """Set the quantized rows to zero.

        What earlier passes left there may be read as subnormal scales, which are slow on Intel.
        """
        inputs = max(op.matrix.inputs for op in self._program.operations if _reads_panel(op))
        size = self._tokens * inputs // GROUP * LARGEST_CELL
        ctypes.memset(int(self._buffers[lt.B_PANEL]), 0, size)

    def find(self, kind: type[lt.Operation], outputs: int, inputs: int) -> list[int]:
        return [
            index
            for index, op in enumerate(self._program.operations)
            if isinstance(op, kind) and (_outputs(op), op.matrix.inputs) == (outputs, inputs)
        ]

    def run(self, indices: Sequence[int]) -> None:
        """Run operations one after another as one program."""
        if self._last != indices:
            self._last = indices
            self._ops = np.ascontiguousarray(self._program.ops[list(indices)])
        count = len(indices)
        counters = np.zeros((count + 1) * lt.COUNTERS_PER_OP, np.int64)
        matrix = int(amx_choice().used)
        table = self._ops, self._buffers, counters, self._kernels
        job = lt.ProgramJob(*table, 0, count, self._tokens, matrix)
        self._team.run(
            run_program, job, counters, count * lt.COUNTERS_PER_OP, self._team.num_threads
        )


def _reads_panel(op: lt.Operation) -> bool:
    return isinstance(op, lt.LinearOp | lt.GatedOp) and op.matrix.panel == lt.B_PANEL


def _outputs(op: lt.Operation) -> int:
    return op.inner.size if isinstance(op, lt.GatedOp) else op.size


def matrices() -> dict[str, tuple[type[lt.Operation], int, int]]:
    """Return each matrix by name, as its operation, outputs and inputs."""
    hidden = CONFIG["hidden_size"]
    inner = CONFIG["intermediate_size"]
    return {
        "qkv": (lt.LinearOp, hidden + 256, hidden),
        "out": (lt.LinearOp, hidden, hidden),
        "gate_up": (lt.GatedOp, inner, hidden),
        "down": (lt.LinearOp, hidden, inner),
        "head": (lt.LinearOp, CONFIG["vocab_size"], hidden),
    }


def _bytes_of(name: str, weights: str, shape: tuple[type[lt.Operation], int, int]) -> int:
    op, outputs, inputs = shape
    rows = 2 * outputs if op is lt.GatedOp else outputs
    kind = "int8" if name == "head" else weights
    return int(
        rows * inputs * {"int8": 1 + 2 / 32, "int4": 0.5 + 2 / 32, "int4-asym": 0.5 + 4 / 32}[kind]
    )


def measure_decode(runner: NativeRunner, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return GB/s of plain reads, a decode step and each matrix, and shares of the plain read.

    One team runs everything. The helper threads of a second team would occupy the cores while they
    wait for work.
    """
    backend = CPUBackend(runner.info.kv_spec, STEP_DEPTH // BLOCK + 1, num_threads=options.threads)
    team = backend.kernel_access.workspace.team
    alone = KernelTeam(1)
    runner.bind(backend)
    runner.forward(batch(0, STEP_DEPTH))
    ops = LinearOps(
        runner, 1, team
    )  # after the largest pass, because the runner's buffers move when they grow
    found = {name: ops.find(*shape) for name, shape in matrices().items()}
    step = batch(STEP_DEPTH, STEP_DEPTH + 1)
    address, nbytes = token_weights(runner._packed)
    contenders: dict[str, Callable[[], object]] = {
        "plain read": lambda: plain_read(address, nbytes, team),
        f"decode at {STEP_DEPTH}": lambda: runner.forward(step),
    }
    if options.threads > 1:
        contenders["plain read, 1 thread"] = lambda: plain_read(address, nbytes, alone)
    for name, indices in found.items():
        contenders[name] = lambda indices=indices: ops.run(indices)
    seconds = alternate(contenders, rounds=options.rounds)
    backend.close()
    shapes = matrices()
    read = [nbytes / one / 1e9 for one in seconds["plain read"]]
    rows = []
    for name, times in seconds.items():
        count = len(found.get(name, [0]))
        of_one = _bytes_of(name, options.weights, shapes[name]) if name in shapes else nbytes
        rows.append(_share_row(name, [one / count for one in times], of_one, read))
    return rows


def _share_row(
    name: str, seconds: Sequence[float], nbytes: int, read: Sequence[float]
) -> dict[str, Any]:
    """Return median and best, and the median's share of the plain read.

    `read` is the plain read's GB/s in each round.
    """
    middle, best = (nbytes / one / 1e9 for one in (statistics.median(seconds), min(seconds)))
    return {
        "matrix": name,
        "us": 1e6 * statistics.median(seconds),
        "gb_s": middle,
        "best_gb_s": best,
        "share": middle / statistics.median(read),
        "share_of_best": middle / max(read),
    }


def measure_rate(runner: NativeRunner, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return TOPS of one gate and up matrix on one thread, with activation and quantization."""
    rows = []
    team = KernelTeam(1)
    for tokens in TOKENS:
        ops = LinearOps(runner, tokens, team)
        ops.clear_panel()
        shape = matrices()["gate_up"]
        index = ops.find(*shape)[:1]
        seconds = alternate(
            {"gate_up": lambda ops=ops, index=index: ops.run(index)}, rounds=options.rounds
        )["gate_up"]
        work = 2 * 2 * shape[1] * shape[2] * tokens
        rows.append(
            {"tokens": tokens, "ms": min(seconds) * 1e3, "tops": work / min(seconds) / 1e12}
        )
    return rows


def _split(runner: TimedRunner, backend: CPUBackend, passes: Sequence[ForwardBatch]) -> list[float]:
    """Return milliseconds in total, in linear layers, in attention and in the rest."""
    runner.linear_s = 0.0
    TimedBackend.attention_s = 0.0
    started = time.perf_counter()
    for one in passes:
        runner.forward(one)
    whole = time.perf_counter() - started
    attention = TimedBackend.attention_s
    parts = (whole, runner.linear_s, attention, whole - runner.linear_s - attention)
    return [1e3 * part for part in parts]


def measure_passes(runner: TimedRunner, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure decode steps at several depths, and prefills.

    The total is one kernel call. The division is measured layer by layer.
    """
    depths = DEPTHS[:2] if options.quick else DEPTHS
    prompts = PROMPTS[:1] if options.quick else PROMPTS
    num_blocks = (max(*depths, *prompts) + options.decode) // BLOCK + 2
    rows = _passes(
        runner, TimedBackend(runner.info.kv_spec, num_blocks, num_threads=options.threads), options
    )
    whole = _passes(
        runner, CPUBackend(runner.info.kv_spec, num_blocks, num_threads=options.threads), options
    )
    for row, one in zip(rows, whole, strict=True):
        row |= {"whole_ms": one["ms"], "whole_best_ms": one["best_ms"], "tok_s": one["tok_s"]}
    return rows


def _passes(
    runner: TimedRunner, backend: CPUBackend, options: argparse.Namespace
) -> list[dict[str, Any]]:
    depths = DEPTHS[:2] if options.quick else DEPTHS
    prompts = PROMPTS[:1] if options.quick else PROMPTS
    runner.bind(backend)
    runner.forward(batch(0, 16))  # compiles
    rows = []
    for prompt in prompts:
        cuts = [(first, min(first + PASS, prompt)) for first in range(0, prompt, PASS)]
        passes = [batch(first, end, logits=end == prompt) for first, end in cuts]
        runs = [_split(runner, backend, passes) for _ in range(1 if options.quick else _PREFILLS)]
        rows.append(_row(f"prefill {prompt}", runs, prompt))
    reached = prompts[-1]
    for depth in depths:
        while reached < depth:
            end = min(reached + PASS, depth)
            runner.forward(batch(reached, end, logits=False))
            reached = end
        steps = [
            _split(runner, backend, [batch(at, at + 1)])
            for at in range(depth, depth + options.decode)
        ]
        rows.append(_row(f"decode at {depth}", steps, 1))
    backend.close()
    return rows


def _row(name: str, runs: Sequence[Sequence[float]], tokens: int) -> dict[str, Any]:
    """Return medians of the parts of repeated passes, and the shortest pass."""
    names = ("ms", "linear_ms", "attention_ms", "other_ms")
    parts = [statistics.median(column) for column in zip(*runs, strict=True)]
    return {
        "pass": name,
        **dict(zip(names, parts, strict=True)),
        "best_ms": min(run[0] for run in runs),
        "tok_s": 1e3 * tokens / parts[0],
    }


def main() -> None:
    options_parser = parser(__doc__ or "")
    options_parser.add_argument(
        "--weights",
        default="int4",
        choices=("int8", "int4", "int4-asym"),
        help="weight format (default: %(default)s)",
    )
    options_parser.add_argument(
        "--kv-cache-bits",
        type=int,
        default=16,
        choices=(16, 8, 4),
        help="bits per KV value (default: %(default)s)",
    )
    add_threads(options_parser, default_num_threads())
    options_parser.add_argument(
        "--decode", type=int, default=24, help="number of decode steps at each depth"
    )
    options_parser.add_argument(
        "--layers", type=int, default=24, help="number of layers (default: %(default)s)"
    )
    options_parser.add_argument(
        "--model",
        type=Path,
        help="directory of the random model, which is written if it does not exist",
    )
    options = options_parser.parse_args()
    options.rounds = 3 if options.quick else 9
    directory = options.model or cache_directory() / f"random-qwen2-0.5b-{options.layers}"
    if not (directory / "config.json").exists():
        write_random_model(directory, options.layers)
    started = time.perf_counter()
    runner = TimedRunner.from_dir(
        directory,
        weights=options.weights,
        num_threads=options.threads,
        kv_bits=(options.kv_cache_bits, options.kv_cache_bits),
        cache_dir=directory / "cache",
    )
    loaded = time.perf_counter() - started
    passes = measure_passes(runner, options)
    decode = measure_decode(runner, options)
    rate = measure_rate(runner, options)
    token_mb = token_weights(runner._packed)[1] / 1e6
    runner.close()
    extra = {
        "weights": options.weights,
        "kv_cache_bits": options.kv_cache_bits,
        "threads": options.threads,
        "load_s": round(loaded, 2),
        "token_mb": round(token_mb, 1),
    }
    report("bench_linear: one token", decode, options=options)
    report("bench_linear: rate of one thread", rate, options=options)
    report("bench_linear", passes, options=options, **extra, decode=decode, rate=rate)


if __name__ == "__main__":
    main()
