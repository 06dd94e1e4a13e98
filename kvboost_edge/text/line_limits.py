"""Ends of a text at its lines, by indentation and by time."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["LineLimits"]


class LineLimits:
    """Filter that ends a text stream at a line, by the rules of llama.cpp's code completion.

    - The stream ends before the first character of a line, other than its spaces and tabs, if the
      line has too few of these. Lines begin after a line break, so the first line is not checked.
    - The stream ends with a text that contains a line break, if it comes too late.
    """

    def __init__(
        self,
        min_indent: int,
        max_ms: int | None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare the limits.

        Args:
            min_indent: minimum number of spaces and tabs at the start of a line.
            max_ms: milliseconds from the first text to the last line break; None for no limit.
            clock: time in seconds.
        """
        self._min_indent = min_indent
        self._max_ms = max_ms
        self._clock = clock
        self._started: float | None = None
        self._indent: int | None = None  # of the line so far; None after its first character

    def push(self, text: str) -> tuple[str, bool]:
        """Return the part of the next text before the end, and whether the stream ends."""
        now = self._clock()
        if self._started is None:
            self._started = now
        cut = self._short_line(text)
        if cut is not None:
            return text[:cut], True
        is_late = self._max_ms is not None and (now - self._started) * 1e3 > self._max_ms
        return text, is_late and "\n" in text

    def _short_line(self, text: str) -> int | None:
        """Return the index of the first character of a line with too little indentation."""
        for index, char in enumerate(text if self._min_indent else ""):
            if self._indent is not None:
                if char in " \t":
                    self._indent += 1
                    continue
                if self._indent < self._min_indent:
                    return index
                self._indent = None
            if char == "\n":
                self._indent = 0
        return None
