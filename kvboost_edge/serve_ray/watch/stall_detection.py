"""Stall detection for an engine that has work but makes no progress."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Stillness", "major_faults"]

_CPU_SHARE = 0.2  # of one core; polling uses less, computing more
_UNWATCHED_SECONDS = 60.0  # After a longer gap, the process itself was stopped.


def major_faults() -> int:
    """Return the number of page faults that waited for the disk; 0 if unknown."""
    # Page faults count as progress, because an engine that reads its weights uses no CPU time.
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class Stillness:
    """Measurement of the time without progress, from repeated engine statistics. Not thread-safe.

    A slow engine is not stalled, because its step uses CPU time. An engine whose process was frozen
    is not stalled either, so the measurement restarts after a long gap between calls.
    """

    def __init__(self) -> None:
        self._figures: Hashable = None
        self._since = self._cpu_seconds = self._looked = 0.0

    def look(self, figures: Hashable, has_work: bool, cpu_seconds: float, now: float) -> float:
        """Return the seconds without progress up to `now`.

        Args:
            figures: Statistics that change when the engine makes progress.
            has_work: Whether the engine has requests.
            cpu_seconds: CPU time of the process since its start.
            now: Monotonic time in seconds.
        """
        used = cpu_seconds - self._cpu_seconds
        was_frozen = now - self._looked > _UNWATCHED_SECONDS
        self._looked = now
        if (
            was_frozen
            or not has_work
            or figures != self._figures
            or used > _CPU_SHARE * (now - self._since)
        ):
            self._figures = figures
            self._since = now
            self._cpu_seconds = cpu_seconds
        return now - self._since
