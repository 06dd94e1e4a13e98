"""Reads NAME{KEY:VALUE,KEY:VALUE}: strings stand between two markers, as they are, everything else
is bare.

What is shown is JSON at every moment but for the closing brackets and quotes that are open: a
bracket is shown with what opens it, a comma and a key with the value behind them. So text that is
no call any more leaves arguments that are whole as far as they came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from kvboost_edge.text.turns.literals import LONGEST, bare, named, string_inside
from kvboost_edge.text.turns.scanner import Scanner, Step

__all__ = ["BracedArguments", "is_braced_key"]

_CLOSING = {"{": "}", "[": "]"}
_ENDS_KEY = r"[:,{}\[\]\n"
_ENDS_VALUE = r"[,{}\[\]\n"


def is_braced_key(name: str, quote: str) -> bool:
    """Whether a key of this name is read as it is."""
    ends = re.search(f"{_ENDS_KEY}{re.escape(quote[0])}]", name)
    return bool(name) and name == name.strip() and len(name) <= LONGEST and ends is None


class BracedArguments:
    """The arguments of one call, from behind its first brace."""

    def __init__(
        self,
        scanner: Scanner,
        quote: str,
        show: Callable[[str], None],
        begin: Callable[[], None],
        texts: Collection[str],
    ) -> None:
        """begin: called before the first `show`; texts: the arguments that are strings, even where
        they are bare.
        """
        self._scanner = scanner
        self._quote = quote
        self._texts = texts
        self._shown = show
        self._begin = begin
        self._begun = False
        self._open = ["}"]  # the brackets that are still to be closed
        self._first = True  # nothing stands in the innermost one yet
        first = re.escape(quote[0])
        self._ends_key = re.compile(f"{_ENDS_KEY}{first}]")
        self._ends_value = re.compile(f"{_ENDS_VALUE}{first}]")

    def read(self) -> Step[bool]:
        """Whether a call stands here. It is passed as far as it is one, and what is shown is
        closed.
        """
        scanner = self._scanner
        start = self._scanner.at
        while self._open:
            if not (yield from self._item()):
                scanner.at = start
                if self._begun:
                    self._shown("".join(reversed(self._open)))
                return self._begun
            if self._begun:
                scanner.forget()
                start = 0
        return True

    def _show(self, text: str) -> None:
        if not self._begun:
            self._begin()
            text = "{" + text
            self._begun = True
        self._shown(text)

    def _item(self) -> Step[bool]:
        """The next item of the innermost bracket, up to where one inside of it opens; or its
        end.
        """
        scanner = self._scanner
        comma = ""
        if (yield from self._closed()):
            return True
        if not self._first:
            if not (yield from scanner.exactly(",")):
                return False
            if (yield from self._closed()):
                return True
            comma = ", "
        key = None
        if self._open[-1] == "}":
            key = yield from self._key()
            if key is None:
                return False
            comma += json.dumps(key, ensure_ascii=False) + ": "
        return (yield from self._value(comma, key in self._texts and len(self._open) == 1))

    def _closed(self) -> Step[bool]:
        yield from self._scanner.space()
        if not (yield from self._scanner.exactly(self._open[-1])):
            return False
        self._show(self._open.pop())
        self._first = False
        return True

    def _key(self) -> Step[str | None]:
        """A key, between markers or bare, and the colon behind it."""
        scanner = self._scanner
        pieces: list[str] = []
        if (yield from scanner.exactly(self._quote)):
            yield from scanner.up_to(self._quote, "", pieces.append)
            key = "".join(pieces)
        else:
            key = (yield from bare(scanner, self._ends_key)).strip()
        yield from scanner.space()
        return key if key and (yield from scanner.exactly(":")) else None

    def _value(self, front: str, as_text: bool) -> Step[bool]:
        scanner = self._scanner
        yield from scanner.space()
        if (yield from scanner.exactly(self._quote)):
            self._show(f'{front}"')
            yield from scanner.up_to(self._quote, "", lambda text: self._show(string_inside(text)))
            self._show('"')
        elif (opening := scanner.text[scanner.at]) in _CLOSING:
            scanner.at += 1
            self._show(front + opening)
            self._open.append(_CLOSING[opening])
            self._first = True
            return True
        else:
            value = named((yield from bare(scanner, self._ends_value)).strip())
            if value is None:
                return False
            self._show(
                front
                + (json.dumps(value, ensure_ascii=False) if as_text and value[0] != '"' else value)
            )
        self._first = False
        return True
