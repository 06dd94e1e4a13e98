"""Throughput of good clients with and without a hundred slow sockets.

    python benchmarks/bench/bench_slow_clients.py

Good clients send one request after another. In every other round, slow clients are attached that
send headers or bodies, or read answers, one byte at a time. When the server drops them, they
reconnect. They run in a separate process. Prints the requests per second of both kinds of rounds
and the ratio of the medians, which should be at least 0.95.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.bench_server import free_port, served

_MODEL = "kvboost-edge/demo"
_PAUSE_S = 0.5  # seconds between two bytes of a slow client
_TOKENS = 24


async def good(url: str, clients: int, seconds: float) -> float:
    """Return the requests per second of clients that wait for each answer."""
    until = time.perf_counter() + seconds
    done = 0

    async def client(number: int, http: httpx.AsyncClient) -> None:
        nonlocal done
        body = {
            "model": _MODEL,
            "prompt": f"Client {number} asks.",
            "max_tokens": _TOKENS,
            "temperature": 0,
        }
        body |= {"ignore_eos": True, "stream": number % 2 == 1}
        while time.perf_counter() < until:
            answer = await http.post(f"{url}/v1/completions", json=body)
            if answer.status_code != 200:
                raise RuntimeError(f"a good client got {answer.status_code}: {answer.text[:200]}")
            done += 1

    started = time.perf_counter()
    async with httpx.AsyncClient(timeout=60) as http:
        await asyncio.gather(*(client(number, http) for number in range(clients)))
    return done / (time.perf_counter() - started)


async def slow(port: int, count: int) -> None:
    """Attach slow sockets, report this, and continue until killed."""
    attached = 0

    async def client(number: int) -> None:
        nonlocal attached
        rng = random.Random(number)
        first = True
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                connection = socket.socket()
                # Small buffers, so that unread data stays in the server's buffers.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.setblocking(False)
                await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
                reader, writer = await asyncio.open_connection(sock=connection, limit=64)
                attached += first
                if attached == count and first:
                    print("attached", flush=True)
                first = False
                try:
                    await _dawdle(number % 4, rng, reader, writer)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(_PAUSE_S)

    await asyncio.gather(*(client(number) for number in range(count)))


async def _dawdle(
    kind: int, rng: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Make one slow request, with the header (two of four), the body or the answer byte by byte."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    if kind == 3:
        writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8)
        while await reader.readexactly(1):
            await asyncio.sleep(_PAUSE_S * rng.uniform(0.5, 1.5))
    if kind == 2:
        writer.write(head + b"Content-Length: 10000\r\n\r\n")
    text = head * 100 if kind < 2 else b" " * 10_000
    for byte in text:
        if writer.is_closing():
            return
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(_PAUSE_S * rng.uniform(0.5, 1.5))


@contextlib.contextmanager
def attached_slowly(port: int, count: int) -> Iterator[None]:
    """Attach `count` slow sockets while the block runs."""
    command = [sys.executable, __file__, "--attach", str(port), "--sockets", str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "attached\n":
                raise RuntimeError("the slow sockets could not be attached")
            yield
        finally:
            process.kill()


def options_from() -> argparse.Namespace:
    parser = harness.parser(__doc__ or "")
    parser.add_argument(
        "--sockets", type=int, default=100, help="number of slow sockets (default: %(default)s)"
    )
    parser.add_argument(
        "--clients", type=int, default=4, help="number of good clients (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=6,
        help="rounds, each with and without slow sockets (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="duration of each half of a round in seconds"
    )
    parser.add_argument(
        "--attach", type=int, metavar="PORT", help="run only the slow clients of this server"
    )
    return parser.parse_args()


def main() -> None:
    options = options_from()
    if options.attach:
        asyncio.run(slow(options.attach, options.sockets))
        return
    if options.quick:
        options.rounds = 2
        options.seconds = 1.0
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "kvboost_edge.server", "--model", _MODEL, "--port", str(port)]
    alone: list[float] = []
    beside: list[float] = []
    with served([*command, "--log-level", "warning"], port):
        asyncio.run(good(url, options.clients, 1.0))
        for number in range(options.rounds):
            # The order alternates, so that increasing load on the machine favors neither half.
            for with_slow in (False, True) if number % 2 else (True, False):
                with (
                    attached_slowly(port, options.sockets)
                    if with_slow
                    else contextlib.nullcontext()
                ):
                    rate = asyncio.run(good(url, options.clients, options.seconds))
                (beside if with_slow else alone).append(rate)
    rows = [
        {
            "good clients": options.clients,
            "slow sockets": count,
            "requests_s": statistics.median(rates),
        }
        | {"least": min(rates), "most": max(rates)}
        for count, rates in ((0, alone), (options.sockets, beside))
    ]
    ratio = statistics.median(beside) / statistics.median(alone)
    print(f"ratio of medians: {ratio:.3f}")
    harness.report("bench_slow_clients", rows, options=options, ratio=ratio)


if __name__ == "__main__":
    main()
