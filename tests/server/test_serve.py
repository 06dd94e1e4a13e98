"""The server's own part of running: the heap before the first request."""

from __future__ import annotations

import gc
import sys
from collections import deque

import pytest

from kvboost_edge.server.serve import freeze_heap


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="collects in steps, by another rule")
def test_a_large_heap_does_not_put_off_the_collection_of_what_comes_later():
    """The collector waits until what is new is a quarter of what it kept the last time: 150,000 objects here."""
    kept = [[number] for number in range(600_000)]
    full = []
    gc.callbacks.append(watch := lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
    freeze_heap()
    full.clear()
    try:
        in_flight: deque[list[object]] = deque(maxlen=3000)
        for _ in range(140_000):
            circle: list[object] = []
            circle.append(circle)
            in_flight.append(circle)
        assert full
    finally:
        gc.callbacks.remove(watch)
        gc.unfreeze()
    assert len(kept) == 600_000
