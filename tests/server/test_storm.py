"""Many requests whose clients leave at random moments of every phase: all that a request holds comes back, exactly."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading

import psutil
import pytest

from live_servers import serving, wait_until

pytestmark = pytest.mark.alone

MODEL = "kvboost-edge/demo"
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/warm")
AT_ONCE = 32


@pytest.fixture(scope="module")
def server(demo_engine):
    with serving(demo_engine, max_batch_size=8, max_queue_size=64, request_timeout=60) as server:
        yield server


def body_of(rng: random.Random, path: str) -> dict:
    text = " ".join(rng.choices(("shared", "prefix", "words", "of", "a", "prompt"), k=rng.choice((3, 60, 400))))
    if path == "/v1/warm":
        return {"text": text}
    options = {"max_tokens": rng.choice((1, 10, 50)), "ignore_eos": True, "stream": rng.random() < 0.6}
    options |= {"model": MODEL, "n": rng.choice((1, 1, 1, 3)), "temperature": rng.choice((0, 1))}
    if path == "/v1/completions":
        return {**options, "prompt": text}
    return {**options, "messages": [{"role": "user", "content": text}]}


async def visit(server, seed: int) -> str:
    """One client. Most leave early: before the body ends, while queued, in prefill, in decode, or in mid-stream."""
    rng = random.Random(seed)
    path = rng.choice(PATHS)
    data = server.request_bytes(path, body_of(rng, path), "Connection: close")
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        leaves = rng.random()
        if leaves < 0.1:
            writer.write(data[: rng.randrange(len(data))])
            return "incomplete"
        writer.write(data)
        if leaves < 0.5:
            await asyncio.sleep(rng.random() ** 3 * 0.2)
            return "left"
        if leaves < 0.7:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(rng.choice((1, 500, 5000))), 10)
            return "left in the answer"
        status = (await asyncio.wait_for(reader.read(), 60))[9:12].decode()
        assert status in ("200", "400", "503"), status
        return status
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()  # a reset instead of an orderly end
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def held_by(server) -> tuple:
    """What must be the same before and after: threads, files and sockets, blocks, tasks, connections, tickets."""
    threads = sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_"))
    state = server.server.server_state
    stats = server.engine.paged_stats()
    return (
        threads,
        psutil.Process().num_fds(),
        stats["used_blocks"],
        len(server.engine._core._live),
        len(state.tasks),
        len(state.connections),
        server.idle(),
        len(server.state.admission.groups._groups),
    )


def test_a_storm_of_leaving_clients_leaves_nothing(server, scale):
    count = scale(1000, 5000)

    async def storm(first: int, number: int) -> list[str]:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(seed: int) -> str:
            async with gate:
                return await visit(server, seed)

        return await asyncio.gather(*(one(seed) for seed in range(first, first + number)))

    def settled() -> bool:
        return server.idle() and not server.server.server_state.connections and not server.server.server_state.tasks

    asyncio.run(storm(10_000, 30))
    wait_until(settled, "the first visitors to be gone")
    before = held_by(server)
    seen = asyncio.run(storm(0, count))
    wait_until(settled, "the storm to be over", 60)
    # A connection is told that it is lost before its socket is closed.
    wait_until(lambda: psutil.Process().num_fds() <= before[1], "the last sockets to be closed", 10)
    assert held_by(server) == before
    assert {"incomplete", "left", "left in the answer", "200"} <= set(seen)
    server.engine._scheduler.manager.check_invariants([])
    with server.client() as client:
        assert client.get("/ready").status_code == 200
