"""Marks that keep the text of special tokens in messages from becoming special tokens.

A template turns messages into one text, in which the tokenizer finds special tokens such as
<|im_start|>, and other markers such as <tool_call>. Those that the template writes are intended.
Those in a message would let its author speak as the system or as a tool. So each of them gets a
mark after its first character before the template runs. Marks are characters that no text has
(Unicode noncharacters). Templates trim, cut and join texts and keep marks in place. The rendered
text is then cut at the marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from kvboost_edge.errors import RequestError

__all__ = ["SpecialTexts", "check_marks", "free_marks"]

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class SpecialTexts:
    """Finder of the texts of special tokens.

    `folded` ones are found in any case, as a normalizing tokenizer finds them.
    """

    def __init__(self, exact: Iterable[str] = (), folded: Iterable[str] = ()) -> None:
        # A special token of a single character cannot be cut; no tokenizer has one.
        self._exact = frozenset(text for text in exact if len(text) > 1)
        self._folded = frozenset(text.casefold() for text in folded if len(text) > 1)
        self._lengths = sorted({*map(len, self._exact), *map(len, self._folded)})
        self._start = _start_of([*self._exact, *self._folded, *map(str.upper, self._folded)])

    def marked(self, value: Any, mark: str) -> Any:
        """Return a plain JSON value with `mark` after the first character of each special token's
        text.

        Strings and names of members are marked.
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
    """Return a pattern that matches the first character of each text where the second one follows.

    The texts begin with a few characters only, so the search is fast; each match is then looked up.
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

    Raises RequestError if all marks occur.
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
            "the messages hold all of Unicode's noncharacters U+FDD0..U+FDEF, so no mark is "
            "left for special tokens"
        )
    return free[0], free[1], free[2]


def check_marks(text: str, mark: str) -> None:
    """Raise RequestError if a template wrote a mark in another way, such as an escape."""
    if f"\\u{ord(mark):04x}" in text or f"%{mark.encode().hex('%')}" in text.lower():
        raise RequestError(
            "a message contains the text of a special token, and the model's chat template changes "
            "messages so that its position is lost; remove that text"
        )
