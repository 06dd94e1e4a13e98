"""A histogram of step times, measured from scheduling to sampled tokens."""

from __future__ import annotations

import bisect
import itertools

__all__ = ["StepTimes"]

_BOUNDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)  # seconds


class StepTimes:
    """A histogram of step durations since the start. Failed forward passes are excluded."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._counts = [0] * (len(_BOUNDS) + 1)

    def observe(self, seconds: float) -> None:
        """Record the duration of a step."""
        self.seconds += seconds
        self._counts[bisect.bisect_left(_BOUNDS, seconds)] += 1

    def cumulative(self) -> dict[str, int]:
        """Return the cumulative number of steps by upper bound in seconds, as in Prometheus."""
        names = (*map(str, _BOUNDS), "+Inf")
        return dict(zip(names, itertools.accumulate(self._counts), strict=True))
