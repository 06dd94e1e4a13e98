"""The watchdog of the step loop: one warning per stall in which requests wait but nothing runs.

A stall is a fault of the scheduler or of a tier. The warning holds the plan in numbers and request
ids, with the reason that each request waits. It holds no text and no tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import islice

from kvboost_edge.engine.schedule.scheduler import Scheduler
from kvboost_edge.engine.schedule.sequence import Sequence

__all__ = ["STALL_SECONDS", "StallWatchdog"]

_LOG = logging.getLogger(__name__)

STALL_SECONDS = 10.0
"""Seconds without a computed token after which a stall is logged. A load that
does not arrive is cancelled after 30 s (`PATIENCE`), a slow token mask after 2 s."""

_SHOWN = 16  # requests of each kind that a warning names


class StallWatchdog:
    """The time since the step loop last had anything to compute while there were requests."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._began: float | None = None
        self._is_logged = False

    def progressed(self) -> None:
        """Record progress: a step is computing, or no requests are left."""
        self._began = None
        self._is_logged = False

    def idled(self) -> None:
        """Note that a step computes nothing though there are requests; log a stall once."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        seconds = now - self._began
        if seconds >= STALL_SECONDS and not self._is_logged:
            self._is_logged = True
            _LOG.warning(
                "requests wait but nothing runs: no token was computed for %.0f s; %s",
                seconds,
                _described(self._scheduler),
            )


def _described(scheduler: Scheduler) -> str:
    """Return why each request waits, and the places, blocks and loads, in one line."""
    manager = scheduler.manager
    arriving = {load.sequence.index for load in scheduler.loads if not load.is_done}
    arrived = {load.sequence.index for load in scheduler.loads if load.is_done}
    taken = len(scheduler.running) + len(arriving)

    def wait_of(sequence: Sequence) -> str:
        if sequence.index in arriving:
            return "load arriving"
        what = "load arrived, " if sequence.index in arrived else ""
        if sequence.awaited_hash is not None:
            return f"{what}prefix of another"
        if sequence.blocked_at == manager.progress:
            return f"{what}blocks"
        return f"{what}place" if taken >= scheduler.max_num_seqs else f"{what}turn"

    def run_of(sequence: Sequence) -> str:
        return "pass" if sequence.is_ready else "mask or scoring"

    return (
        f"places {len(scheduler.running)} running and {len(arriving)} loading of "
        f"{scheduler.max_num_seqs}, blocks {manager.free_block_count} free of "
        f"{manager.num_blocks}, loads {len(arriving)} arriving and {len(arrived)} arrived; "
        f"waiting: {_listed(scheduler.waiting, wait_of)}; "
        f"running: {_listed(scheduler.running, run_of)}"
    )


def _listed(sequences: list[Sequence], state_of: Callable[[Sequence], str]) -> str:
    """Return the first sequences, each as index, priority, tokens to compute and state."""
    named = (
        f"request {one.index} (priority {one.priority}, {one.num_pending} tokens, {state_of(one)})"
        for one in islice(sequences, _SHOWN)
    )
    more = len(sequences) - _SHOWN
    return (", ".join(named) or "none") + (f" and {more} more" if more > 0 else "")
