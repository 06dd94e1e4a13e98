"""The load of replicas and the expected time to first token, as arrays over replicas."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvboost_edge.serve_ray.routing.cache_records import Place, ReplicaReport

__all__ = ["ReplicaLoads"]

Vector = npt.NDArray[np.float64]

_ASSUMED_SECONDS = 1e-3  # seconds per token before any replica's first report
_FIGURES = """busy_until seconds_per_token decode_seconds step_tokens num_running num_waiting
max_running free_blocks answer_seconds disk_token_seconds shared_token_seconds""".split()


class ReplicaLoads:
    """The load of the replicas in slots 0, 1, ...

    It combines the last report of each replica with the requests routed since. A replica works off
    its queue without new reports. Therefore, the time at which the queue will be empty is stored,
    not its length.

    Args:
        report_seconds: Maximum age of a report when it arrives. Requests routed within this time
            may be missing in the report.

    Attributes:
        usable: bool [slots], True for replicas that exist and are not draining.
    """

    def __init__(self, report_seconds: float) -> None:
        self._report_seconds = report_seconds
        self._serials: dict[int, int] = {}
        # Recently routed requests: (time, tokens, blocks) of each.
        self._underway: dict[int, deque[tuple[float, float, float]]] = {}
        self.usable = np.zeros(0, bool)
        self._figures: dict[str, Vector] = {name: np.zeros(0) for name in _FIGURES}

    def open(self, slot: int) -> None:
        """Add a replica with unknown load. It counts as idle, and as fast as the others."""
        if slot >= len(self.usable):
            more = max(64, slot)
            self.usable = np.concatenate([self.usable, np.zeros(more, bool)])
            self._figures = {
                name: np.concatenate([old, np.zeros(more)]) for name, old in self._figures.items()
            }
        reported = self._figures["seconds_per_token"][
            [one for one, serial in self._serials.items() if serial >= 0]
        ]
        self._serials[slot] = -1
        self._underway[slot] = deque()
        speed = float(np.median(reported)) if len(reported) else _ASSUMED_SECONDS
        self._set(slot, ReplicaReport(serial=0, seconds_per_token=speed))
        self._figures["busy_until"][slot] = -np.inf

    def close(self, slot: int) -> None:
        """Remove a replica."""
        self.usable[slot] = False
        del self._serials[slot], self._underway[slot]

    def _set(self, slot: int, report: ReplicaReport) -> None:
        for name in _FIGURES[1:]:
            self._figures[name][slot] = getattr(report, name)
        self.usable[slot] = not report.is_draining

    def take(self, slot: int, report: ReplicaReport, now: float) -> None:
        """Apply a replica's report, and add requests routed later. Old reports are ignored."""
        if report.serial <= self._serials[slot]:
            return
        self._serials[slot] = report.serial
        self._set(slot, report)
        self._figures["busy_until"][slot] = now + report.queued_tokens * report.seconds_per_token
        underway = self._underway[slot]
        while underway and underway[0][0] < now - self._report_seconds:
            underway.popleft()
        for _, tokens, blocks in underway:
            self._add(slot, tokens, blocks, now)

    def note_routed(self, slot: int, num_tokens: int, num_blocks: int, now: float) -> None:
        """Add a request sent to a replica: its prompt tokens, and the free blocks they need."""
        self._underway[slot].append((now, num_tokens, num_blocks))
        self._add(slot, num_tokens, num_blocks, now)

    def note_not_started(self, slot: int, num_tokens: int) -> None:
        """Remove a request that never started."""
        for one in self._underway[slot]:
            if one[1] == num_tokens:
                self._underway[slot].remove(one)
                self._add(slot, -one[1], -one[2], -np.inf)
                return

    def _add(self, slot: int, num_tokens: float, num_blocks: float, now: float) -> None:
        figures = self._figures
        busy = figures["busy_until"]
        busy[slot] = max(busy[slot], now) + num_tokens * figures["seconds_per_token"][slot]
        figures["num_waiting"][slot] += 1 if num_tokens > 0 else -1
        figures["free_blocks"][slot] -= num_blocks

    def token_seconds(self, place: Place) -> Vector:
        """Return the seconds to read a token from a place, [slots]; 0 if a replica cannot."""
        return self._figures[
            "disk_token_seconds" if place is Place.DISK else "shared_token_seconds"
        ]

    def seconds(
        self,
        missing_tokens: Vector,
        missing_blocks: Vector,
        now: float,
        restoring: Vector | float = 0.0,
    ) -> tuple[Vector, Vector]:
        """Return the expected time to first token, and the part spent on computing the prompt.

        Both are [slots]. The other parts are the queue, the running step and, in a full replica,
        the time until a request ends.

        Args:
            missing_tokens: Tokens to compute, [slots].
            missing_blocks: Blocks to compute, [slots].
            now: Monotonic time in seconds.
            restoring: Seconds to read blocks from tiers. The queue is computed meanwhile.
        """
        figures = self._figures
        running = figures["num_running"]
        step_tokens = figures["step_tokens"]
        wait = np.maximum(figures["busy_until"] - now, restoring)
        # share of a step that is available to prompts
        share = np.maximum(1.0 - running / np.maximum(step_tokens, 1.0), 0.125)
        own = missing_tokens * figures["seconds_per_token"] / share
        too_many = np.maximum(running + figures["num_waiting"] + 1.0 - figures["max_running"], 0.0)
        leaving = np.maximum(too_many, missing_blocks > figures["free_blocks"])
        full = leaving * figures["answer_seconds"] / np.maximum(running, 1.0)
        return wait + own + figures["decode_seconds"] + full, own
