"""Marks that keep the text of special tokens in messages from becoming special tokens.

A template turns messages into one text. The tokenizer finds special tokens such as <|im_start|> in
it, and other markers such as <tool_call>. The template's own tokens are intended. Tokens in a
message would let its author impersonate the system or a tool.

Before rendering, each such text in a message gets a mark after its first character. Marks are
Unicode noncharacters, which no real text contains. Templates trim, cut and join texts but keep
marks in place. The rendered text is then split at the marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from kvboost_edge.errors import RequestError

__all__ = ["SpecialTexts", "check_marks", "free_marks"]

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class SpecialTexts:
    """Finder for the texts of special tokens.

    Args:
        exact: texts that are matched exactly.
        folded: texts that are matched case-insensitively, as by a normalizing tokenizer.
    """

    def __init__(self, exact: Iterable[str] = (), folded: Iterable[str] = ()) -> None:
        # A token of one character has no place for a mark. No known tokenizer has such a special
        # token.
        self._exact = frozenset(text for text in exact if len(text) > 1)
        self._folded = frozenset(text.casefold() for text in folded if len(text) > 1)
        self._lengths = sorted({*map(len, self._exact), *map(len, self._folded)})
        self._start = _start_of([*self._exact, *self._folded, *map(str.upper, self._folded)])

    def marked(self, value: Any, mark: str) -> Any:
        """Insert `mark` after the first character of each special token's text in a plain JSON
        value.

        Both strings and the names of object members are marked.
        """
        if isinstance(value, str):
            return self._marked_text(value, mark)
        if isinstance(value, list):
            return [self.marked(item, mark) for item in value]
        if isinstance(value, dict):
            return {
                self._marked_text(name, mark): self.marked(item, mark)
                for name, item in value.items()
            }
        return value

    def _marked_text(self, text: str, mark: str) -> str:
        if self._start is None:
            return text
        ends = [
            match.start() + 1
            for match in self._start.finditer(text)
            if self._begins(text, match.start())
        ]
        if not ends:
            return text
        return mark.join(
            text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)
        )

    def _begins(self, text: str, at: int) -> bool:
        for length in self._lengths:
            found = text[at : at + length]
            if found in self._exact or found.casefold() in self._folded:
                return True
        return False


def _start_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Return a pattern for possible first characters of the texts, or None without texts.

    A match is a first character before a possible second one. Few characters qualify, so the search
    is fast, and each match is then looked up.
    """
    seconds: dict[str, set[str]] = {}
    for text in texts:
        for first in {text[0], text[0].lower(), text[0].upper()}:
            seconds.setdefault(first, set()).update((text[1], text[1].lower(), text[1].upper()))
    branches = [
        f"{re.escape(first)}(?=[{re.escape(''.join(found))}])" for first, found in seconds.items()
    ]
    return re.compile("|".join(branches)) if branches else None


def free_marks(values: Sequence[Any]) -> tuple[str, str, str]:
    """Return three marks that do not occur in the strings of plain JSON values.

    Raises:
        RequestError: fewer than three marks are unused.
    """
    taken: set[str] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            taken.update(() if value.isascii() else (mark for mark in _MARKS if mark in value))
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
    free = [mark for mark in _MARKS if mark not in taken]
    if len(free) < 3:
        raise RequestError(
            "the messages contain too many of the Unicode noncharacters U+FDD0..U+FDEF; leave at "
            "least three of them unused"
        )
    return free[0], free[1], free[2]


def check_marks(text: str, mark: str) -> None:
    """Raise RequestError if the template wrote the mark in another form, such as an escape."""
    if f"\\u{ord(mark):04x}" in text or f"%{mark.encode().hex('%')}" in text.lower():
        raise RequestError(
            "a message contains the text of a special token, which the model's chat template "
            "escapes, so it cannot be kept as plain text; remove it from the message"
        )
