"""Clocks that tests advance."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

REAL_CLOCK = time.monotonic


def give_timer(patch: pytest.MonkeyPatch, now: Callable[[], float], *modules: ModuleType) -> None:
    """Make these modules read `now` instead of `time.perf_counter`.

    What follows from measured times, such as the number of drafts, is then the same in each run.
    """
    for module in modules:
        patch.setattr(module, "time", SimpleNamespace(**{**vars(time), "perf_counter": now}))


def give_clock(patch: pytest.MonkeyPatch, now: Callable[[], float], *modules: ModuleType) -> None:
    """Make these modules read `now` instead of `time.monotonic`.

    No other module may read it: the event loops of servers in other threads of this process rely on
    the real clock. A loop that reads the fake one sleeps for the difference between the two times
    and misses its shutdown.
    """
    for module in modules:
        patch.setattr(module, "time", SimpleNamespace(**{**vars(time), "monotonic": now}))
