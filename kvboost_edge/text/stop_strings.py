"""Stop strings in a stream of text, found across token boundaries and never shown."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost_edge.errors import RequestError

__all__ = ["StopChecker"]


class StopChecker:
    """A filter that cuts a stream of text at the first stop string.

    The text that `push` and `flush` return, joined, is the stream up to the stop string that ends
    first, without that string. Of stop strings that end at the same character the longest counts.
    Text that may begin a stop string is held back until it is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Prepare the stop strings. An empty string or another type raises RequestError."""
        if isinstance(stops, str):
            raise RequestError(f"stop={stops!r} must be a list of strings")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"stop string {stop!r} must be a non-empty string")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self.stop: str | None = None  # the stop string that was found

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next text; return (text to show now, whether a stop string was found).

        Nothing more is shown after a stop.
        """
        if self.stop is not None:
            return "", True
        if not self._matchers:
            return text, False
        stream = self._held + text
        seen = len(self._held)
        for index in range(seen, len(stream)):
            lengths = [m.length for m in self._matchers if m.feed(stream[index])]
            if lengths:
                start = index + 1 - max(lengths)
                self.stop = stream[start : index + 1]
                self._held = ""
                return stream[:start], True
        keep = max(m.matched for m in self._matchers)
        self._held = stream[len(stream) - keep :]
        return stream[: len(stream) - keep], False

    def flush(self) -> str:
        """Return the text still held back at the end of the stream; empty after a stop."""
        held = self._held
        self._held = ""
        for matcher in self._matchers:
            matcher.matched = 0
        return held


class _Matcher:
    """A Knuth-Morris-Pratt matcher: amortized constant work for each character."""

    __slots__ = ("_fallback", "_pattern", "length", "matched")

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.length = len(pattern)
        self.matched = 0  # length of the longest prefix of the pattern that the stream ends with
        self._fallback = [0] * len(pattern)
        length = 0
        for i in range(1, len(pattern)):
            while length and pattern[i] != pattern[length]:
                length = self._fallback[length - 1]
            length += pattern[i] == pattern[length]
            self._fallback[i] = length

    def feed(self, char: str) -> bool:
        """Take one character; return whether the stream now ends with the pattern."""
        matched = self.matched
        while matched and char != self._pattern[matched]:
            matched = self._fallback[matched - 1]
        matched += char == self._pattern[matched]
        self.matched = matched
        return matched == self.length
