"""Streams, short prompts and cancellation during a long prompt, with and without step pacing.

Step pacing is the option `target_tpot`.

    alone    time between two tokens of a stream while nothing else runs
    during   the same while the long prompt is computed
    prompt   seconds of the long prompt
    short    time to first token of a prompt of 60 tokens, sent while two long prompts are computed
    cancel   time from the cancellation of a long prompt to its end

Times are in milliseconds, except for the long prompt in seconds. Each round runs both settings in
turn, each in a separate process. `--shape` names a random model, which may be a hybrid model or a
mixture of experts. It is written if it does not exist.

    python benchmarks/bench/bench_interference.py --model FILE.gguf --streams 1 4 8 --prompt 8000
    python benchmarks/bench/bench_interference.py --shape lfm2-1.2b --streams 4
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.bench.bench_peers import ALL_SHAPES, RandomModel, parser_for_layers
from kvboost_edge import CPUPagedEngine

_SHORT = 60  # tokens of a short prompt
_STREAM = 40  # tokens in the prompt of a stream
_PERCENTILES = (50, 99)
_SETTINGS = {"paced": None, "unpaced": 0.0}  # value of target_tpot


def measure(model: str, streams: int, prompt: int, target: float | None) -> dict[str, Any]:
    """Run one setting and return times in milliseconds, for the long prompt in seconds."""
    rng = np.random.default_rng(1)

    def text(count: int) -> list[int]:
        vocab = engine.tokenizer.vocab_size
        ids: list[int] = rng.integers(min(1000, vocab // 2), min(40_000, vocab), count).tolist()
        return ids

    with CPUPagedEngine.from_pretrained(
        model, kv_cache_bits=8, max_cache_bytes=1e9, target_tpot=target, speculation="off"
    ) as engine:
        handles = [
            engine.submit(text(_STREAM), max_new_tokens=6000, ignore_eos=True)
            for _ in range(streams)
        ]
        times: list[list[float]] = [[] for _ in handles]

        def follow(number: int) -> None:
            for _ in handles[number].events():
                times[number].append(time.perf_counter())

        readers = [threading.Thread(target=follow, args=(n,), daemon=True) for n in range(streams)]
        for reader in readers:
            reader.start()
        time.sleep(3)
        began = time.perf_counter()
        engine.submit(text(prompt), max_new_tokens=1).result()
        ended = time.perf_counter()
        found = {"prompt": ended - began, "alone": [], "during": []}
        for one in map(np.array, times):
            found["alone"] += (np.diff(one[one < began])[5:] * 1e3).tolist()
            found["during"] += (np.diff(one[(one >= began) & (one <= ended)]) * 1e3).tolist()
        cancelled = engine.submit(text(prompt), max_new_tokens=1)
        time.sleep(2)
        found["cancel"] = _seconds_to_cancel(cancelled) * 1e3
        for handle in handles:
            handle.cancel()
        for reader in readers:
            reader.join()
        long = [engine.submit(text(prompt), max_new_tokens=1) for _ in range(2)]
        time.sleep(2)
        began = time.perf_counter()
        engine.submit(text(_SHORT), max_new_tokens=1).result()
        found["short"] = (time.perf_counter() - began) * 1e3
        for handle in long:
            handle.cancel()
    return found


def _seconds_to_cancel(handle: Any) -> float:
    began = time.perf_counter()
    handle.cancel()
    handle.result()
    return time.perf_counter() - began


def table(rounds: list[dict[str, dict[str, Any]]]) -> str:
    """Format the figures of all rounds as a table."""
    lines = [
        "| setting | alone p50, p99 | during p50, p99, max | prompt s | short | cancel |",
        "|---|---|---|---|---|---|",
    ]
    for name in _SETTINGS:
        runs = [one[name] for one in rounds]
        alone, during = (
            np.concatenate([run[which] for run in runs]) if runs[0][which] else np.zeros(1)
            for which in ("alone", "during")
        )
        single = [
            f"{statistics.median(run[which] for run in runs):.{digits}f}"
            for which, digits in (("prompt", 2), ("short", 0), ("cancel", 0))
        ]
        spread = [f"{value:.1f}" for value in np.percentile(alone, _PERCENTILES)]
        more = [f"{value:.1f}" for value in (*np.percentile(during, _PERCENTILES), during.max())]
        lines.append(f"| {name} | {', '.join(spread)} | {', '.join(more)} | {' | '.join(single)} |")
    return "\n".join(lines)


def main() -> None:
    """Run both settings in alternating rounds and print a table for each number of streams."""
    parser = parser_for_layers(__doc__, ALL_SHAPES)
    parser.set_defaults(rounds=3)
    parser.add_argument("--model", help="GGUF file or model directory (default: a random model)")
    parser.add_argument(
        "--streams",
        type=int,
        nargs="+",
        default=[1, 4, 8],
        help="numbers of streams (default: 1 4 8)",
    )
    parser.add_argument(
        "--prompt", type=int, default=8000, help="length of a long prompt in tokens (default: 8000)"
    )
    parser.add_argument("--setting", choices=_SETTINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.streams, options.prompt, options.rounds = [1], 2000, 1
    if options.model is None:
        options.model = str(RandomModel.written(options, ALL_SHAPES).path)
    if options.setting:
        found = measure(
            options.model, options.streams[0], options.prompt, _SETTINGS[options.setting]
        )
        print(json.dumps(found))
        return
    everything = {}
    for streams in options.streams:
        rounds = [
            {name: _in_a_process(options, streams, name) for name in _SETTINGS}
            for _ in range(options.rounds)
        ]
        everything[streams] = rounds
        print(f"\n{streams} streams, prompt of {options.prompt} tokens\n\n{table(rounds)}")
    if options.out:
        options.out.write_text(json.dumps(everything), encoding="utf-8")


def _in_a_process(options: argparse.Namespace, streams: int, name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", options.model, "--setting", name]
    command += ["--streams", str(streams), "--prompt", str(options.prompt)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
