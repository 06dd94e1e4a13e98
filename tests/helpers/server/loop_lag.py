"""How late the event loop of a server is while something is asked of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from helpers.server.live_servers import LiveServer

TICK = 0.002
MOST_LAG = 0.05  # of 99 in 100 moments
MOST_STALL = 0.25  # of the worst moment of any request
MOST_ROUNDS = 4


class LagMeter:
    """How late a timer of the loop fires, in seconds, while it is on; at most what this process
    computed meanwhile, as other processes may keep it waiting too.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.late: list[float] = []
        self._is_on = True
        self._loop = loop
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> LagMeter:
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)

    async def _start(self) -> None:
        self._task = asyncio.create_task(self._measure())

    async def _stop(self) -> None:
        assert self._task is not None
        self._is_on = False
        await self._task  # with the sample that is being taken

    async def _measure(self) -> None:
        while self._is_on:
            due = self._loop.time() + TICK
            computed = time.process_time()
            await asyncio.sleep(TICK)
            self.late.append(min(self._loop.time() - due, time.process_time() - computed))


def lags(seconds: list[float]) -> str:
    """For people."""
    shown = {
        f"p{share}": f"{1e3 * np.percentile(seconds, share):.1f}" for share in (50, 90, 99, 100)
    }
    return f"{len(seconds)} samples, milliseconds: {shown}"


def loop_of(server: LiveServer) -> asyncio.AbstractEventLoop:
    """The loop that the server runs in."""
    loop: asyncio.AbstractEventLoop = server.server.servers[0].get_loop()
    return loop


def in_threads(work: Any, count: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def least_lag(server: LiveServer, load: Callable[[], None]) -> list[float]:
    """Of a few rounds under load the one with the least lag: what the server itself does shows in
    each, what else the machine does may not.
    """
    rounds: list[list[float]] = []
    while len(rounds) < MOST_ROUNDS and not (rounds and np.percentile(rounds[-1], 99) < MOST_LAG):
        with LagMeter(loop_of(server)) as meter:
            load()
        rounds.append(meter.late)
    return rounds[-1]


def check(late: list[float]) -> None:
    assert np.percentile(late, 99) < MOST_LAG, lags(late)
    assert max(late) < MOST_STALL, lags(late)
