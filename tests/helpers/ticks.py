"""A second thread that records the time every few milliseconds, to show that Python code runs
during a computation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

TICK = 0.005  # seconds
SHORTEST = 20 * TICK


def times_of_ticks(work: Callable[[], object]) -> np.ndarray:
    """Return timestamps from before the work to after it, one every `TICK`, recorded by another
    thread.
    """
    times = []
    ticking = threading.Event()
    stop = threading.Event()

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


def assert_ticks_go_on(work: Callable[[], object]) -> None:
    """Assert that no gap between ticks is as long as half the work, nearly all of which is one
    kernel call.

    The work is compiled first. Gaps caused by other processes are shorter than that.
    """
    work()
    times = times_of_ticks(work)
    duration = times[-1] - times[0]
    gap = float(np.diff(times).max())
    assert duration > SHORTEST, "the work is too short for this test"
    assert gap < duration / 2
