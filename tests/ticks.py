"""Does Python go on while something computes? A second thread takes the time every few milliseconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

TICK = 0.005  # seconds


def times_of_ticks(work: Callable[[], object]) -> np.ndarray:
    """Times from before the work to after it, one every `TICK`, taken by another thread."""
    times, ticking, stop = [], threading.Event(), threading.Event()

    def tick() -> None:
        while not stop.wait(TICK):
            times.append(time.perf_counter())
            ticking.set()

    ticker = threading.Thread(target=tick)
    ticker.start()
    ticking.wait()
    start = time.perf_counter()
    work()
    end = time.perf_counter()
    stop.set()
    ticker.join()
    return np.array([start, *[moment for moment in times if start < moment < end], end])
