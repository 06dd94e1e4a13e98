"""Bursts of clients that disconnect at random moments of every phase."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable
from typing import Any

Requests = Callable[[random.Random], tuple[str, bytes]]

AT_ONCE = 32


async def storm(server: Any, request_of: Requests, seeds: Iterable[int]) -> list[str]:
    """Visit the server once for each seed. Return the outcome of each visit: a status, or the phase
    in which the client disconnected.
    """
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> str:
        async with gate:
            return await _visit(server, request_of, random.Random(seed))

    return await asyncio.gather(*map(one, seeds))


async def _visit(server: Any, request_of: Requests, rng: random.Random) -> str:
    """Visit the server once. Most clients disconnect early: before the body ends, while queued, in
    prefill, in decode, or in mid-stream.
    """
    path, data = request_of(rng)
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        leaves = rng.random()
        if leaves < 0.1:
            writer.write(data[: rng.randrange(len(data))])
            return "incomplete"
        writer.write(data)
        if leaves < 0.45:
            await asyncio.sleep(rng.random() ** 3 * 0.2)
            return "left"
        if leaves < 0.65:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(rng.choice((1, 500, 5000))), 10)
            return "left in the answer"
        answer = await asyncio.wait_for(reader.read(), 120)
        status = answer[9:12].decode()
        assert status in ("200", "400", "404", "503"), (path, answer[:2000])
        assert not [word for word in (b"engine stopped", b"Traceback") if word in answer], (
            path,
            answer[:2000],
        )
        return status
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()  # a reset instead of an orderly close
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
