"""Stall detection: an engine that has work and makes no progress."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Stillness", "major_faults"]

_CPU_SHARE = 0.2  # of one CPU: looking after a replica takes less, computing takes more
_UNWATCHED_SECONDS = 60.0  # looks that far apart: the process itself was stopped meanwhile


def major_faults() -> int:
    """Return the pages for which this process has waited for a disk: an engine that waits for its
    weights uses no CPU time. 0 if the system does not tell.
    """
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class Stillness:
    """Duration without progress, from repeated figures of an engine. Not thread-safe.

    A slow engine is not stalled: a step of minutes uses CPU time. Nor is an engine that was frozen
    with its whole process: after a long time without figures, the measurement starts again.
    """

    def __init__(self) -> None:
        self._figures: Hashable = None
        self._since = self._cpu_seconds = self._looked = 0.0

    def look(self, figures: Hashable, has_work: bool, cpu_seconds: float, now: float) -> float:
        """Return the seconds up to `now` with work, without a change of figures, and with almost no
        CPU time.

        Args:
            figures: figures that change when an engine computes.
            cpu_seconds: CPU time of the process since its start.
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
