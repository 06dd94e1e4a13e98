"""Whether an engine stands still although it has work."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Stillness"]

_CPU_SHARE = 0.2  # of one CPU: looking after a replica takes less, computing takes more


class Stillness:
    """Told again and again how far an engine is, it knows for how long nothing has happened there. Not for several
    threads at once.

    A slow engine is not a still one: where a step takes minutes, its process uses processor time.
    """

    def __init__(self) -> None:
        self._figures: Hashable = None
        self._since = self._cpu_seconds = 0.0

    def look(self, figures: Hashable, has_work: bool, cpu_seconds: float, now: float) -> float:
        """Seconds up to `now` in which there was work, no figure moved and the process computed next to nothing.

        figures       whatever moves when an engine computes
        cpu_seconds   processor time that the process has used since it began
        """
        used = cpu_seconds - self._cpu_seconds
        if not has_work or figures != self._figures or used > _CPU_SHARE * (now - self._since):
            self._figures, self._since, self._cpu_seconds = figures, now, cpu_seconds
        return now - self._since
