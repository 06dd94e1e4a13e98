"""The prefill progress of a request."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Progress"]


class Progress(NamedTuple):
    """The prefill progress of a request.

    Attributes:
        total: tokens of the prompt.
        cached: tokens found in the cache; 0 while the request waits.
        computed: tokens computed or found in the cache; it never decreases.
        elapsed: seconds since admission; 0 while the request waits.
        seconds_left: estimated seconds until the first token, 0 after it. None: not measured yet.
            It may rise when other requests arrive or the request loses its blocks.
    """

    total: int
    cached: int = 0
    computed: int = 0
    elapsed: float = 0.0
    seconds_left: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens computed per second since admission; 0 while the request waits."""
        return (self.computed - self.cached) / self.elapsed if self.elapsed else 0.0
