"""Measurement of a replica's load, from the times at which requests start, answer and end."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

from kvboost_edge.serve_ray.routing.cache_records import Place, ReplicaReport

__all__ = ["Meter"]

_REMEMBERED_TOKENS = 20_000  # older measurements weigh less than a third
_PRIOR_TOKENS = 512.0
_REMEMBERED_ANSWERS = 20.0


class Meter:
    """Measurements for a `ReplicaReport`. Not thread-safe.

    Prompts count as computed one after another. The time of a request's tokens begins at its start,
    or at the previous request's first token if that was later. `now` is a monotonic time in
    seconds.

    Args:
        seconds_per_token: Assumed before the first measurement.
        step_tokens: See `ReplicaReport`.
        max_running: See `ReplicaReport`.
        tiers: Places to read from, with the seconds per token assumed before the first measurement.
    """

    def __init__(
        self,
        *,
        seconds_per_token: float,
        step_tokens: int,
        max_running: int,
        tiers: Mapping[Place, float] | None = None,
    ) -> None:
        # Validates the arguments: raises ConfigError.
        ReplicaReport(
            serial=0,
            seconds_per_token=seconds_per_token,
            step_tokens=step_tokens,
            max_running=max_running,
        )
        self._step_tokens = step_tokens
        self._max_running = max_running
        self._tokens = _PRIOR_TOKENS
        self._seconds = _PRIOR_TOKENS * seconds_per_token
        # (tokens read, seconds) by place.
        self._read = {
            place: (_PRIOR_TOKENS, _PRIOR_TOKENS * seconds)
            for place, seconds in (tiers or {}).items()
        }
        # Requests before their first token: start, missing tokens, and whether the time can be used
        # as a measurement.
        self._begun: dict[Hashable, tuple[float, int, bool]] = {}
        self._running: dict[Hashable, float] = {}  # time of the first token
        self._queued_tokens = 0
        self._free_since = -math.inf  # time of the latest first token
        self._answer_seconds = self._step_seconds = 0.0
        self._serial = -1

    def begin(
        self, request: Hashable, missing_tokens: int, now: float, restored_tokens: int = 0
    ) -> None:
        """Record the start of a request. A known request starts again.

        Args:
            request: The request.
            missing_tokens: Prompt tokens to compute, see `RoutingDecision`.
            now: Monotonic time in seconds.
            restored_tokens: Prompt tokens to read from a tier first.
        """
        before = self._begun.pop(request, None)
        self._queued_tokens -= 0 if before is None else before[1]
        self._running.pop(request, None)
        self._begun[request] = (now, missing_tokens, not restored_tokens)
        self._queued_tokens += missing_tokens

    def first_token(self, request: Hashable, now: float) -> None:
        """Record a request's first token. Later calls for the same request have no effect."""
        begun = self._begun.pop(request, None)
        if begun is None:
            return
        since, tokens, is_measure = begun
        self._queued_tokens -= tokens
        if is_measure:
            spent = max(now - max(since, self._free_since), 0.0)
            self._tokens, self._seconds = _faded(self._tokens, self._seconds, tokens, spent)
        self._free_since = now
        self._running[request] = now

    def restored(self, place: Place, num_tokens: int, seconds: float) -> None:
        """Record the time to read `num_tokens` prompt tokens of one request from a place."""
        if place in self._read and num_tokens > 0:
            self._read[place] = _faded(*self._read[place], num_tokens, seconds)

    def end(self, request: Hashable, now: float, num_tokens: int = 0) -> None:
        """Record the end of a request whose answer has `num_tokens` tokens."""
        begun = self._begun.pop(request, None)
        if begun is not None:
            self._queued_tokens -= begun[1]
            self._free_since = now  # The time of an incomplete prompt is not a measurement.
            return
        since = self._running.pop(request, None)
        if since is None:
            return
        self._answer_seconds = _moved(self._answer_seconds, now - since)
        if num_tokens > 1:
            self._step_seconds = _moved(self._step_seconds, (now - since) / (num_tokens - 1))

    def report(self, now: float, *, free_blocks: int, is_draining: bool = False) -> ReplicaReport:
        """Return the current load."""
        self._serial += 1
        return ReplicaReport(
            serial=self._serial,
            # A clock that is coarser than a step may measure 0 seconds.
            seconds_per_token=max(self._seconds / self._tokens, 1e-9),
            queued_tokens=self._queued_tokens,
            num_running=len(self._running),
            decode_seconds=self._step_seconds if self._running else 0.0,
            step_tokens=self._step_tokens,
            num_waiting=len(self._begun),
            max_running=self._max_running,
            free_blocks=free_blocks,
            answer_seconds=self._answer_seconds,
            is_draining=is_draining,
            disk_token_seconds=self._token_seconds(Place.DISK),
            shared_token_seconds=self._token_seconds(Place.SHARED),
        )

    def _token_seconds(self, place: Place) -> float:
        tokens, seconds = self._read.get(place, (1.0, 0.0))
        return max(seconds / tokens, 1e-9) if place in self._read else 0.0


def _faded(
    tokens: float, seconds: float, more_tokens: int, more_seconds: float
) -> tuple[float, float]:
    """Add tokens and seconds to sums in which older values decay."""
    fades = math.exp(-more_tokens / _REMEMBERED_TOKENS)
    return tokens * fades + more_tokens, seconds * fades + more_seconds


def _moved(mean: float, value: float) -> float:
    """Update a moving average. The first value replaces 0."""
    return value if mean == 0.0 else mean + (value - mean) / _REMEMBERED_ANSWERS
