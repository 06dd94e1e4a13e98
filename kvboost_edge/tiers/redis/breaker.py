"""Circuit breaker that pauses requests to a failing server."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Circuit breaker that opens after a number of consecutive failures.

    After the pause, the next attempt decides whether the breaker closes or opens again. Any thread
    may read its state, but only one thread may report results.

    Args:
        clock: function that returns monotonic time in seconds.
        failures: number of consecutive failures that open the breaker.
        pause_s: time for which the breaker stays open, in seconds.
    """

    def __init__(
        self, clock: Callable[[], float], *, failures: int = 3, pause_s: float = 30.0
    ) -> None:
        self._clock = clock
        self._failures = failures
        self._pause_s = pause_s
        self._in_a_row = 0
        self._closed_again_at: float | None = None

    @property
    def is_open(self) -> bool:
        """True while requests must not be sent."""
        until = self._closed_again_at
        return until is not None and self._clock() < until

    def failed(self) -> bool:
        """Count a failure, and return whether it opened the breaker."""
        self._in_a_row += 1
        if self._in_a_row < self._failures:
            return False
        first = self._closed_again_at is None
        self._closed_again_at = self._clock() + self._pause_s
        return first

    def succeeded(self) -> bool:
        """Close the breaker, and return whether it had been open."""
        was_open = self._closed_again_at is not None
        self._in_a_row = 0
        self._closed_again_at = None
        return was_open
