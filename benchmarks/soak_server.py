"""A long run against one server: cancels and bad requests among good ones; does memory grow, does it slow down?

    python benchmarks/soak_server.py --minutes 10

Clients ask at random pauses; a fifth of the requests is dropped by its client at a random moment, one in twenty is
malformed. Every few seconds the server's memory, threads and open files are read. Printed: the slope of its memory over
the second half, latencies of the first and the last third, and whether blocks, threads and files are back where they
were when all is quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import string
import sys
import time
from typing import Any

import httpx
import numpy as np
import psutil

import harness
from bench_server import free_port, served

_BAD: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"max_tokens": "many"},
    {"prompt": 7},
    {"no_such_field": 1},
    {"top_p": 2},
)
_MODEL = "kvboost-edge/demo"


class Soak:
    """Clients, counts and latencies."""

    def __init__(self, url: str, seconds: float, clients: int) -> None:
        self.url, self.clients = url, clients
        self.started = time.perf_counter()
        self.until = self.started + seconds
        self.counts = {"good": 0, "cancelled": 0, "bad": 0, "refused": 0}
        self.latencies: list[tuple[float, float]] = []
        self.samples: list[tuple[float, int, int, int]] = []
        # Of few words: the tokenizer remembers up to 10,000, which is no leak and would look like one.
        rng = random.Random(0)
        self.words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randrange(1, 9))) for _ in range(500)]
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
                await self._good(http, body, rng.uniform(0, 0.04) if kind < 0.25 else None)

    async def _bad(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        response = await http.post(f"{self.url}/v1/completions", json=body)
        if response.status_code != 400:
            raise RuntimeError(f"a malformed request got {response.status_code}: {response.text[:200]}")
        self.counts["bad"] += 1

    async def _good(self, http: httpx.AsyncClient, body: dict[str, Any], drop_after: float | None) -> None:
        sent = time.perf_counter()
        try:
            async with (
                asyncio.timeout(drop_after),
                http.stream("POST", f"{self.url}/v1/completions", json=body) as reply,
            ):
                if reply.status_code == 503:
                    self.counts["refused"] += 1
                    return
                if reply.status_code != 200:
                    raise RuntimeError(f"{reply.status_code}: {await reply.aread()!r}")
                done = False
                async for line in reply.aiter_lines():
                    done = done or line == "data: [DONE]"
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

    async def run(self, process: psutil.Process) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            await asyncio.gather(self.watch(process), *(self.client(i, http) for i in range(self.clients)))


def percentile(pairs: list[tuple[float, float]], low: float, high: float, share: float) -> float:
    """Of the latencies that began between two moments, in milliseconds."""
    chosen = [value for at, value in pairs if low <= at < high]
    return 1000 * float(np.percentile(chosen, share)) if chosen else float("nan")


def quiet(url: str, process: psutil.Process) -> dict[str, Any]:
    """The state some seconds after the last request."""
    time.sleep(3)
    stats = httpx.get(f"{url}/v1/blocks", timeout=30).json()
    time.sleep(1)  # that connection too is closed then
    return {
        "used_blocks": stats["counts"]["used"] + stats["counts"]["shared"],
        "running": stats["running"],
        "waiting": stats["waiting"],
        "threads": process.num_threads(),
        "files": process.num_fds(),
    }


def options_from() -> argparse.Namespace:
    parser = harness.parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=12)
    return parser.parse_args()


def main() -> None:
    options = options_from()
    seconds = 60 * (0.2 if options.quick else options.minutes)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "kvboost_edge.server", "--model", _MODEL, "--port", str(port)]
    command += ["--max-cache-bytes", "16e6", "--log-level", "warning"]
    with served(command, port) as process:
        warm = Soak(url, min(10.0, seconds / 4), options.clients)
        asyncio.run(warm.run(process))
        before = quiet(url, process)
        soak = Soak(url, seconds, options.clients)
        asyncio.run(soak.run(process))
        after = quiet(url, process)
    half = [(at, rss) for at, rss, _, _ in soak.samples if at > seconds / 2]
    slope = float(np.polyfit([at for at, _ in half], [rss for _, rss in half], 1)[0]) if len(half) > 1 else 0.0
    rows = [
        {"what": "RSS slope over the second half, KB a minute", "value": slope * 60 / 1000},
        {"what": "RSS median, MB", "value": statistics.median(rss for _, rss, _, _ in soak.samples) / 1e6},
        {"what": "p50 of the first third, ms", "value": percentile(soak.latencies, 0, seconds / 3, 50)},
        {"what": "p50 of the last third, ms", "value": percentile(soak.latencies, seconds * 2 / 3, seconds, 50)},
        {"what": "p99 of the first third, ms", "value": percentile(soak.latencies, 0, seconds / 3, 99)},
        {"what": "p99 of the last third, ms", "value": percentile(soak.latencies, seconds * 2 / 3, seconds, 99)},
        *({"what": name, "value": value} for name, value in soak.counts.items()),
    ]
    print(json.dumps({"before": before, "after": after}))
    harness.report("soak_server", rows, options=options, seconds=seconds, before=before, after=after)


if __name__ == "__main__":
    main()
