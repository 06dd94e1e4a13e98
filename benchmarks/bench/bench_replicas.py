"""Two replicas with one thread each against one engine with one thread, on the bundled model.

    python benchmarks/bench/bench_replicas.py --quick
    python benchmarks/bench/bench_replicas.py --only redis --shape 0.5b     # a random model of that
                                                                      # shape, in Q4_0

Everything is measured over HTTP, with each server in a separate process:

    - the time that routing adds to a request (p50, bar 10 ms)
    - the share of prompt tokens found when 8 tenants repeatedly ask about their own 1,000 tokens,
      relative to one engine's (bar 95%)
    - with a redis-server, the time to first token of a prompt that only other replicas have seen,
      relative to computing it (bar 0.2), with the server's own breakdown in milliseconds

`--quick` sends fewer requests, for a run of under 5 minutes. One engine and the replicas are
measured one after another, and each once. The bundled model computes 6,000 tokens per second, so
reading does not pay off. The last bar is for larger models (`--shape`). Times on a busy machine
mean little.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.data.random_model import write_gguf
from benchmarks.data.shapes import SHAPES

TENANTS = 8
SHARED_TOKENS = 1000
_REDIS = Path(__file__).parents[2] / ".redis" / "usr" / "bin"
_STARTING_S = 180.0


@contextlib.contextmanager
def served(*flags: str, keys: Sequence[str] = (), redis_url: str = "") -> Iterator[str]:
    """Start a server with these flags and yield its address once it is ready."""
    own = {"KVBOOST_API_KEYS": ",".join(keys), "KVBOOST_EDGE_REDIS_SECRET": "0" * 32}
    environment = {name: value for name, value in {**os.environ, **own}.items() if value}
    command = [
        sys.executable,
        "-m",
        "kvboost_edge",
        "serve",
        "--port",
        "0",
        "--disk-cache-dir",
        "off",
        *flags,
    ]
    command += ["--redis-url", redis_url] if redis_url else []
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True) as process,
    ):
        try:
            yield _address(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def _address(process: subprocess.Popen[str], log: Any) -> str:
    end = time.monotonic() + _STARTING_S
    while time.monotonic() < end and process.poll() is None:
        log.seek(0)
        if found := re.search(r'"url": "(http://[^"]+)"', log.read()):
            return found[1]
        time.sleep(0.1)
    log.seek(0)
    raise SystemExit(f"the server did not start: {log.read()[-2000:]}")


def asked(client: httpx.Client, ids: Sequence[int], key: str = "") -> tuple[float, dict[str, Any]]:
    """Return the seconds of a request for one token, and the answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    started = time.perf_counter()
    answer = client.post(
        "/v1/completions",
        json={"prompt": list(ids), "max_tokens": 1, "temperature": 0},
        headers=headers,
    )
    answer.raise_for_status()
    return time.perf_counter() - started, answer.json()


def overhead(address: str, rounds: int) -> float:
    """Return the median seconds of consecutive short requests, after a warm-up."""
    with httpx.Client(base_url=address, timeout=60) as client:
        times = [asked(client, [10, 11, 12, 13 + number % 50])[0] for number in range(rounds + 10)]
    return statistics.median(times[10:])


def hit_rate(address: str, keys: Sequence[str], rounds: int) -> float:
    """Return the share of prompt tokens found in the cache, with 4 concurrent requests."""
    draw = random.Random(0)
    shared = {key: [draw.randrange(10, 250) for _ in range(SHARED_TOKENS)] for key in keys}
    jobs = [
        (key, [*shared[key], *(draw.randrange(10, 250) for _ in range(24))])
        for key in keys
        for _ in range(rounds)
    ]
    draw.shuffle(jobs)
    with (
        httpx.Client(base_url=address, timeout=120) as client,
        concurrent.futures.ThreadPoolExecutor(4) as workers,
    ):
        answers = list(workers.map(lambda job: asked(client, job[1], job[0])[1]["usage"], jobs))
    found = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in answers)
    return found / sum(usage["prompt_tokens"] for usage in answers)


@contextlib.contextmanager
def redis_server() -> Iterator[str | None]:
    """Start a redis-server and yield its address, or None if it is not installed."""
    names = ("redis-server", "valkey-server", "redis-check-rdb")
    places = [shutil.which(name, path=f"{os.environ['PATH']}:{_REDIS}") for name in names]
    program = next(filter(None, places), None)
    if program is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kvboost-redis-") as folder:
        options = ["--port", "0", "--unixsocket", f"{folder}/s", "--save", "", "--dir", folder]
        libraries = {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join(map(str, (_REDIS.parent / "lib").glob("*-linux-gnu"))),
        }
        with subprocess.Popen(
            ["redis-server", *options], executable=program, stdout=subprocess.DEVNULL, env=libraries
        ) as process:
            try:
                yield f"unix://{folder}/s"
            finally:
                process.terminate()


def restored(redis_url: str, count: int, model: Sequence[str], threads: int) -> dict[str, float]:
    """Return the median milliseconds to the first token of 1,500 tokens, computed and restored.

    The reading replicas have never seen the prompts. Their own breakdown of the time is returned
    too.
    """
    draw = random.Random(1)
    prompts = [[draw.randrange(10, 250) for _ in range(1500)] for _ in range(count)]
    flags = ("--workers", "2", "--num-threads", str(threads), "--num-blocks", "1024", *model)
    seen: list[list[tuple[float, dict[str, Any]]]] = []
    for _ in range(2):
        with (
            served(*flags, redis_url=redis_url) as address,
            httpx.Client(base_url=address, timeout=600) as client,
        ):
            asked(client, range(10, 40))
            seen.append([asked(client, prompt) for prompt in prompts])
            time.sleep(3)  # blocks are written asynchronously
    cold, warm = seen
    figures = {"cold ms": _median(1e3 * seconds for seconds, _ in cold)}
    figures["restored ms"] = _median(1e3 * seconds for seconds, _ in warm)
    for name in ("load_ms", "lookup_ms", "prefill_ms"):
        figures[f"restored: {name}"] = _median(answer["kvboost"][name] for _, answer in warm)
    found = [answer["kvboost"]["hit_tokens"].get("redis", 0) for _, answer in warm]
    figures["restored: tokens read"] = _median(found)
    figures["restored / cold"] = round(figures["restored ms"] / figures["cold ms"], 3)
    return figures


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 2)


def main() -> None:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--only", choices=["overhead", "redis"], help="measure only this part")
    parser.add_argument(
        "--shape",
        choices=list(SHAPES),
        help="use a random model of this shape (default: the bundled model)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="threads of each replica, for prompts read from Redis",
    )
    options: argparse.Namespace = parser.parse_args()
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        model: tuple[str, ...] = ()
        if options.shape is not None:
            path = (
                Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvboost-shape-")))
                / "model.gguf"
            )
            write_gguf(path, SHAPES[options.shape], "Q4_0")
            model = ("--model", str(path))
        if options.only != "redis":
            figures |= beside_one_engine(options.quick, model)
        url = stack.enter_context(redis_server()) if options.only != "overhead" else None
        if url is not None:
            figures |= restored(url, 4 if options.quick else 12, model, options.threads)
    rows = [{"figure": name, "value": value} for name, value in figures.items()]
    harness.report("bench_replicas", rows, options=options)


def beside_one_engine(is_quick: bool, model: Sequence[str]) -> dict[str, Any]:
    """Compare replicas with one engine: the added time per request, and the tokens found."""
    rounds, requests = (60, 6) if is_quick else (400, 20)
    keys = [f"tenant-{number}-of-the-benchmark" for number in range(TENANTS)]
    one = ("--num-threads", "1")
    two = ("--num-threads", "1", "--workers", "2")
    figures: dict[str, Any] = {}
    for name, flags in (("one engine", one), ("two replicas", two)):
        with served(*flags, *model, "--num-blocks", "1024") as address:
            figures[f"{name}: request ms"] = round(1e3 * overhead(address, rounds), 2)
        with served(*flags, *model, "--num-blocks", "1024", keys=keys) as address:
            figures[f"{name}: hit rate"] = round(hit_rate(address, keys, requests), 4)
    figures["overhead ms"] = round(
        figures["two replicas: request ms"] - figures["one engine: request ms"], 2
    )
    figures["hit rate ratio"] = round(
        figures["two replicas: hit rate"] / figures["one engine: hit rate"], 4
    )
    return figures


if __name__ == "__main__":
    main()
