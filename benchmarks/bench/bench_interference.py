"""Streams, short prompts and cancellation during a long prompt, with and without step pacing.

Step pacing is the option `target_tpot`.

    alone    ms between two tokens of a stream while nothing else runs, without the first gaps
    during   the same while the long prompt is computed, with the gaps at its start and its end
    prompt   seconds to the first token of the long prompt
    short    ms to the first token of a prompt of 60 tokens, sent during two long prompts
    cancel   ms from the cancellation of a long prompt to its end

Percentiles are those of all gaps of all rounds, other figures are medians over rounds. Each round
runs both settings in turn, each in a separate process. `--shape` names a random model, which may be
a hybrid model or a mixture of experts. It is written if it does not exist. OpenVINO GenAI
(`--openvino`) and llama.cpp's server (`--llama-server`) take part with the streams and the long
prompt, with as many threads and, if no option says otherwise, with their defaults. All engines take
the most likely token. Our KV cache has 8 bits, OpenVINO's too, llama.cpp's 16.

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
from typing import Any, NamedTuple

import httpx
import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.bench_peers import ALL_SHAPES, RandomModel, parser_for_layers
from benchmarks.bench.bench_server import free_port, served
from kvboost_edge import CPUPagedEngine
from kvboost_edge.models.checkpoint import Checkpoint

_SHORT = 60  # tokens of a short prompt
_STREAM = 40  # tokens in the prompt of a stream
_PERCENTILES = (50, 99)
_SETTINGS = {"paced": None, "unpaced": 0.0}  # value of target_tpot
_OPENVINO = "openvino"
_LLAMA_SERVER = "llama-server"
_BENCHMARKS = Path(__file__).parents[1]
_SKIPPED = 5  # first gaps of a stream, during which other streams start


class Job(NamedTuple):
    """What an engine computes.

    Attributes:
        model: GGUF file or model directory.
        threads: number of threads.
        streams: number of streams.
        prompt: length of the long prompt in tokens.
        ids: smallest and largest token id of the prompts.
        tokens: maximum length of a stream.
        alone_s: seconds of the streams before the long prompt.
    """

    model: str
    threads: int
    streams: int
    prompt: int
    ids: tuple[int, int]
    tokens: int = 6000
    alone_s: float = 3.0

    @classmethod
    def of(cls, model: Path | str, threads: int, prompt: int) -> Job:
        """Return a job without streams, with the token ids and lengths that the model can have."""
        spec = Checkpoint.open(model).spec
        ids = min(1000, spec.vocab_size // 2), min(40_000, spec.vocab_size - 1)
        longest = min(cls._field_defaults["tokens"], spec.max_context - _STREAM)
        return cls(str(model), threads, 0, prompt, ids, tokens=longest)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return random token ids."""
        found: list[int] = rng.integers(self.ids[0], self.ids[1] + 1, count).tolist()
        return found


def figures_of(times: list[list[float]], began: float, ended: float) -> dict[str, Any]:
    """Return the gaps of streams, the same for each engine.

    Args:
        times: seconds of the tokens of each stream.
        began: start of the long prompt in seconds.
        ended: time of the long prompt's first token in seconds.
    """
    found: dict[str, Any] = {"prompt": ended - began, "alone": [], "during": []}
    for one in times:
        for number, (before, after) in enumerate(itertools.pairwise(one)):
            if after < began and number >= _SKIPPED:
                found["alone"].append((after - before) * 1e3)
            elif after >= began and before <= ended:
                found["during"].append((after - before) * 1e3)
    return found


def measure(job: Job, target: float | None) -> dict[str, Any]:
    """Run one setting of our engine."""
    rng = np.random.default_rng(1)
    with CPUPagedEngine.from_pretrained(
        job.model,
        num_threads=job.threads,
        kv_cache_bits=8,
        max_cache_bytes=1e9,
        target_tpot=target,
        speculation="off",
    ) as engine:

        def submit(length: int, num_tokens: int) -> Any:
            ids = job.draw(rng, length)
            options = {"temperature": 0.0, "ignore_eos": True}
            return engine.submit(ids, max_new_tokens=num_tokens, **options)

        handles = [submit(_STREAM, job.tokens) for _ in range(job.streams)]
        times: list[list[float]] = [[] for _ in handles]

        def follow(number: int) -> None:
            for _ in handles[number].events():
                times[number].append(time.perf_counter())

        readers = [
            threading.Thread(target=follow, args=(n,), daemon=True) for n in range(job.streams)
        ]
        for reader in readers:
            reader.start()
        time.sleep(job.alone_s)
        began = time.perf_counter()
        submit(job.prompt, 1).result()
        ended = time.perf_counter()
        cancelled = submit(job.prompt, 1)
        time.sleep(2)
        found = figures_of([list(one) for one in times], began, ended)
        found["cancel"] = _seconds_to_cancel(cancelled) * 1e3
        for handle in handles:
            handle.cancel()
        for reader in readers:
            reader.join()
        long = [submit(job.prompt, 1) for _ in range(2)]
        time.sleep(2)
        began = time.perf_counter()
        submit(_SHORT, 1).result()
        found["short"] = (time.perf_counter() - began) * 1e3
        for handle in long:
            handle.cancel()
    return found


def _seconds_to_cancel(handle: Any) -> float:
    began = time.perf_counter()
    handle.cancel()
    handle.result()
    return time.perf_counter() - began


def measure_llama_server(program: str, job: Job) -> dict[str, Any]:
    """Run llama.cpp's server."""
    rng = np.random.default_rng(1)
    times: list[list[float]] = [[] for _ in range(job.streams)]
    ended = threading.Event()

    def body(length: int, num_tokens: int, stream: bool) -> dict[str, Any]:
        request = {"prompt": job.draw(rng, length), "n_predict": num_tokens, "stream": stream}
        return {**request, "temperature": 0.0, "ignore_eos": True}

    def follow(url: str, number: int, request: dict[str, Any]) -> None:
        with httpx.stream("POST", f"{url}/completion", json=request, timeout=None) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    times[number].append(time.perf_counter())
                if ended.is_set():
                    return

    port = free_port()
    context = job.prompt + (job.streams + 1) * (job.tokens + _STREAM)
    command = [program, "-m", job.model, "--port", str(port), "-t", str(job.threads)]
    command += ["-c", str(context), "-np", str(job.streams + 1), "--kv-unified"]
    url = f"http://127.0.0.1:{port}"
    with served(command, port):
        readers = [
            threading.Thread(target=follow, args=(url, number, body(_STREAM, job.tokens, True)))
            for number in range(job.streams)
        ]
        for reader in readers:
            reader.start()
        time.sleep(job.alone_s)
        began = time.perf_counter()
        httpx.post(f"{url}/completion", json=body(job.prompt, 1, False), timeout=None)
        finished = time.perf_counter()
        ended.set()
        for reader in readers:
            reader.join()
    return figures_of(times, began, finished)


def measure_openvino(python: Path, job: Job, step: int | None) -> dict[str, Any]:
    """Run OpenVINO GenAI."""
    script = _BENCHMARKS / "peers" / "openvino_interference.py"
    given = {**job._asdict(), "stream": _STREAM, "step": step}
    command = [str(python), str(script), json.dumps(given)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return figures_of(**json.loads(done.stdout.splitlines()[-1]))


def rows_of(streams: int, rounds: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each setting and peer. Missing figures are None."""
    rows = []
    for name in rounds[0]:
        runs = [one[name] for one in rounds]
        row: dict[str, Any] = {"streams": streams, "engine": name}
        for which in ("alone", "during"):
            gaps = [gap for run in runs for gap in run[which]]
            for share in _PERCENTILES:
                row[f"{which} p{share} ms"] = float(np.percentile(gaps, share)) if gaps else None
            row[f"{which} max ms"] = max(gaps, default=None)
        for which, unit in (("prompt", "s"), ("short", "ms"), ("cancel", "ms")):
            known = [run[which] for run in runs if which in run]
            row[f"{which} {unit}"] = statistics.median(known) if known else None
        rows.append(row)
    return rows


def main() -> None:
    """Run both settings in alternating rounds and print a row for each number of streams."""
    parser = parser_for_layers(__doc__, ALL_SHAPES)
    parser.set_defaults(rounds=3)
    parser.add_argument("--model", help="GGUF file or model directory (default: a random model)")
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of each engine (default: 2)"
    )
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
        "--openvino-step",
        type=int,
        metavar="TOKENS",
        help="maximum tokens of OpenVINO's steps (default: its own default)",
    )
    harness.add_peers_python(parser)
    parser.add_argument("--llama-server", metavar="PATH", help="also run llama.cpp's server")
    parser.add_argument("--setting", choices=_SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.setting:
        print(json.dumps(measure(Job(**json.loads(options.job)), _SETTINGS[options.setting])))
        return
    if options.quick:
        options.shape, options.streams, options.prompt, options.rounds = "tiny", [1], 2000, 1
    if options.model is None:
        options.model = RandomModel.written(options, ALL_SHAPES).path
    whole = Job.of(options.model, options.threads, options.prompt)
    if options.quick:
        whole = whole._replace(alone_s=0.3)
    rounds = {}
    rows = []
    for streams in options.streams:
        job = whole._replace(streams=streams)
        rounds[streams] = [_round(options, job) for _ in range(options.rounds)]
        rows += rows_of(streams, rounds[streams])
    harness.report("bench_interference", rows, options=options, rounds=rounds)


def _round(options: argparse.Namespace, job: Job) -> dict[str, dict[str, Any]]:
    """Return the times of each setting and of each peer, by name."""
    found = {name: _in_a_process(name, job) for name in _SETTINGS}
    if options.openvino:
        found[_OPENVINO] = measure_openvino(options.peers_python, job, options.openvino_step)
    if options.llama_server:
        found[_LLAMA_SERVER] = measure_llama_server(options.llama_server, job)
    return found


def _in_a_process(name: str, job: Job) -> dict[str, Any]:
    command = [sys.executable, __file__, "--setting", name, "--job", json.dumps(job._asdict())]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
