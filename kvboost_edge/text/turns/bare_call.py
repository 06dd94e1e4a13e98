"""Reader of messages that consist of a single call without markers.

Such a message is one JSON object with a tool's name and its arguments, optionally in a code fence.
Small models write calls this way, whatever format their template shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from kvboost_edge.text.turns.formats import CallFormat, Tool
from kvboost_edge.text.turns.scanner import EndOfText, Scanner, Step
from kvboost_edge.text.turns.turn_parts import CallArguments, CallStart, Part

__all__ = ["Accepts", "BareCall"]

Accepts = Callable[[Tool, dict[str, Any]], bool]
"""Function that returns whether arguments match a tool's schema."""

_FENCE = "```"
_LABELS = ("json", "JSON")
_MOST_DEPTH = 64
_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_AFTER_WORD = re.compile(r"[^-+.0-9A-Za-z]")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-|-?[0-9][-+.0-9eE]*")
_NAMES = ("true", "false", "null")


class BareCall:
    """Reader of a call at the start of a message.

    Nothing is emitted before the message ends, because an object with text after it is an example
    rather than a call. Text that cannot be a call is released at the first character that rules it
    out.
    """

    def __init__(
        self,
        scanner: Scanner,
        parts: list[Part],
        tools: Sequence[Tool],
        format: CallFormat,
        accepts: Accepts,
    ) -> None:
        self._scanner = scanner
        self._parts = parts
        self._tools = {tool.name: tool for tool in tools}
        self._format = format
        self._accepts = accepts
        self._members: dict[str, str] = {}
        self._is_whole = False

    def read(self) -> Step[bool]:
        """Consume the message if it is a call, and return whether it is."""
        scanner = self._scanner
        try:
            yield from self._object()
            if self._is_whole:
                yield from scanner.space()
                self._is_whole = False  # more text follows, so it is not a call
        except EndOfText:
            pass
        if not self._is_whole:
            scanner.at = 0
            return False
        self._parts.append(CallStart(0, self._members[self._format.name_key]))
        self._parts.append(CallArguments(0, self._members[self._format.arguments_key]))
        scanner.forget()
        return True

    def _object(self) -> Step[None]:
        """Read the object with its optional fence, and record whether it is a complete call."""
        scanner = self._scanner
        yield from scanner.space()
        fenced = yield from scanner.exactly(_FENCE)
        if fenced:
            yield from scanner.one_of(_LABELS)
            yield from scanner.space()
        if not (yield from _members(scanner, self._member)) or len(self._members) < 2:
            return
        if fenced:
            yield from scanner.space()
            if not (yield from scanner.exactly(_FENCE)):
                return
        self._is_whole = True

    def _member(self, key: str) -> Step[bool]:
        """Read the value of a member and return whether the object may still be a call."""
        scanner = self._scanner
        is_name = key == self._format.name_key
        if key in self._members or not (is_name or key == self._format.arguments_key):
            return False
        if not (yield from _colon(scanner)):
            return False
        start = scanner.at
        if is_name:
            name = yield from _string(scanner)
            self._members[key] = name or ""
            return name in self._tools and self._may_fit()
        if scanner.text[start] != "{" or not (yield from _value(scanner, 1)):
            return False
        self._members[key] = scanner.text[start : scanner.at]
        return self._may_fit()

    def _may_fit(self) -> bool:
        """Return whether the arguments match the tool's schema, or True while one is unknown."""
        if len(self._members) < 2:
            return True
        try:
            arguments = json.loads(self._members[self._format.arguments_key])
        except ValueError:  # JSON forbids this whitespace, or a number has too many digits
            return False
        return self._accepts(self._tools[self._members[self._format.name_key]], arguments)


# -- JSON --


def _value(scanner: Scanner, depth: int) -> Step[bool]:
    """Read a JSON value and return whether a valid one begins here."""
    opening = scanner.text[scanner.at]
    if opening == '"':
        return (yield from _string(scanner)) is not None
    if depth > _MOST_DEPTH:
        return False
    if opening == "{":
        return (yield from _members(scanner, lambda _: _colon_and_value(scanner, depth + 1)))
    if opening == "[":
        return (yield from _items(scanner, depth + 1))
    return (yield from _word(scanner))


def _members(scanner: Scanner, after_key: Callable[[str], Step[bool]]) -> Step[bool]:
    """Read a JSON object and return whether a valid one begins here.

    Args:
        scanner: the text to read.
        after_key: reads the colon and the value of a member, given its key.
    """
    if not (yield from scanner.exactly("{")):
        return False
    yield from scanner.space()
    if (yield from scanner.exactly("}")):
        return True
    while True:
        key = yield from _string(scanner)
        if key is None or not (yield from after_key(key)):
            return False
        yield from scanner.space()
        if (yield from scanner.exactly("}")):
            return True
        if not (yield from scanner.exactly(",")):
            return False
        yield from scanner.space()


def _colon(scanner: Scanner) -> Step[bool]:
    """Read a colon with surrounding whitespace and return whether there is one."""
    yield from scanner.space()
    if not (yield from scanner.exactly(":")):
        return False
    yield from scanner.space()
    return True


def _colon_and_value(scanner: Scanner, depth: int) -> Step[bool]:
    return (yield from _colon(scanner)) and (yield from _value(scanner, depth))


def _items(scanner: Scanner, depth: int) -> Step[bool]:
    yield from scanner.exactly("[")
    yield from scanner.space()
    if (yield from scanner.exactly("]")):
        return True
    while True:
        if not (yield from _value(scanner, depth)):
            return False
        yield from scanner.space()
        if (yield from scanner.exactly("]")):
            return True
        if not (yield from scanner.exactly(",")):
            return False
        yield from scanner.space()


def _string(scanner: Scanner) -> Step[str | None]:
    """Read a string and return its value, or None if no valid string begins here."""
    start = scanner.at
    if not (yield from scanner.exactly('"')):
        return None
    while True:
        while (found := _IN_STRING.search(scanner.text, scanner.at)) is None:
            scanner.at = len(scanner.text)
            yield from scanner.more()
        scanner.at = found.end()
        if found[0] == '"':
            break
        if found[0] != "\\":
            return None
        while scanner.at == len(scanner.text):
            yield from scanner.more()
        scanner.at += 1
    try:
        text: str = json.loads(scanner.text[start : scanner.at])
    except ValueError:
        return None
    return text


def _word(scanner: Scanner) -> Step[bool]:
    """Read a number, true, false or null and return whether a valid one begins here."""
    start = scanner.at
    while (found := _AFTER_WORD.search(scanner.text, scanner.at)) is None:
        scanner.at = len(scanner.text)
        word = scanner.text[start:]
        if not (_NUMBER_BEGUN.fullmatch(word) or any(name.startswith(word) for name in _NAMES)):
            return False
        yield from scanner.more()
    scanner.at = found.start()
    word = scanner.text[start : scanner.at]
    return word in _NAMES or _NUMBER.fullmatch(word) is not None
