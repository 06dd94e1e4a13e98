"""Servers under load: clients with a shared system prompt arrive at random.

Compares our server with llama.cpp's and OpenVINO's. Each of N clients sends a few streamed requests
to /v1/completions, with the shared system prompt and its own question. Arrivals and pauses are
exponential with fixed seeds, the same for every server. Ours and llama.cpp's (`llama_cpp.server`,
which serves one request at a time) answer over HTTP. OpenVINO's continuous batching has no server
and runs the same schedule in its process, without the cost of HTTP, and chooses among all tokens
instead of letters. Speculation is off. The servers run one after another, never together, and each
once: how the machine changes meanwhile is not measured.

    python benchmarks/bench/bench_server.py             # 0.5B shape, Q4_0, 1, 4, 16, 64 clients
    python benchmarks/bench/bench_server.py --overhead  # cost of HTTP, on the bundled model
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import socket
import statistics
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import numpy as np
import psutil

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.data.random_model import kept_gguf
from benchmarks.data.shapes import SHAPES
from kvboost_edge import CPUPagedEngine

_BENCHMARKS = Path(__file__).parents[1]
_START_S = 180.0
_REQUEST_S = 900.0
_FIRST_SHOWN = 33  # byte "!", which is token 0 in the tokenizer of random_model.py


@dataclasses.dataclass(frozen=True)
class Call:
    """One request of a client.

    Attributes:
        pause: Pause in seconds after the client's previous request ended.
        prompt: The prompt.
    """

    pause: float
    prompt: str


@dataclasses.dataclass
class Seen:
    """Observations of a client for one request. Times are in seconds from sending."""

    first: float
    gaps: list[float]
    total: float
    tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0


def schedule(
    num_clients: int, requests: int, system: int, question: int, pause: float
) -> list[list[Call]]:
    """Return the calls of each client. Texts consist of letters, one token each."""
    rng = random.Random(num_clients)
    shared = "".join(rng.choices(string.ascii_uppercase, k=system))
    return [
        [
            Call(
                rng.expovariate(1 / pause),
                shared + "".join(rng.choices(string.ascii_uppercase, k=question)),
            )
            for _ in range(requests)
        ]
        for _ in range(num_clients)
    ]


async def one_call(
    client: httpx.AsyncClient, url: str, model: str, prompt: str, tokens: int
) -> Seen:
    """Send one request and read its stream."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }
    body["stream_options"] = {"include_usage": True}
    # A random model generates tokens without text, which a stream does not show, so it is
    # restricted to letters.
    body["logit_bias"] = {str(ord(letter) - _FIRST_SHOWN): 100 for letter in string.ascii_uppercase}
    if model != "peer":
        body["ignore_eos"] = True
    started = time.perf_counter()
    times = []
    usage = {}
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            usage = event.get("usage") or usage
            if event["choices"]:
                times.append(time.perf_counter() - started)
    made = usage.get("completion_tokens", tokens)  # llama_cpp.server does not report it in a stream
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return Seen(times[0], gaps, times[-1], made, usage.get("prompt_tokens", 0), cached)


async def drive(
    url: str, model: str, calls: list[list[Call]], tokens: int
) -> tuple[float, list[Seen]]:
    """Run all clients at once.

    Returns:
        The seconds from the start to the last answer, and the clients' observations.
    """
    limits = httpx.Limits(max_connections=len(calls) + 4)
    async with httpx.AsyncClient(timeout=_REQUEST_S, limits=limits) as client:

        async def run(own: list[Call]) -> list[Seen]:
            seen = []
            for call in own:
                await asyncio.sleep(call.pause)
                seen.append(await one_call(client, url, model, call.prompt, tokens))
            return seen

        started = time.perf_counter()
        results = await asyncio.gather(*(run(own) for own in calls))
        return time.perf_counter() - started, [seen for own in results for seen in own]


@contextlib.contextmanager
def served(
    command: list[str], port: int, *, log: IO[bytes] | None = None, cwd: Path | None = None
) -> Iterator[psutil.Process]:
    """Run a server process from its first answer to its end. `log` receives its output."""
    output = subprocess.DEVNULL if log is None else log
    process = subprocess.Popen(command, stdout=output, stderr=output, cwd=cwd)
    try:
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=2)
                if answer.status_code in (200, 401):  # 401 with API keys
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} ... did not start (exit status {process.poll()})")
            time.sleep(0.2)
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def summary(
    label: str, clients: int, seconds: float, seen: list[Seen], rss: float
) -> dict[str, Any]:
    """Return one row of the table."""
    first = [s.first * 1000 for s in seen]
    gaps = [gap * 1000 for s in seen for gap in s.gaps] or [0.0]
    prompt = sum(s.prompt_tokens for s in seen)
    return {
        "server": label,
        "clients": clients,
        "tok_s": sum(s.tokens for s in seen) / seconds,
        "ttft_p50_ms": statistics.median(first),
        "ttft_p99_ms": float(np.percentile(first, 99)),
        "gap_p99_ms": float(np.percentile(gaps, 99)),
        "cached_share": sum(s.cached_tokens for s in seen) / prompt if prompt else None,
        "rss_mb": rss / 1e6,
    }


def over_http(
    label: str, command: list[str], port: int, model: str, options: argparse.Namespace
) -> list[Any]:
    rows = []
    url = f"http://127.0.0.1:{port}"
    with served(command, port) as process:
        # compiles and starts threads
        asyncio.run(drive(url, model, schedule(2, 1, 64, 16, 0.01), 4))
        for clients in options.clients:
            calls = schedule(
                clients, options.requests, options.system, options.question, options.pause
            )
            seconds, seen = asyncio.run(drive(url, model, calls, options.tokens))
            rows.append(summary(label, clients, seconds, seen, process.memory_info().rss))
            print(f"  {label}, {clients} clients: {seconds:.1f} s", file=sys.stderr)
    return rows


def in_process(model: Path, options: argparse.Namespace) -> list[Any]:
    """Run the schedule on OpenVINO's continuous batching (peers/openvino_load.py)."""
    rows = []
    for clients in options.clients:
        calls = schedule(clients, options.requests, options.system, options.question, options.pause)
        work = [[[call.pause, [ord(c) for c in call.prompt]] for call in own] for own in calls]
        command = [
            str(options.peers_python),
            str(_BENCHMARKS / "peers" / "openvino_load.py"),
            str(model),
        ]
        done = subprocess.run(
            [*command, str(options.threads), str(options.tokens), str(options.capacity)],
            input=json.dumps(work),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            print(f"skipped: openvino: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            return rows
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        seen = [Seen(s["first"], s["gaps"], s["total"], s["tokens"]) for s in answer["seen"]]
        rows.append(summary("openvino (no http)", clients, answer["seconds"], seen, answer["rss"]))
        print(f"  openvino, {clients} clients: {answer['seconds']:.1f} s", file=sys.stderr)
    return rows


def overhead(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure what HTTP adds on the bundled model, against an engine in this process.

    Both run the same requests in turn.

        added_ms    the client's time minus the server engine's time for the same request
        slower_ms   the client's time minus that of the engine without a server, which includes the
                    time that the event loop takes from the engine
        cpu_ms      CPU time of the server process minus that of the engine without a server
    """
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "kvboost_edge.server",
        "--model",
        "kvboost-edge/demo",
        "--port",
        str(port),
    ]
    url = f"http://127.0.0.1:{port}/v1/completions"
    rows = []
    with (
        CPUPagedEngine.from_pretrained("kvboost-edge/demo") as engine,
        served(command, port) as process,
        httpx.Client(timeout=60) as client,
    ):
        for tokens, stream in ((1, False), (128, False), (128, True)):
            body = {
                "model": "kvboost-edge/demo",
                "prompt": "Doc 7.",
                "max_tokens": tokens,
                "temperature": 0,
            }
            body |= {"ignore_eos": True, "stream": stream}
            added = []
            over_http = []
            direct = []
            cpu = 0.0
            for number in range(options.overhead_rounds + 5):
                if number == 5:
                    cpu = 0.0
                    served_cpu = sum(process.cpu_times()[:2])
                started = time.perf_counter()
                if stream:
                    with client.stream("POST", url, json=body) as response:
                        lines = [
                            line for line in response.iter_lines() if line.startswith("data: {")
                        ]
                    answer = json.loads(lines[-1].removeprefix("data: "))
                else:
                    answer = client.post(url, json=body).json()
                seconds = time.perf_counter() - started
                started = time.perf_counter()
                cpu_started = time.process_time()
                engine.generate("Doc 7.", tokens, temperature=0, ignore_eos=True)
                if number >= 5:
                    cpu += time.process_time() - cpu_started
                    direct.append(1000 * (time.perf_counter() - started))
                    over_http.append(1000 * seconds)
                    added.append(1000 * seconds - answer["kvboost"]["total_ms"])
            served_cpu = sum(process.cpu_times()[:2]) - served_cpu
            rows.append(
                {
                    "tokens": f"{tokens}{' streamed' if stream else ''}",
                    "added_ms_p50": statistics.median(added),
                    "added_ms_p99": float(np.percentile(added, 99)),
                    "direct_ms_p50": statistics.median(direct),
                    "slower_ms_p50": statistics.median(over_http) - statistics.median(direct),
                    "cpu_ms": 1000 * (served_cpu - cpu) / options.overhead_rounds,
                }
            )
    for row in rows[1:]:
        figures = {name: (row[name] - rows[0][name]) / 127 for name in row if name != "tokens"}
        rows.append({"tokens": f"a token of {row['tokens']}", **figures})
    return rows


def options_from() -> argparse.Namespace:
    parser = harness.parser(__doc__ or "")
    parser.add_argument(
        "--clients",
        type=int,
        nargs="+",
        default=[1, 4, 16, 64],
        help="numbers of clients (default: %(default)s)",
    )
    parser.add_argument(
        "--requests", type=int, default=2, help="number of consecutive requests per client"
    )
    parser.add_argument(
        "--system", type=int, default=1000, help="length of the shared system prompt in tokens"
    )
    parser.add_argument(
        "--question", type=int, default=48, help="length of each question in tokens"
    )
    parser.add_argument(
        "--tokens", type=int, default=48, help="number of tokens to generate per request"
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=0.5,
        help="mean pause before each request of a client, in seconds",
    )
    harness.add_threads(parser)
    parser.add_argument(
        "--capacity",
        type=int,
        default=32768,
        help="size of our and OpenVINO's KV cache in tokens; llama_cpp.server has 4096, which "
        "suffice for the one request that it computes at a time",
    )
    parser.add_argument("--kv-cache-bits", default="16", help="bits per KV value of our server")
    parser.add_argument(
        "--models",
        type=Path,
        default=_BENCHMARKS / "models",
        help="directory of the model (default: benchmarks/models)",
    )
    harness.add_peers_python(parser)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("kvboost_edge", "llama.cpp", "openvino"),
        help="servers to run (default: all)",
    )
    parser.add_argument(
        "--overhead",
        action="store_true",
        help="measure only the cost of HTTP, on the bundled model",
    )
    parser.add_argument(
        "--overhead-rounds",
        type=int,
        default=200,
        help="requests per figure of --overhead (default: %(default)s)",
    )
    return parser.parse_args()


def own_command(model: Path, port: int, options: argparse.Namespace) -> list[str]:
    """Return the command of our server."""
    command = [sys.executable, "-m", "kvboost_edge.server", "--model", str(model)]
    command += ["--port", str(port), "--model-name", "own"]
    command += ["--num-blocks", str(options.capacity // 16)]
    command += ["--num-threads", str(options.threads), "--kv-cache-bits", options.kv_cache_bits]
    command += ["--request-timeout", str(_REQUEST_S), "--log-level", "warning"]
    # Otherwise a second run would find all prompts of the first one on disk.
    command += ["--disk-cache-dir", "off"]
    return [*command, "--speculation", "off"]  # off because the other servers do not speculate


def main() -> None:
    options = options_from()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.overhead:
        harness.report("bench_server overhead", overhead(options), options=options)
        return
    if options.quick:
        options.clients = [1, 4]
    shape = "tiny" if options.quick else "0.5b"
    model = kept_gguf(options.models / f"{shape}-Q4_0.gguf", SHAPES[shape], "Q4_0")
    rows: list[Any] = []
    wanted = options.only or ["kvboost_edge", "llama.cpp", "openvino"]
    if "kvboost_edge" in wanted:
        port = free_port()
        command = own_command(model, port, options)
        rows += over_http(f"kvboost_edge kv{options.kv_cache_bits}", command, port, "own", options)
    if "llama.cpp" in wanted and options.peers_python.exists():
        port = free_port()
        command = [
            str(options.peers_python),
            "-m",
            "llama_cpp.server",
            "--model",
            str(model),
            "--port",
            str(port),
        ]
        command += [
            "--n_ctx",
            "4096",
            "--n_threads",
            str(options.threads),
            "--n_batch",
            "2048",
            "--flash_attn",
            "true",
        ]
        command += [
            "--n_threads_batch",
            str(options.threads),
            "--model_alias",
            "peer",
            "--interrupt_requests",
            "false",
        ]
        rows += over_http("llama_cpp.server", command, port, "peer", options)
    if "openvino" in wanted and options.peers_python.exists():
        rows += in_process(model, options)
    harness.report("bench_server", rows, options=options)


if __name__ == "__main__":
    main()
