"""This engine against llama.cpp and OpenVINO GenAI with equal weights, bits, threads and tokens.

A random model of a real shape is written once as GGUF. Each engine is a separate process. In each
round, all engines answer the same request in turn, and the figures are medians over rounds (minimum
and maximum in brackets). The same clock around the whole call times every engine.

Decode at the first depth also shows the GB/s of our weights that it reads (without KV). A plain
read of as many bytes with as many threads follows in the same process, and the share is computed
for each round. For a mixture of experts, only the weights of the used experts count. Peak memory
also shows what our engine needs in addition to model file, pool and states. Engines that are not
installed are skipped with a message. `make bench-peers` installs them into `.venv-peers`.

Speculation is off. OpenVINO's KV cache has 8 bits, unlike that of ours and llama.cpp's with which
it is compared by default; the labels name the bits. The last column compares our first contender
with the best of the others, whatever their bits.

    python benchmarks/bench/bench_peers.py                      # 0.5B shape, Q4_0
    python benchmarks/bench/bench_peers.py --shape 1.5b --quant Q8_0 --depths 0 2048
    python benchmarks/bench/bench_peers.py --shape 4b --quant Q4_K_M --rounds 2 --depths 0 2048
    python benchmarks/bench/bench_peers.py --shape gemma-4-e2b --rounds 3 --depths 0 1024
    python benchmarks/bench/bench_peers.py --shape olmo-3-7b --short --prompt 512 --rounds 2
    --depths 0
    python benchmarks/bench/bench_peers.py --shape qwen3.5-0.8b --short --prompt 1056 --rounds 3
    --depths 0 1024
    python benchmarks/bench/bench_peers.py --shape qwen3-30b-a3b --layers 8 --short --prompt 1056
    --rounds 2 --depths 1024
    python benchmarks/bench/bench_peers.py --shape gpt-oss-20b --quant MXFP4 --layers 6 --short
    --prompt 1056 --depths 1024
    python benchmarks/bench/bench_peers.py --only kvboost_edge  # without peers
    python benchmarks/bench/bench_peers.py --bundled            # the bundled model, in a minute
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.data.hybrid_shapes import HYBRID_SHAPES
from benchmarks.data.mixture_shapes import MIXTURE_SHAPES
from benchmarks.data.random_model import QUANTS, kept_gguf
from benchmarks.data.shapes import SHAPES, Shape
from benchmarks.quality.float64_qwen import last_logits

_BENCHMARKS = Path(__file__).parents[1]
_PREFIX = 2048
_SUFFIX = 64
_OWN = 16
_SHARING = 8
ALL_SHAPES = {**SHAPES, **HYBRID_SHAPES, **MIXTURE_SHAPES}
_FIRST_TEXT_TOKEN = 300  # first id that is a text token; smaller ids are bytes and control tokens
_OURS = "kvboost_edge"
_PEER = "llama.cpp f16"
_MORE_IS_BETTER = ("_tok_s", "_gb_s", "_share_of_read")


class Worker:
    """Client of an engine's process."""

    def __init__(self, label: str, command: list[str], env: dict[str, str] | None) -> None:
        self.label = label
        # A file, because an engine that filled a pipe would wait for a reader.
        self._messages = tempfile.TemporaryFile(  # noqa: SIM115 - closed with the process
            "w+", encoding="utf-8", errors="replace"
        )
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            text=True,
            env=env,
        )
        self.about = self._read()

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **fields}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.communicate()
            self._messages.seek(0)
            said = self._messages.read().strip().splitlines()
            self._messages.close()
            raise RuntimeError(
                f"{self.label} ended with {self.process.returncode}: "
                f"{said[-1] if said else 'no message'}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.communicate()
        self._messages.close()


def worker_or_none(label: str, command: list[str]) -> Worker | None:
    """Start an engine, or print why it is left out, so that the others are measured."""
    try:
        return Worker(label, command, dict(os.environ))
    except RuntimeError as error:
        print(f"skipped: {error}", file=sys.stderr)
        return None


def contenders(options: argparse.Namespace) -> list[tuple[str, str, Path, int]]:
    """Return (label, engine, python, kv bits) of all requested engines."""
    own = Path(sys.executable)
    peers = options.peers_python
    every = [
        ("kvboost_edge kv16", "kvboost_edge", own, 16),
        ("kvboost_edge kv8", "kvboost_edge", own, 8),
        ("llama.cpp f16", "llama.cpp", peers, 16),
        ("llama.cpp q8_0", "llama.cpp", peers, 8),
        ("openvino u8", "openvino", peers, 8),
    ]
    return [
        entry
        for entry in every
        if not options.only or any(entry[0].startswith(name) for name in options.only)
    ]


def start(options: argparse.Namespace, model: Path) -> list[Worker]:
    """Start the engines. Name those that do not start, with the reason."""
    workers = []
    for label, engine, python, bits in contenders(options):
        if not python.exists():
            print(
                f"skipped: {label}: no {python}; `make bench-peers` installs the peers",
                file=sys.stderr,
            )
            continue
        command = [
            str(python),
            str(_BENCHMARKS / "peers" / "worker.py"),
            engine,
            str(model),
            "--kv",
            str(bits),
        ]
        command += ["--threads", str(options.threads), "--capacity", str(options.capacity)]
        if bits == 16:
            command += ["--flash-attn", options.flash_attn]
        # A recurrent model cannot share a prefix: it needs a state for the held tokens and another
        # to continue.
        if options.short:
            command += ["--sequences", "2"]
        env = dict(os.environ)
        if engine == "kvboost_edge" and options.cpu_features:
            env |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": options.cpu_features}
        try:
            workers.append(Worker(label, command, env))
        except RuntimeError as error:
            print(f"skipped: {error}", file=sys.stderr)
    return workers


class Bench:
    """The measurements, each over all workers in turn."""

    def __init__(self, workers: list[Worker], vocab: int, rounds: int) -> None:
        self.workers = workers
        self.vocab = vocab
        self.rounds = rounds
        self.figures: dict[str, dict[str, list[float]]] = {}
        self._seed = 0

    def tokens(self, count: int) -> list[int]:
        """Return new tokens for each call, the same for every engine."""
        self._seed += 1
        return (
            np.random.default_rng(self._seed)
            .integers(_FIRST_TEXT_TOKEN, self.vocab, count)
            .tolist()
        )

    def note(self, measure: str, label: str, value: float) -> None:
        self.figures.setdefault(measure, {}).setdefault(label, []).append(value)

    def all(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        return [worker.ask(what, **fields) for worker in self.workers]

    def cold(self, length: int) -> None:
        for number in range(self.rounds + 1):
            prompt = self.tokens(length)
            for worker in self.workers:
                seconds = worker.ask("ttft", tokens=prompt, cached=0)["seconds"]
                if number:  # round 0 is the warm-up
                    self.note(f"cold_ttft_{length}_s", worker.label, seconds)

    def warm(self) -> None:
        prefix = self.tokens(_PREFIX)
        self.all("hold", tokens=prefix)
        for number in range(self.rounds + 1):
            prompt = prefix + self.tokens(_SUFFIX)
            for worker in self.workers:
                seconds = worker.ask("ttft", tokens=prompt, cached=_PREFIX)["seconds"]
                if number:
                    self.note(f"warm_ttft_{_PREFIX}_{_SUFFIX}_s", worker.label, seconds)

    def decode(self, depth: int, count: int, *, with_read: bool) -> None:
        """Measure decoding after `depth` tokens.

        The tokens per second follow from the time of count + 1 tokens minus that of one.
        `with_read` adds the GB/s of weights and those of a plain read.
        """
        prompt = self.tokens(max(depth, _OWN))
        self.all("hold", tokens=prompt)
        for number in range(self.rounds + 1):
            for worker in self.workers:
                one = worker.ask("decode", tokens=prompt, count=1)["seconds"]
                more = worker.ask("decode", tokens=prompt, count=count + 1)["seconds"]
                if not number:
                    continue
                self.note(f"decode_{depth}_tok_s", worker.label, count / (more - one))
                if with_read and worker.label.startswith(_OURS):
                    found = worker.ask("read")
                    step = count / (more - one) * found["nbytes"] / 1e9
                    self.note(f"decode_{depth}_gb_s", worker.label, step)
                    self.note("plain_read_gb_s", worker.label, found["gb_s"])
                    self.note(f"decode_{depth}_share_of_read", worker.label, step / found["gb_s"])

    def slope(self, depths: list[int]) -> None:
        """Compute the ms per token that 1,000 tokens of context add.

        It is the slope between the smallest and the largest depth.
        """
        first = min(depths)
        last = max(depths)
        if first == last:
            return
        for worker in self.workers:
            speeds = [
                self.figures[f"decode_{depth}_tok_s"][worker.label] for depth in (first, last)
            ]
            for fast, slow in zip(*speeds, strict=True):
                self.note(
                    "slope_ms_per_1k",
                    worker.label,
                    (1e3 / slow - 1e3 / fast) / (last - first) * 1e3,
                )

    def share(self, count: int) -> None:
        """Measure the total decode rate of sequences with a shared held prefix."""
        prefix = self.tokens(_PREFIX)
        suffixes = [self.tokens(_OWN) for _ in range(_SHARING)]
        self.all("hold", tokens=prefix)
        for number in range(self.rounds + 1):
            for worker in self.workers:
                one = worker.ask("share", prefix=prefix, suffixes=suffixes, count=1)["seconds"]
                more = worker.ask("share", prefix=prefix, suffixes=suffixes, count=count + 1)[
                    "seconds"
                ]
                if number:
                    self.note(
                        f"share_{_SHARING}x{_PREFIX}_tok_s",
                        worker.label,
                        _SHARING * count / (more - one),
                    )

    def memory(self, model: Path) -> None:
        """Measure peak memory and, for our engine, the part beyond model file, pool and states.

        The bundled model has no separate file, so this part is not reported for it.
        """
        for worker in self.workers:
            peak_mb = worker.ask("memory")["peak_mb"]
            self.note("peak_rss_mb", worker.label, peak_mb)
            about = worker.about["about"]
            if worker.label.startswith(_OURS) and model.is_file():
                known = model.stat().st_size + about["pool_bytes"] + about["state_bytes"]
                self.note("beside_file_pool_states_mb", worker.label, peak_mb - known / 1e6)

    def check(self, model: Path, shape: Shape) -> None:
        """Measure the relative L2 distance of logits to float64 with the same weights.

        OpenVINO exposes no logits. For shapes without a float64 model, it is the distance of our
        logits to llama.cpp's.
        """
        prompt = self.tokens(48)
        found = {
            worker.label: np.array(worker.ask("logits", tokens=prompt)["logits"])
            for worker in self.workers
            if not worker.label.startswith("openvino")
        }
        if shape.in_float64:
            measure = "logits_error"
            exact = last_logits(model, prompt, shape.heads, shape.kv_heads)
        elif _PEER in found:
            measure = "logits_from_llama.cpp"
            exact = found[_PEER]
        else:
            return
        for label, got in found.items():
            if got is exact:
                continue
            self.note(measure, label, float(np.linalg.norm(got - exact) / np.linalg.norm(exact)))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each measure: medians, ours relative to the best peer's, ranges.

        Only the first of our contenders is compared, because the best of two has two chances.
        """
        rows = []
        first = next((w.label for w in self.workers if w.label.startswith(_OURS)), _OURS)
        for measure, by_label in self.figures.items():
            medians = {label: statistics.median(values) for label, values in by_label.items()}
            best = max if measure.endswith(_MORE_IS_BETTER) else min
            others = [value for label, value in medians.items() if not label.startswith(_OURS)]
            row: dict[str, Any] = {"measure": measure}
            row |= {worker.label: medians.get(worker.label) for worker in self.workers}
            ours = medians.get(first)
            row[f"{first} / best peer"] = ours / best(others) if ours and others else None
            row["spread"] = {
                label: [min(got), max(got)] for label, got in by_label.items() if len(got) > 1
            }
            rows.append(row)
        return rows

    def spread(self) -> dict[str, dict[str, list[float]]]:
        """Return all rounds of every measure, for the JSON line."""
        return self.figures


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Format a row for the table, such as "1.62 (1.58-1.70)"."""
    cells = {}
    for name, value in row.items():
        if isinstance(value, float) and name in row["spread"]:
            least, most = row["spread"][name]
            cells[name] = f"{_short(value)} ({_short(least)}-{_short(most)})"
        elif name != "spread":
            cells[name] = _short(value) if isinstance(value, float) else value
    return cells


def _short(value: float) -> str:
    """Format with three digits, or with all digits before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def parser_for_models(
    description: str | None, shapes: Mapping[str, Shape] = SHAPES
) -> argparse.ArgumentParser:
    """Return a parser with the options of benchmarks on a random model.

    The model is written if it does not exist.
    """
    parser = harness.parser(description or "")
    parser.add_argument(
        "--shape",
        choices=shapes,
        default="0.5b",
        help="model whose shape is used (default: %(default)s)",
    )
    parser.add_argument(
        "--quant",
        choices=QUANTS,
        default="Q4_0",
        help="weight format of the model (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of measured rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--models", type=Path, default=_BENCHMARKS / "models", help="directory of the GGUF files"
    )
    return parser


def parser_for_layers(
    description: str | None, shapes: Mapping[str, Shape]
) -> argparse.ArgumentParser:
    """Return `parser_for_models` with an option for shapes that are too large as a whole."""
    parser = parser_for_models(description, shapes)
    parser.add_argument(
        "--layers",
        type=int,
        help="number of first layers to use, for shapes that are too large (default: all)",
    )
    return parser


class RandomModel(NamedTuple):
    """File of a random model, its shape, and its name in results."""

    path: Path
    shape: Shape
    name: str

    @classmethod
    def written(cls, options: argparse.Namespace, shapes: Mapping[str, Shape]) -> RandomModel:
        """Return the model for the options of `parser_for_layers`, written if it does not exist."""
        whole = shapes[options.shape]
        layers = options.layers
        if layers is not None and not 1 <= layers <= whole.layers:
            raise SystemExit(
                f"--layers {layers} is too large: {options.shape} has {whole.layers} layers"
            )
        shape, what = (whole, "") if layers is None else (whole.cut(layers), f"-{layers}l")
        name = (
            options.shape
            if layers is None
            else f"{options.shape}, {layers} of {whole.layers} layers,"
        )
        path = options.models / f"{options.shape}{what}-{options.quant}.gguf"
        return cls(kept_gguf(path, shape, options.quant), shape, f"{name} {options.quant}")


def options_from() -> argparse.Namespace:
    parser = parser_for_layers(__doc__, ALL_SHAPES)
    harness.add_threads(parser)
    parser.add_argument(
        "--depths",
        type=int,
        nargs="+",
        default=[0, 2048, 8192],
        help="numbers of cached tokens before decoding (default: %(default)s)",
    )
    parser.add_argument(
        "--capacity", type=int, default=16384, help="size of every engine's KV cache in tokens"
    )
    harness.add_peers_python(parser)
    parser.add_argument(
        "--flash-attn",
        choices=("on", "off"),
        default="on",
        help="whether llama.cpp with 16-bit KV uses flash attention (default: %(default)s)",
    )
    parser.add_argument(
        "--only", nargs="+", help="labels of the engines to run, or prefixes of labels"
    )
    parser.add_argument(
        "--cpu-features",
        help="CPU features for our kernels, such as +avx2,+fma,+f16c for an older machine",
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help="measure only a cold prompt and decoding, for large models",
    )
    parser.add_argument(
        "--prompt", type=int, default=_PREFIX + _SUFFIX, help="length of the cold prompt in tokens"
    )
    parser.add_argument(
        "--generate",
        type=int,
        metavar="N",
        help="number of tokens to decode (default: 64, or 32 after a long context)",
    )
    parser.add_argument(
        "--bundled", action="store_true", help="measure the bundled model in our engine only"
    )
    return parser.parse_args()


def main() -> None:
    options = options_from()
    if options.quick:
        options.shape = "tiny"
        options.rounds = 1
        options.depths = [0, 512]
        options.capacity = 8192
    if options.bundled:
        options.only = ["kvboost_edge"]
        model = Path("kvboost-edge/demo")
        what = "bundled"
        options.shape = options.quant = None
        options.depths = [0, 512]
        options.capacity = 4096
    else:
        model, shape, what = RandomModel.written(options, ALL_SHAPES)
    if any(engine == _OURS for _, engine, _, _ in contenders(options)):
        harness.pack_beforehand(model)
    workers = start(options, model)
    if not workers:
        raise SystemExit("no engine could be started")
    # Only our engine runs the bundled model, which determines the vocabulary.
    vocab = workers[0].about["about"]["vocab_size"] if options.bundled else shape.vocab
    bench = Bench(workers, vocab, options.rounds)
    bench.cold(512 if options.bundled else options.prompt)
    if not options.bundled and not options.short:
        bench.warm()
    for depth in options.depths:
        # The bundled model's weights fit in CPU caches, so a memory read is no comparison.
        with_read = depth == options.depths[0] and not options.bundled
        count = options.generate or (64 if depth < _PREFIX else 32)
        bench.decode(depth, count, with_read=with_read)
    bench.slope(options.depths)
    if not options.bundled and not options.short:
        bench.share(32)
    bench.memory(model)
    if not options.bundled:
        bench.check(model, shape)
    for worker in workers:
        worker.close()
    rows = bench.rows()
    about = {worker.label: worker.about for worker in workers}
    table = [shown(row) for row in rows]
    harness.report(
        f"bench_peers {what}",
        rows,
        options=options,
        shown=table,
        rounds=bench.spread(),
        engines=about,
    )


if __name__ == "__main__":
    main()
