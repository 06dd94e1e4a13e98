"""When requests end whether they are done or not."""

from __future__ import annotations

import heapq
from collections.abc import Collection

__all__ = ["Deadlines"]

_SPARE = 64  # entries of ended requests that are not worth a look


class Deadlines:
    """A heap of (seconds of `time.monotonic`, request index); entries of requests that ended are
    left in it for a while.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, index: int, live: Collection[int]) -> None:
        """Remember a request's deadline; those of requests that are not in `live` may be
        forgotten.
        """
        if len(self._heap) > 2 * len(live) + _SPARE:
            self._heap = sorted(entry for entry in self._heap if entry[1] in live)
        heapq.heappush(self._heap, (deadline, index))

    @property
    def first(self) -> float | None:
        """The next one."""
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float) -> list[int]:
        """Requests whose deadline has passed; they are forgotten."""
        found: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heapq.heappop(self._heap)[1])
        return found
