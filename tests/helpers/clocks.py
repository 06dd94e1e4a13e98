"""Clocks that tests move."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

REAL_CLOCK = time.monotonic


def give_clock(patch: pytest.MonkeyPatch, now: Callable[[], float], *modules: ModuleType) -> None:
    """These modules read `now` for `time.monotonic`.

    Nobody else may: the event loops of servers in other threads of this process reckon by that
    clock. One that looks at it meanwhile sleeps for as long as the two times are apart, and does
    not see that it is to end.
    """
    for module in modules:
        patch.setattr(module, "time", SimpleNamespace(**{**vars(time), "monotonic": now}))
