"""Embedded texts per second, against llama.cpp on the same random GGUF file of a real shape.

Each engine is a separate process (peers/worker.py). In each round, all engines embed the same new
texts in turn, and the figures are medians over rounds. llama.cpp runs with passes of 512 and of
2,048 tokens, and the faster one counts. The table also has the cosine similarity of our vectors to
llama.cpp's, as both use the same quantized weights. Our peak memory includes a KV pool of 16,384
tokens, llama.cpp's one of the size of a pass.

    python benchmarks/bench/bench_embeddings.py               # Qwen3-Embedding-0.6B shape, Q8_0
    python benchmarks/bench/bench_embeddings.py --quant Q4_0
    python benchmarks/bench/bench_embeddings.py --shape embeddinggemma-300m
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.bench_peers import Worker, parser_for_models, worker_or_none
from benchmarks.data.random_model import kept_gguf
from benchmarks.data.shapes import SHAPES, EmbeddingShape

_BENCHMARKS = Path(__file__).parents[1]
_OURS = "kvboost_edge"
_FIRST_TEXT_TOKEN = 300  # first id that is a text token; smaller ids are bytes and control tokens
_BATCHES = (512, 2048)


def start(options: argparse.Namespace, model: Path) -> list[Worker]:
    """Start the engines, ours first. Name those that do not start, with the reason."""
    script = str(_BENCHMARKS / "peers" / "worker.py")
    commands = {_OURS: [sys.executable, script, "kvboost_edge", str(model)]}
    for batch in _BATCHES:
        name = f"llama.cpp batch {batch}"
        commands[name] = [
            str(options.peers_python),
            script,
            "llama.cpp embed",
            str(model),
            "--batch",
            str(batch),
        ]
    workers = []
    for name, command in commands.items():
        if not Path(command[0]).exists():
            print(
                f"skipped: {name}: no {command[0]}; `make bench-embeddings` installs the peers",
                file=sys.stderr,
            )
            continue
        worker = worker_or_none(name, [*command, "--threads", str(options.threads)])
        if worker is not None:
            workers.append(worker)
    return workers


def texts(options: argparse.Namespace, vocab: int) -> Iterator[list[list[int]]]:
    """Yield new texts for each round, the same for every engine."""
    seed = 0
    while True:
        rng = np.random.default_rng(seed)
        yield rng.integers(_FIRST_TEXT_TOKEN, vocab, (options.texts, options.tokens)).tolist()
        seed += 1


def measure(
    workers: list[Worker], options: argparse.Namespace, vocab: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return each engine's texts per second by round, and its vectors of the first two texts."""
    speeds: dict[str, list[float]] = {worker.label: [] for worker in workers}
    vectors: dict[str, Any] = {}
    for number, inputs in zip(range(options.rounds + 1), texts(options, vocab), strict=False):
        for worker in workers:
            asked = inputs if number else inputs[:4]  # round 0 is the warm-up
            answer = worker.ask("embed", inputs=asked)
            vectors[worker.label] = np.array(answer["vectors"])
            if number:
                speeds[worker.label].append(len(inputs) / answer["seconds"])
    return speeds, vectors


def rows(
    speeds: dict[str, list[float]], vectors: dict[str, Any], peaks: dict[str, float]
) -> list[dict[str, Any]]:
    """Return a row for each engine.

    `times` is our speed relative to the fastest peer. `cosine` is the lowest similarity of ours to
    a peer's.
    """
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    peer = max((value for name, value in medians.items() if name != _OURS), default=None)
    found = []
    for name, values in speeds.items():
        is_ours = name == _OURS
        cosine = None if is_ours else float((vectors[_OURS] * vectors[name]).sum(axis=1).min())
        found.append(
            {
                "engine": name,
                "texts_per_s": medians[name],
                "least": min(values),
                "most": max(values),
                "times": medians[name] / peer if is_ours and peer else None,
                "cosine_to_ours": cosine,
                "peak_rss_mb": peaks[name],
            }
        )
    return found


def main() -> None:
    parser = parser_for_models(__doc__)
    parser.set_defaults(shape="qwen3-embedding-0.6b", quant="Q8_0", rounds=3)
    parser.add_argument(
        "--texts", type=int, default=256, help="number of texts per round (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=200, help="number of tokens per text")
    harness.add_threads(parser)
    harness.add_peers_python(parser)
    options = parser.parse_args()
    if options.quick:
        options.shape = "embedding-tiny"
        options.rounds = 1
        options.texts = 8
    shape = SHAPES[options.shape]
    if not isinstance(shape, EmbeddingShape):
        raise SystemExit(f"--shape {options.shape} is not an embedding model; choose another shape")
    model = kept_gguf(
        options.models / f"{options.shape}-{options.quant}.gguf", shape, options.quant
    )
    workers = start(options, model)
    if not workers or workers[0].label != _OURS:
        raise SystemExit("our engine could not be started")
    speeds, vectors = measure(workers, options, shape.vocab)
    peaks = {worker.label: worker.ask("memory")["peak_mb"] for worker in workers}
    for worker in workers:
        worker.close()
    about = {worker.label: worker.about for worker in workers}
    name = (
        f"bench_embeddings {options.shape} {options.quant}, {options.texts} texts of "
        f"{options.tokens} tokens"
    )
    harness.report(
        name, rows(speeds, vectors, peaks), options=options, rounds=speeds, engines=about
    )


if __name__ == "__main__":
    main()
