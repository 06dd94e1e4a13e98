"""Scanner for text that arrives incrementally.

Each step is a generator that pauses when it needs more text. A step advances the position `at`.
Trial steps save the position and restore it on failure. Text before `at` is kept until `forget` is
called. A step that needs text after the end raises `EndOfText`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from kvboost_edge.text.turns.formats import ID_SLOT

__all__ = ["EndOfText", "Scanner", "Step", "words_of"]

T = TypeVar("T")
Step = Generator[None, None, T]

_NO_SPACE = re.compile(r"\S")
_NO_ID = re.compile(r"[^A-Za-z0-9_-]")
_BRACKET = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_BEHIND_SCALAR = re.compile(r"[\s,}\]]")


class EndOfText(Exception):
    """The text has ended."""


class Scanner:
    """A text and the current position in it."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._watch: Callable[[str], None] | None = None

    def forget(self) -> None:
        """Drop the text before `at`."""
        self.text = self.text[self.at :]
        self.at = 0

    def more(self) -> Step[None]:
        """Wait for at least one more character.

        While a value is shown, the text consumed so far is emitted first.
        """
        if self._watch is not None:
            self._watch(self.text[: self.at])
            self.forget()
        length = len(self.text)
        while len(self.text) == length:
            if self.ended:
                raise EndOfText
            yield

    def space(self) -> Step[None]:
        """Consume whitespace, if any."""
        while (found := _NO_SPACE.search(self.text, self.at)) is None:
            self.at = len(self.text)
            yield from self.more()
        self.at = found.start()

    def exactly(self, word: str) -> Step[bool]:
        """Return whether this text is next. If so, consume it."""
        while len(self.text) - self.at < len(word) and word.startswith(self.text[self.at :]):
            yield from self.more()
        if not self.text.startswith(word, self.at):
            return False
        self.at += len(word)
        return True

    def piece(self, piece: str) -> Step[bool]:
        """Return whether a piece of a call is next, with any whitespace. If so, consume it."""
        for word in words_of(piece):
            yield from self.space()
            if word == ID_SLOT:
                yield from self._id()
            elif not (yield from self.exactly(word)):
                return False
        return True

    def _id(self) -> Step[None]:
        while (found := _NO_ID.search(self.text, self.at)) is None:
            self.at = len(self.text)
            yield from self.more()
        self.at = found.start()

    def one_of(self, words: Iterable[str]) -> Step[str | None]:
        """Consume and return the longest of these words that is next, or return None."""
        known = sorted(words, key=len, reverse=True)
        while True:
            rest = self.text[self.at :]
            if not any(len(word) > len(rest) and word.startswith(rest) for word in known):
                break
            yield from self.more()
        found = next((word for word in known if rest.startswith(word)), None)
        self.at += len(found or "")
        return found

    def up_to(self, marker: str, kept: str, show: Callable[[str], None]) -> Step[None]:
        """Emit the text before a marker as it arrives, and consume the marker.

        The text `kept` directly before the marker is not emitted.
        """
        while (end := self.text.find(marker, self.at)) < 0:
            self._show(len(self.text) - held_back(self.text, self.at, marker, kept), show)
            yield from self.more()
        text = self.text[self.at : end]
        show(text[: len(text) - len(kept)] if kept and text.endswith(kept) else text)
        self.at = end + len(marker)

    def _show(self, end: int, show: Callable[[str], None]) -> None:
        if end > self.at:
            show(self.text[self.at : end])
            self.at = end

    def string(self) -> Step[None]:
        """Consume the rest of a JSON string, after its opening quote."""
        while True:
            found = _IN_STRING.search(self.text, self.at)
            if found is None:
                self.at = len(self.text)
            elif found[0] == '"':
                self.at = found.end()
                return
            elif found.end() < len(self.text):
                self.at = found.end() + 1
                continue
            else:
                self.at = found.start()
            yield from self.more()

    def value(self) -> Step[str]:
        """Consume a JSON value and return its text.

        Invalid JSON is consumed up to the position where a value would end.
        """
        while self.at == len(self.text):
            yield from self.more()
        start = self.at
        if self.text[start] in "{[":
            yield from self._nested()
        elif self.text[start] == '"':
            self.at += 1
            yield from self.string()
        else:
            while (found := _BEHIND_SCALAR.search(self.text, self.at)) is None:
                self.at = len(self.text)
                yield from self.more()
            self.at = found.start()
        return self.text[start : self.at]

    def shown_value(self, show: Callable[[str], None], ends: Sequence[str] = ()) -> Step[None]:
        """Emit a JSON object or list as it arrives.

        Args:
            show: receives the text.
            ends: texts that also end the value, outside its strings.
        """
        self.forget()
        self._watch = show
        try:
            yield from self._nested(ends)
        finally:
            self._watch = None
            show(self.text[: self.at])
            self.forget()

    def _nested(self, ends: Sequence[str] = ()) -> Step[None]:
        """Consume a bracketed value, or text up to one of `ends`."""
        depth = 0
        place = re.compile("|".join([_BRACKET.pattern, *map(re.escape, ends)]))
        while True:
            while (found := place.search(self.text, self.at)) is None:
                self.at = len(self.text) - max(
                    (held_back(self.text, self.at, mark) for mark in ends), default=0
                )
                yield from self.more()
            if found[0] in ends:
                self.at = found.start()
                return
            self.at = found.end()
            if found[0] == '"':
                yield from self.string()
                continue
            depth += 1 if found[0] in "{[" else -1
            if depth == 0:
                return


def held_back(text: str, start: int, marker: str, kept: str = "") -> int:
    """Return how many characters at the end of text[start:] may begin a marker.

    If `kept` is given, it may precede the marker.
    """
    wanted = kept + marker
    for begin in (wanted, marker) if kept else (marker,):
        for size in range(min(len(begin) - 1, len(text) - start), 0, -1):
            if text.endswith(begin[:size]):
                return size
    return 0


@functools.cache
def words_of(piece: str) -> tuple[str, ...]:
    """Split a piece at whitespace and between tags. An id placeholder is a separate word."""
    return tuple(word for word in re.split(rf"\s+|(?<=>)|(?=<)|({ID_SLOT})", piece) if word)
