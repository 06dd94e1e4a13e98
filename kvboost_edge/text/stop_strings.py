"""Detection of stop strings in streamed text, across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost_edge.errors import RequestError

__all__ = ["StopChecker"]


class StopChecker:
    """Filter that cuts a text stream at the first stop string.

    The returned texts, concatenated, are the stream up to the stop string that ends first, without
    that string. If several stop strings end at the same character, the longest one counts. Text
    that may begin a stop string is held back until this is decided.
    """

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        """Prepare the stop strings.

        Args:
            included: return the stop string, too. No text is then held back.

        Raises:
            RequestError: `stops` is not a list, or a stop string is empty or not a string.
        """
        if isinstance(stops, str):
            raise RequestError(f"stop must be a list of strings, got the string {stops!r}")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"each stop string must be a non-empty string, got {stop!r}")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._included = included
        self._held = ""
        self.stop: str | None = None  # the stop string that was found, or None

    def push(self, text: str, *, counts: bool = True) -> tuple[str, bool]:
        """Add the next text.

        Args:
            counts: whether a stop string may end in this text. If False, it is passed on.

        Returns:
            The text to show now, and whether a stop string was found. The text after a stop is
                empty.
        """
        if self.stop is not None:
            return "", True
        if not self._matchers:
            return text, False
        stream = self._held + text
        seen = len(self._held)
        for index in range(seen, len(stream)):
            found = [m.pattern for m in self._matchers if m.feed(stream[index])]
            if found and counts:
                self.stop = max(found, key=len)
                self._held = ""
                end = index + 1
                return stream[: end if self._included else end - len(self.stop)], True
        keep = 0 if self._included else max(m.matched for m in self._matchers)
        self._held = stream[len(stream) - keep :]
        return stream[: len(stream) - keep], False

    def flush(self) -> str:
        """Return the text held back at the end of the stream, which is empty after a stop."""
        held = self._held
        self._held = ""
        for matcher in self._matchers:
            matcher.matched = 0
        return held


class _Matcher:
    """Knuth-Morris-Pratt matcher with amortized constant work per character."""

    __slots__ = ("_fallback", "matched", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0  # length of the longest prefix of the pattern that ends the stream
        self._fallback = [0] * len(pattern)
        length = 0
        for i in range(1, len(pattern)):
            while length and pattern[i] != pattern[length]:
                length = self._fallback[length - 1]
            length += pattern[i] == pattern[length]
            self._fallback[i] = length

    def feed(self, char: str) -> bool:
        """Add one character and return whether the stream now ends with the pattern."""
        matched = self.matched
        while matched and char != self.pattern[matched]:
            matched = self._fallback[matched - 1]
        matched += char == self.pattern[matched]
        # After a whole match, go on with its longest end that begins the pattern again.
        is_whole = matched == len(self.pattern)
        self.matched = self._fallback[-1] if is_whole else matched
        return is_whole
