"""Streams, short prompts and cancellation during a long prompt, with and without step pacing.

Step pacing is the option `target_tpot`.

    alone    time between two tokens of a stream while nothing else runs
    during   the same while the long prompt is computed
    prompt   seconds of the long prompt
    short    time to first token of a prompt of 60 tokens, sent while two long prompts are computed
    cancel   time from the cancellation of a long prompt to its end

Times are in milliseconds, except for the long prompt in seconds. Each round runs both settings in
turn, each in a separate process. `--shape` names a random model, which may be a hybrid model or a
mixture of experts. It is written if it does not exist. OpenVINO GenAI (`--openvino`) and
llama.cpp's server (`--llama-server`) take part with the streams and the long prompt.

    python benchmarks/bench/bench_interference.py --model FILE.gguf --streams 1 4 8 --prompt 8000
    python benchmarks/bench/bench_interference.py --shape lfm2-1.2b --streams 4
    python benchmarks/bench/bench_interference.py --model FILE.gguf --openvino --llama-server PATH
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.bench.bench_peers import ALL_SHAPES, RandomModel, parser_for_layers
from benchmarks.bench.bench_server import free_port, served
from kvboost_edge import CPUPagedEngine

_SHORT = 60  # tokens of a short prompt
_STREAM = 40  # tokens in the prompt of a stream
_PERCENTILES = (50, 99)
_SETTINGS = {"paced": None, "unpaced": 0.0}  # value of target_tpot
_OPENVINO = "openvino"
_LLAMA_SERVER = "llama-server"
_BENCHMARKS = Path(__file__).parents[1]
_THREADS = 2
_TOKENS = 6000  # maximum length of a stream
_ALONE_S = 3.0  # seconds of the streams before the long prompt


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
            engine.submit(text(_STREAM), max_new_tokens=_TOKENS, ignore_eos=True)
            for _ in range(streams)
        ]
        times: list[list[float]] = [[] for _ in handles]

        def follow(number: int) -> None:
            for _ in handles[number].events():
                times[number].append(time.perf_counter())

        readers = [threading.Thread(target=follow, args=(n,), daemon=True) for n in range(streams)]
        for reader in readers:
            reader.start()
        time.sleep(_ALONE_S)
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


def measure_llama_server(program: str, model: str, streams: int, prompt: int) -> dict[str, Any]:
    """Return the times of llama.cpp's server, in milliseconds, for the long prompt in seconds."""
    rng = np.random.default_rng(1)
    times: list[list[float]] = [[] for _ in range(streams)]
    ended = threading.Event()

    def body(length: int, num_tokens: int, stream: bool) -> dict[str, Any]:
        ids = rng.integers(1000, 40_000, length).tolist()
        return {"prompt": ids, "n_predict": num_tokens, "ignore_eos": True, "stream": stream}

    def follow(url: str, number: int, request: dict[str, Any]) -> None:
        with httpx.stream("POST", f"{url}/completion", json=request, timeout=None) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    times[number].append(time.perf_counter())
                if ended.is_set():
                    return

    port = free_port()
    context = prompt + (streams + 1) * (_TOKENS + _STREAM)
    command = [program, "-m", model, "--port", str(port), "-t", str(_THREADS), "-c", str(context)]
    command += ["-np", str(streams + 1), "--kv-unified"]
    url = f"http://127.0.0.1:{port}"
    with served(command, port):
        readers = [
            threading.Thread(target=follow, args=(url, number, body(_STREAM, _TOKENS, True)))
            for number in range(streams)
        ]
        for reader in readers:
            reader.start()
        time.sleep(_ALONE_S)
        began = time.perf_counter()
        httpx.post(f"{url}/completion", json=body(prompt, 1, False), timeout=None)
        finished = time.perf_counter()
        ended.set()
        for reader in readers:
            reader.join()
    found: dict[str, Any] = {"prompt": finished - began, "alone": [], "during": []}
    for one in times:
        for before, after in itertools.pairwise(one):
            if after < began:
                found["alone"].append((after - before) * 1e3)
            elif after <= finished:
                found["during"].append((after - before) * 1e3)
    return found


def measure_openvino(python: Path, model: str, streams: int, prompt: int) -> dict[str, Any]:
    """Return the times of OpenVINO GenAI, in milliseconds, for the long prompt in seconds."""
    script = _BENCHMARKS / "peers" / "openvino_interference.py"
    command = [str(python), str(script), model, str(_THREADS), str(streams), str(prompt)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(rounds: list[dict[str, dict[str, Any]]]) -> str:
    """Format the figures of all rounds as a table."""
    lines = [
        "| setting | alone p50, p99 | during p50, p99, max | prompt s | short | cancel |",
        "|---|---|---|---|---|---|",
    ]
    for name in rounds[0]:
        runs = [one[name] for one in rounds]
        alone, during = (
            np.concatenate([run[which] for run in runs]) if runs[0][which] else np.zeros(1)
            for which in ("alone", "during")
        )
        single = [
            f"{statistics.median(run[which] for run in runs):.{digits}f}"
            for which, digits in (("prompt", 2), ("short", 0), ("cancel", 0))
            if which in runs[0]
        ]
        single += [""] * (3 - len(single))
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
    parser.add_argument("--openvino", action="store_true", help="also run OpenVINO GenAI")
    parser.add_argument(
        "--peers-python", type=Path, default=_BENCHMARKS.parent / ".venv-peers" / "bin" / "python"
    )
    parser.add_argument("--llama-server", metavar="PATH", help="also run llama.cpp's server")
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
        rounds = [_round(options, streams) for _ in range(options.rounds)]
        everything[streams] = rounds
        print(f"\n{streams} streams, prompt of {options.prompt} tokens\n\n{table(rounds)}")
    if options.out:
        options.out.write_text(json.dumps(everything), encoding="utf-8")


def _round(options: argparse.Namespace, streams: int) -> dict[str, dict[str, Any]]:
    """Return the times of each setting and of each peer, by name."""
    found = {name: _in_a_process(options, streams, name) for name in _SETTINGS}
    model, prompt = options.model, options.prompt
    if options.openvino:
        found[_OPENVINO] = measure_openvino(options.peers_python, model, streams, prompt)
    if options.llama_server:
        found[_LLAMA_SERVER] = measure_llama_server(options.llama_server, model, streams, prompt)
    return found


def _in_a_process(options: argparse.Namespace, streams: int, name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", options.model, "--setting", name]
    command += ["--streams", str(streams), "--prompt", str(options.prompt)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
