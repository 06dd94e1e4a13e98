"""The prefill progress of a request."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Progress"]


class Progress(NamedTuple):
    """The prefill progress of a request.

    Attributes:
        total: number of prompt tokens.
        cached: number of tokens found in the cache, or 0 while the request waits.
        computed: number of tokens computed or found in the cache. It never decreases.
        elapsed: seconds since admission, or 0 while the request waits.
        seconds_left: estimated seconds until the first token, and 0 after it. None until step times
            have been measured. It may rise when other requests arrive or the request is preempted.
    """

    total: int
    cached: int = 0
    computed: int = 0
    elapsed: float = 0.0
    seconds_left: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Number of tokens computed per second since admission, or 0 while the request waits."""
        return (self.computed - self.cached) / self.elapsed if self.elapsed else 0.0
