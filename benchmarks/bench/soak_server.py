"""Long run against one server, with cancelled and malformed requests among good ones.

    python benchmarks/bench/soak_server.py --minutes 10

It shows whether memory grows or the server slows down. Clients send requests after random pauses.
They drop a fifth of the requests, some before the first token and most after a random one. One
request in twenty is malformed. The server's memory, threads and open files are sampled every few
seconds. Prints the memory at each minute and its slope over the second half, the latencies of the
first and the last third, and whether memory, blocks, threads and files return to their initial
values when the server is idle.

The server is warm once every block of the pool was used, a pass of the largest size was computed
and the garbage collector has made full rounds. The memory at each minute includes uncollected
garbage and heap that the allocator keeps. The rows "in use" exclude both, before and after the run,
so a leak would show there.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import random
import signal
import statistics
import string
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.bench_server import free_port, served

_BAD: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"max_tokens": "many"},
    {"prompt": 7},
    {"no_such_field": 1},
    {"top_p": 2},
)
_MODEL = "kvboost-edge/demo"
_SERVE = "--serve"  # runs this file as the server
# Enough requests to reach the maximum of garbage: a full collection occurs every 2,000.
_WARM_SECONDS = 90.0
_LONG_WORDS = 300  # words; a prompt longer than the largest pass


@dataclass(frozen=True)
class Leave:
    """Time when a client disconnects: after some seconds, or after some events of the stream."""

    seconds: float | None = None
    events: int | None = None


class Soak:
    """Clients, counters and latencies."""

    def __init__(self, url: str, seconds: float, clients: int) -> None:
        self.url = url
        self.clients = clients
        self.started = time.perf_counter()
        self.until = self.started + seconds
        self.counts = {"good": 0, "cancelled": 0, "bad": 0, "refused": 0}
        self.latencies: list[tuple[float, float]] = []
        self.samples: list[tuple[float, int, int, int]] = []
        # Few different words are used, because the tokenizer caches up to 10,000, which would look
        # like a leak.
        rng = random.Random(0)
        self.words = [
            "".join(rng.choices(string.ascii_lowercase, k=rng.randrange(1, 9))) for _ in range(500)
        ]
        self.shared = " ".join(rng.choices(self.words, k=80))

    async def client(self, number: int, http: httpx.AsyncClient) -> None:
        rng = random.Random(number)
        while time.perf_counter() < self.until:
            await asyncio.sleep(rng.expovariate(4))
            prompt = " ".join([self.shared, *rng.choices(self.words, k=rng.randrange(1, 16))])
            body: dict[str, Any] = {
                "model": _MODEL,
                "prompt": prompt,
                "max_tokens": rng.randrange(1, 64),
                "stream": True,
            }
            kind = rng.random()
            if kind < 0.05:
                await self._bad(http, body | rng.choice(_BAD))
            else:
                await self._good(
                    http, body, self._leave(rng, body["max_tokens"]) if kind < 0.25 else None
                )

    @staticmethod
    def _leave(rng: random.Random, max_tokens: int) -> Leave:
        """Choose when a client disconnects.

        In one case of four it is after some seconds, while the prompt waits or is computed,
        otherwise after a random token.
        """
        if rng.random() < 0.25:
            return Leave(seconds=rng.uniform(0, 0.02))
        return Leave(events=rng.randrange(0, max_tokens // 2 + 1))

    async def _bad(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        response = await http.post(f"{self.url}/v1/completions", json=body)
        if response.status_code != 400:
            raise RuntimeError(
                f"a malformed request got {response.status_code}: {response.text[:200]}"
            )
        self.counts["bad"] += 1

    async def _good(
        self, http: httpx.AsyncClient, body: dict[str, Any], leave: Leave | None
    ) -> None:
        sent = time.perf_counter()
        try:
            async with (
                asyncio.timeout(leave.seconds if leave else None),
                http.stream("POST", f"{self.url}/v1/completions", json=body) as reply,
            ):
                if reply.status_code == 503:
                    self.counts["refused"] += 1
                    return
                if reply.status_code != 200:
                    raise RuntimeError(f"{reply.status_code}: {await reply.aread()!r}")
                done = False
                events = 0
                async for line in reply.aiter_lines():
                    if leave and leave.events == events:
                        raise TimeoutError
                    done = done or line == "data: [DONE]"
                    events += line.startswith("data: ")
                if not done:
                    raise RuntimeError("a stream ended without [DONE]")
        except TimeoutError:
            self.counts["cancelled"] += 1
            return
        self.counts["good"] += 1
        self.latencies.append((sent - self.started, time.perf_counter() - sent))

    async def watch(self, process: psutil.Process) -> None:
        while time.perf_counter() < self.until:
            self.samples.append(
                (
                    time.perf_counter() - self.started,
                    process.memory_info().rss,
                    process.num_threads(),
                    process.num_fds(),
                )
            )
            await asyncio.sleep(2)

    async def largest_pass(self) -> None:
        """Send a long prompt from every client at once.

        The pass buffers then have their final size.
        """
        rng = random.Random("long")
        prompts = [" ".join(rng.choices(self.words, k=_LONG_WORDS)) for _ in range(self.clients)]
        async with httpx.AsyncClient(timeout=60) as http:
            bodies = [
                {"model": _MODEL, "prompt": text, "max_tokens": 2, "stream": True}
                for text in prompts
            ]
            await asyncio.gather(*(self._good(http, body, None) for body in bodies))

    async def run(self, process: psutil.Process) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            await asyncio.gather(
                self.watch(process), *(self.client(i, http) for i in range(self.clients))
            )


def percentile(pairs: list[tuple[float, float]], low: float, high: float, share: float) -> float:
    """Return a percentile of the latencies that began between two times, in milliseconds."""
    chosen = [value for at, value in pairs if low <= at < high]
    return 1000 * float(np.percentile(chosen, share)) if chosen else float("nan")


def warm_up(url: str, process: psutil.Process, seconds: float, clients: int) -> None:
    """Send requests until the first use of everything (pool pages, pass buffers) is over."""
    evictions = 0
    while not evictions:  # blocks are evicted only after all were used
        soak = Soak(url, seconds, clients)
        asyncio.run(soak.largest_pass())
        asyncio.run(soak.run(process))
        evictions = httpx.get(f"{url}/v1/stats", timeout=30).json()["pool"]["evictions"]


def quiet(url: str, process: psutil.Process) -> dict[str, Any]:
    """Return the server's figures some seconds after the last request."""
    time.sleep(3)
    stats = httpx.get(f"{url}/v1/blocks", timeout=30).json()
    time.sleep(1)  # by then this connection is closed too
    process.send_signal(signal.SIGUSR1)
    time.sleep(1)
    return {
        "used_blocks": stats["counts"]["used"] + stats["counts"]["shared"],
        "running": stats["running"],
        "waiting": stats["waiting"],
        "threads": process.num_threads(),
        "files": process.num_fds(),
        "in_use_mb": process.memory_info().rss / 1e6,
    }


def serve(arguments: list[str]) -> int:
    """Run the server.

    SIGUSR1 makes it release garbage and, where supported, the allocator's free heap.
    """
    from kvboost_edge.server.__main__ import main as serve_main

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def give_back(*_: object) -> None:
        gc.collect()
        if trim is not None:
            trim(0)

    signal.signal(signal.SIGUSR1, give_back)
    return serve_main(arguments)


def options_from() -> argparse.Namespace:
    parser = harness.parser(__doc__ or "")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="duration (default: %(default)s)"
    )
    parser.add_argument(
        "--clients", type=int, default=12, help="number of clients (default: %(default)s)"
    )
    return parser.parse_args()


def main() -> None:
    options = options_from()
    seconds = 60 * (0.2 if options.quick else options.minutes)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, __file__, _SERVE, "--model", _MODEL, "--port", str(port)]
    command += ["--max-cache-bytes", "16e6", "--log-level", "warning"]
    with served(command, port) as process:
        warm_up(url, process, min(_WARM_SECONDS, seconds / 4), options.clients)
        before = quiet(url, process)
        soak = Soak(url, seconds, options.clients)
        asyncio.run(soak.run(process))
        after = quiet(url, process)
    half = [(at, rss) for at, rss, _, _ in soak.samples if at > seconds / 2]
    slope = (
        float(np.polyfit([at for at, _ in half], [rss for _, rss in half], 1)[0])
        if len(half) > 1
        else 0.0
    )
    rows = [
        {"what": "RSS slope over the second half, KB a minute", "value": slope * 60 / 1000},
        {"what": "RSS in use before, MB", "value": before["in_use_mb"]},
        {"what": "RSS in use after, MB", "value": after["in_use_mb"]},
        {
            "what": "RSS median, MB",
            "value": statistics.median(rss for _, rss, _, _ in soak.samples) / 1e6,
        },
        {
            "what": "p50 of the first third, ms",
            "value": percentile(soak.latencies, 0, seconds / 3, 50),
        },
        {
            "what": "p50 of the last third, ms",
            "value": percentile(soak.latencies, seconds * 2 / 3, seconds, 50),
        },
        {
            "what": "p99 of the first third, ms",
            "value": percentile(soak.latencies, 0, seconds / 3, 99),
        },
        {
            "what": "p99 of the last third, ms",
            "value": percentile(soak.latencies, seconds * 2 / 3, seconds, 99),
        },
        *({"what": name, "value": value} for name, value in soak.counts.items()),
    ]
    minutes = [
        statistics.median(rss for at, rss, _, _ in soak.samples if minute <= at / 60 < minute + 1)
        / 1e6
        for minute in range(max(1, int(seconds // 60)))
    ]
    print("RSS minute by minute, MB:", *(f"{rss:.1f}" for rss in minutes))
    print(json.dumps({"before": before, "after": after}))
    harness.report(
        "soak_server",
        rows,
        options=options,
        seconds=seconds,
        rss_mb=minutes,
        before=before,
        after=after,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [_SERVE]:
        sys.exit(serve(sys.argv[2:]))
    main()
