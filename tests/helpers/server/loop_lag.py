"""Delay of a server's event loop under load."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from helpers.server.live_servers import LiveServer

TICK = 0.002
_BODY = json.dumps(list(range(100_000)))
MOST_STALL = 0.25  # of the worst sample of any request
MOST_ROUNDS = 4


@functools.cache
def most_lag() -> float:
    """Return the limit for 99 of 100 samples in seconds: 50 ms, or more on a slow machine.

    Nothing can interrupt the parser of a JSON body. The limit is the time of ten bodies of 100,000
    ids, if that is more than 50 ms.
    """
    times = []
    for _ in range(5):
        began = time.thread_time()
        json.loads(_BODY)
        times.append(time.thread_time() - began)
    return max(0.05, 10 * min(times))


class LagMeter:
    """Measures how late a timer of the loop fires, in seconds, while it is active. Each delay is
    capped at the CPU time of this process, since other processes may delay the timer too.
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
        await self._task  # includes the sample in progress

    async def _measure(self) -> None:
        while self._is_on:
            due = self._loop.time() + TICK
            computed = time.process_time()
            await asyncio.sleep(TICK)
            self.late.append(min(self._loop.time() - due, time.process_time() - computed))


def lags(seconds: list[float]) -> str:
    """Format the delays for a failure message."""
    shown = {
        f"p{share}": f"{1e3 * np.percentile(seconds, share):.1f}" for share in (50, 90, 99, 100)
    }
    return f"{len(seconds)} samples, milliseconds: {shown}"


def loop_of(server: LiveServer) -> asyncio.AbstractEventLoop:
    """Return the event loop of the server."""
    loop: asyncio.AbstractEventLoop = server.server.servers[0].get_loop()
    return loop


def in_threads(work: Any, count: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def least_lag(server: LiveServer, load: Callable[[], None]) -> list[float]:
    """Repeat a load for a few rounds and return the delays of the first good one, or of the last.
    The server's own delays occur in every round, those caused by the machine may not.
    """
    rounds: list[list[float]] = []
    while len(rounds) < MOST_ROUNDS and not (rounds and np.percentile(rounds[-1], 99) < most_lag()):
        with LagMeter(loop_of(server)) as meter:
            load()
        rounds.append(meter.late)
    return rounds[-1]


def check(late: list[float]) -> None:
    assert np.percentile(late, 99) < most_lag(), lags(late)
    assert max(late) < MOST_STALL, lags(late)
