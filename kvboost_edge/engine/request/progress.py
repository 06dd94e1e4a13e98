"""The prefill progress of a request."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Progress"]


class Progress(NamedTuple):
    """total         tokens of the prompt
    cached        of them found in the cache; 0 while the request waits
    computed      of them there, with those found; it never falls
    elapsed       seconds since the request was admitted; 0 while it waits
    seconds_left  until the first token, about; None while the engine has not measured its speed, 0
                  once it is there. Other work may make it rise, and so does losing blocks to others
    """

    total: int
    cached: int = 0
    computed: int = 0
    elapsed: float = 0.0
    seconds_left: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens computed per second since the request was let in; 0 while it waits."""
        return (self.computed - self.cached) / self.elapsed if self.elapsed else 0.0
