"""When to leave a server alone: after a few failures in a row, for a while."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Open after `failures` in a row, for `pause_s`; then one attempt decides: open again, or
    closed.

    `clock` counts seconds and never goes back. Any thread may ask, one thread reports.
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
        """Whether the server is left alone at the moment."""
        until = self._closed_again_at
        return until is not None and self._clock() < until

    def failed(self) -> bool:
        """Count a failure; whether this one opened what was not open before it."""
        self._in_a_row += 1
        if self._in_a_row < self._failures:
            return False
        first = self._closed_again_at is None
        self._closed_again_at = self._clock() + self._pause_s
        return first

    def succeeded(self) -> bool:
        """Forget the failures; whether it had been open."""
        was_open = self._closed_again_at is not None
        self._in_a_row = 0
        self._closed_again_at = None
        return was_open
