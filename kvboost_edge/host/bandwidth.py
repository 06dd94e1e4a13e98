"""Measurement of memory bandwidth, which limits decoding because each token reads all weights."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvboost_edge.host.memory import available_bytes

__all__ = ["measure_read_bandwidth"]

_BYTES = 192 << 20  # larger than the caches of most machines
_LEAST_BYTES = 8 << 20


def measure_read_bandwidth(num_threads: int, seconds: float = 0.3) -> float:
    """Return the bytes per second that `num_threads` threads read together.

    The result is the best of the rounds within `seconds`. NumPy reads a little more slowly than
    streaming kernels. The measurement takes up to 192 MB, and at most a quarter of the available
    memory.
    """
    size = max(_LEAST_BYTES, min(_BYTES, available_bytes() // 4)) // 8 // num_threads * num_threads
    # Write to the buffer once, because untouched pages are not mapped.
    words = np.full(size, 1, np.uint64)
    parts = np.split(words, num_threads)
    best = float("inf")
    end = time.perf_counter() + seconds
    with ThreadPoolExecutor(num_threads, thread_name_prefix="kvboost-edge-bandwidth") as pool:
        while best == float("inf") or time.perf_counter() < end:
            started = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))
            best = min(best, time.perf_counter() - started)
    return words.nbytes / best
