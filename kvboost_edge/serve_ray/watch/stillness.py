"""Whether an engine stands still although it has work."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Stillness", "major_faults"]

_CPU_SHARE = 0.2  # of one CPU: looking after a replica takes less, computing takes more
_UNWATCHED_SECONDS = 60.0  # looks that far apart: the process itself was stopped meanwhile


def major_faults() -> int:
    """Pages that this process has waited for a disk for since it began: an engine that waits for
    its weights uses no processor. 0 where the system does not tell.
    """
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class Stillness:
    """Told again and again how far an engine is, it knows for how long nothing has happened there.
    Not for several threads at once.

    A slow engine is not a still one: where a step takes minutes, its process uses processor time.
    Nor is one that was frozen with its whole process: after a long time without a look everything
    begins anew.
    """

    def __init__(self) -> None:
        self._figures: Hashable = None
        self._since = self._cpu_seconds = self._looked = 0.0

    def look(self, figures: Hashable, has_work: bool, cpu_seconds: float, now: float) -> float:
        """Seconds up to `now` in which there was work, no figure moved and the process computed
        next to nothing.

        figures       whatever moves when an engine computes
        cpu_seconds   processor time that the process has used since it began
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
