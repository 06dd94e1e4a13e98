"""KV reuse of text at other positions: reordered documents and a changed first line.

    python benchmarks/bench/bench_reuse.py                                   # 0.5B shape, Q4_0
    python benchmarks/bench/bench_reuse.py --shape 1.5b --quant Q4_K_M --rounds 1

Compares this engine with engines that recompute the text. The model is random (see bench_peers.py),
so the quality gate is off. Each round uses new documents in one process:

    cold        a header, 8 documents of 512 tokens, and 64 tokens
    prefix      the same header and documents, and 64 other tokens
    none, selective, cacheblend   the documents in another order after another header, with each
                                  recompute strategy
    exactly     the prompt of `none` again, computed exactly, to compare decoding after reused and
                computed tokens
    orders      8 concurrent requests with different orders: blocks in use relative to one order
    line        4,000 tokens with another first line, with the default strategy

Then the other engines, in separate processes, compute the first prompts of `none` and `line`
completely and once, because they can reuse nothing. Ratios are relative to `cold`, for each round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.bench_peers import parser_for_models, worker_or_none
from benchmarks.data.random_model import kept_gguf
from benchmarks.data.shapes import SHAPES
from kvboost_edge import CPUPagedEngine, GenerationMode, GenerationResult

_BENCHMARKS = Path(__file__).parents[1]
_REUSE = GenerationMode.CHUNK_KV_REUSE
_STRATEGIES = ("none", "selective", "cacheblend")
_DOCUMENTS = 8
_HEADER = 16
_QUESTION = 64
_DECODED = 33
_BARS = {
    "none, of cold": 0.08,
    "cacheblend, of cold": 0.30,
    "decode behind spans, of exact": 0.97,
    "line, of cold": 0.30,
    "orders: blocks beside the first request's, of one's own": 0.06,
}


class Bench:
    """Figures by name, with one value per round, and the steps that measure them."""

    def __init__(self, engine: CPUPagedEngine, options: argparse.Namespace) -> None:
        self.engine = engine
        self.options = options
        self.figures: dict[str, list[float]] = {}
        self._rng = np.random.default_rng(0)
        self.prompts: dict[str, list[int]] = {}

    def tokens(self, count: int) -> list[int]:
        vocab = self.engine.runner_info.vocab_size
        found: list[int] = self._rng.integers(300, vocab - 300, count).tolist()
        return found

    def note(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)
        print(
            f"{name}: {value:.4g}", file=sys.stderr, flush=True
        )  # printed at once, in case the run is interrupted

    def ask(self, name: str, prompt: list[int], **options: Any) -> float:
        """Return the seconds to the first token, and record the time of each later token."""
        result = self.engine.generate(prompt, _DECODED, temperature=0.0, ignore_eos=True, **options)
        self.note(f"{name}, s", result.ttft_ms / 1000)
        self.note(f"{name}, decode ms", float(np.median(np.diff(result.token_times_ms))))
        self._note_shares(name, result)
        return result.ttft_ms / 1000

    def _note_shares(self, name: str, result: GenerationResult) -> None:
        if result.approximate:
            self.note(
                f"{name}: found tokens computed, of all",
                result.recomputed_tokens / result.prompt_tokens,
            )
            self.note(
                f"{name}: tokens shared, of all", result.reused_span_tokens / result.prompt_tokens
            )

    def round(self, number: int) -> None:
        shuffle = random.Random(number).shuffle
        documents = [self.tokens(self.options.document) for _ in range(_DOCUMENTS)]
        body = [token for document in documents for token in document]
        header = self.tokens(_HEADER)
        cold = self.ask("cold", header + body + self.tokens(_QUESTION))
        self.note(
            "prefix, of cold", self.ask("prefix", header + body + self.tokens(_QUESTION)) / cold
        )
        for strategy in _STRATEGIES:
            shuffle(documents)
            prompt = (
                self.tokens(_HEADER)
                + [t for document in documents for t in document]
                + self.tokens(_QUESTION)
            )
            seconds = self.ask(strategy, prompt, mode=_REUSE, recompute_strategy=strategy)
            self.note(f"{strategy}, of cold", seconds / cold)
            self.prompts.setdefault(strategy, prompt)
            if strategy == "none":
                self.ask("exactly", prompt, mode=GenerationMode.BASELINE)
                steps = [self.figures[f"{name}, decode ms"][-1] for name in ("exactly", "none")]
                self.note("decode behind spans, of exact", steps[0] / steps[1])
        self._orders(documents)
        self._line(cold)
        self.engine.reset_cache()

    def _orders(self, documents: list[list[int]]) -> None:
        """Measure the blocks that 8 orders of the same documents use together."""
        self.engine.reset_cache()
        self.engine.warm([token for document in documents for token in document])
        prompts = []
        for number in range(8):
            random.Random(number).shuffle(documents)
            prompts.append(
                self.tokens(_HEADER)
                + [t for one in documents for t in one]
                + self.tokens(_QUESTION)
            )
        handles = [
            self.engine.submit(
                p,
                mode=_REUSE,
                recompute_strategy="none",
                max_new_tokens=2 * _DECODED,
                ignore_eos=True,
            )
            for p in prompts
        ]
        used = 0
        while not all(handle.done for handle in handles):
            stats = self.engine.paged_stats()
            used = stats["used_blocks"] if stats["num_running"] == len(handles) else used
            time.sleep(0.01)
        assert all(handle.result().approximate for handle in handles)
        each = len(prompts[0]) / self.engine.config.block_size
        self.note(
            "orders: blocks beside the first request's, of one's own", (used - each) / (7 * each)
        )

    def _line(self, cold: float) -> None:
        rest = self.tokens(self.options.line - 24)
        prompts = [self.tokens(24) + rest for _ in range(2)]
        first = self.ask("line, first", prompts[0])
        self.note("line, of cold", self.ask("line", prompts[1], mode=_REUSE) / first)
        self.prompts.setdefault("line", prompts[1])

    def peers(self, model: Path) -> None:
        """Measure the other engines on the same prompts."""
        python = self.options.peers_python
        options = self.options
        for engine in ("llama.cpp", "openvino") if python.exists() else ():
            command = [str(python), str(_BENCHMARKS / "peers" / "worker.py"), engine, str(model)]
            command += ["--threads", str(options.threads), "--capacity", str(options.capacity)]
            worker = worker_or_none(engine, command)
            if worker is None:
                continue
            worker.ask("ttft", tokens=self.tokens(64), cached=0)
            for name in ("none", "line"):
                seconds = worker.ask("ttft", tokens=self.prompts[name], cached=0)["seconds"]
                self.note(f"{engine}, prompt of {name}, s", seconds)
                self.note(
                    f"{name}, of {engine}'s",
                    statistics.median(self.figures[f"{name}, s"]) / seconds,
                )
            worker.close()


def options_from() -> argparse.Namespace:
    parser = parser_for_models(__doc__)
    parser.set_defaults(rounds=2)
    harness.add_threads(parser)
    parser.add_argument(
        "--document", type=int, default=512, help="length of each of the 8 documents in tokens"
    )
    parser.add_argument(
        "--line",
        type=int,
        default=4000,
        help="length of the prompt with a changed first line, in tokens",
    )
    parser.add_argument(
        "--capacity", type=int, default=32768, help="size of every engine's KV cache in tokens"
    )
    harness.add_peers_python(parser)
    options = parser.parse_args()
    if options.quick:
        options.shape = "tiny"
        options.rounds = 2
        options.document = 64
        options.line = 500
    return options


def main() -> None:
    options = options_from()
    model = options.models / f"{options.shape}-{options.quant}.gguf"
    kept_gguf(model, SHAPES[options.shape], options.quant)
    with CPUPagedEngine.from_pretrained(
        model,
        num_blocks=options.capacity // 16,
        num_threads=options.threads,
        reuse_gate="off",
        speculation="off",
    ) as engine:
        bench = Bench(engine, options)
        engine.generate(bench.tokens(64), 4)
        engine.generate(bench.tokens(64), 4, mode=_REUSE)
        for number in range(options.rounds):
            bench.round(number)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    bench.peers(model)
    rows = [
        {
            "measure": name,
            "median": statistics.median(values),
            "least": min(values),
            "most": max(values),
        }
        | {"bar": _BARS.get(name)}
        for name, values in bench.figures.items()
    ]
    harness.report(
        f"bench_reuse {options.shape} {options.quant}", rows, options=options, figures=bench.figures
    )


if __name__ == "__main__":
    main()
