"""Does Python go on while something computes? A second thread takes the time every few milliseconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

TICK = 0.005  # seconds
LONGEST_GAP = 0.050
ATTEMPTS = 20


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


def assert_ticks_go_on(work: Callable[[], object]) -> None:
    """While the work runs, which is compiled before and takes longer than the longest gap. Other processes can delay a
    tick, hence several attempts."""
    work()
    longest = []
    for _ in range(ATTEMPTS):
        times = times_of_ticks(work)
        assert times[-1] - times[0] > 2 * LONGEST_GAP, "too short to tell"
        longest.append(float(np.diff(times).max()))
        if longest[-1] < LONGEST_GAP:
            assert len(times) > (times[-1] - times[0]) / LONGEST_GAP
            return
    raise AssertionError(f"longest gaps between ticks in {ATTEMPTS} attempts: {longest}")
