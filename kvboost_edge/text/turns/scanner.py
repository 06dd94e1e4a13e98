"""Reads text that is still being written: every step is a generator that stops where more is
needed.

A step moves `at` forward; who only tries keeps the old place and goes back to it. Text in front of
`at` stays until it is forgotten. At the end of all text a step that needs more raises `Ended`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from kvboost_edge.text.turns.formats import ID_SLOT

__all__ = ["Ended", "Scanner", "Step", "words_of"]

T = TypeVar("T")
Step = Generator[None, None, T]

_NO_SPACE = re.compile(r"\S")
_NO_ID = re.compile(r"[^A-Za-z0-9_-]")
_BRACKET = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_BEHIND_SCALAR = re.compile(r"[\s,}\]]")


class Ended(Exception):
    """There is no more text."""


class Scanner:
    """The text, and a place in it."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._watch: Callable[[str], None] | None = None

    def forget(self) -> None:
        """Everything before `at` is done with."""
        self.text = self.text[self.at :]
        self.at = 0

    def more(self) -> Step[None]:
        """Waits for at least one more character; what was passed is shown to who watches."""
        if self._watch is not None:
            self._watch(self.text[: self.at])
            self.forget()
        length = len(self.text)
        while len(self.text) == length:
            if self.ended:
                raise Ended
            yield

    def space(self) -> Step[None]:
        """White space, if any."""
        while (found := _NO_SPACE.search(self.text, self.at)) is None:
            self.at = len(self.text)
            yield from self.more()
        self.at = found.start()

    def exactly(self, word: str) -> Step[bool]:
        """Whether this text stands here; then it is passed."""
        while len(self.text) - self.at < len(word) and word.startswith(self.text[self.at :]):
            yield from self.more()
        if not self.text.startswith(word, self.at):
            return False
        self.at += len(word)
        return True

    def piece(self, piece: str) -> Step[bool]:
        """Whether a piece of a call stands here, with any white space; then it is passed."""
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
        """The longest of these words that stands here; then it is passed."""
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
        """Shows the text in front of a marker as it comes, without white space of the kind `kept`
        at its end, and passes the marker.
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
        """The rest of a JSON string, whose opening quote was passed."""
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
        """Any JSON value, as it is written. What is none is passed up to where a value would
        end.
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
        """A JSON object or list, shown as it comes; `ends` end it, too, where they stand outside of
        its strings.
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
        """What stands between two brackets, the first of which is here; or up to one of `ends` in
        front of the last.
        """
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
    """How many characters at the end of text[start:] may belong to a marker, or to `kept` in front
    of it.
    """
    wanted = kept + marker
    for begin in (wanted, marker) if kept else (marker,):
        for size in range(min(len(begin) - 1, len(text) - start), 0, -1):
            if text.endswith(begin[:size]):
                return size
    return 0


@functools.cache
def words_of(piece: str) -> tuple[str, ...]:
    """A piece cut at its white space and between tags; what stands for an id is a word."""
    return tuple(word for word in re.split(rf"\s+|(?<=>)|(?=<)|({ID_SLOT})", piece) if word)
