"""A watchdog that warns when requests wait but the step loop computes nothing.

Each stall is logged once. A stall is a bug in the scheduler or a tier. The warning gives request
ids, the reason that each request waits, and numbers from the schedule. It contains no text or
tokens.
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

_SHOWN = 16  # maximum number of requests listed per group


class StallWatchdog:
    """A timer for how long requests have existed without any token being computed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._began: float | None = None
        self._is_logged = False

    def progressed(self) -> None:
        """Reset the timer, because a step computes tokens or no requests are left."""
        self._began = None
        self._is_logged = False

    def idled(self) -> None:
        """Record a step that computed nothing although requests exist. Log a long stall once."""
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
    """Describe in one line why each request waits, with sequence slots, blocks and loads."""
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
    """Format the first sequences with index, priority, tokens to compute and wait reason."""
    named = (
        f"request {one.index} (priority {one.priority}, {one.num_pending} tokens, {state_of(one)})"
        for one in islice(sequences, _SHOWN)
    )
    more = len(sequences) - _SHOWN
    return (", ".join(named) or "none") + (f" and {more} more" if more > 0 else "")
