"""Reader for values in Python's syntax that returns JSON text.

Strings may have single or double quotes. Templates write strings without escaping quotes inside
them. A quote therefore ends a string only if the next text can follow a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from kvboost_edge.text.turns.scanner import Scanner, Step

__all__ = [
    "LONGEST",
    "bare",
    "is_keyword",
    "keyword",
    "literal",
    "named",
    "string",
    "string_inside",
]

_BEHIND_VALUE = frozenset(",)]}:")
_SPACE = re.compile(r"\s*")
_BEHIND_BARE = re.compile(r"[\s,()\[\]{}:='\"]")
_NO_LETTER = re.compile(r"[=(),'\"\[\]{}\n]")
_NAMES = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "/": "/",
    "\\": "\\",
    "'": "'",
    '"': '"',
}
_DIGITS = {"x": 2, "u": 4}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_MOST_DEPTH = 32
LONGEST = 256
"""Maximum characters of a name or a number."""


def string_inside(text: str) -> str:
    """Return a text as it appears between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def keyword(scanner: Scanner) -> Step[str]:
    """Read a name and the whitespace after it; return "" if there is none."""
    return (yield from bare(scanner, _NO_LETTER)).strip()


def is_keyword(name: str) -> bool:
    """Return whether `keyword` reads this name unchanged."""
    return (
        bool(name)
        and name == name.strip()
        and len(name) <= LONGEST
        and _NO_LETTER.search(name) is None
    )


def string(scanner: Scanner, show: Callable[[str], None]) -> Step[bool]:
    """Read a quoted string and emit it as JSON while it arrives.

    Returns whether there is a string here.
    """
    while scanner.at == len(scanner.text):
        yield from scanner.more()
    quote = scanner.text[scanner.at]
    if quote not in "'\"":
        return False
    scanner.at += 1
    special = re.compile(rf"[\\{quote}]")
    while True:
        found = special.search(scanner.text, scanner.at)
        end = len(scanner.text) if found is None else found.start()
        if end > scanner.at:
            show(string_inside(scanner.text[scanner.at : end]))
            scanner.at = end
        if found is None:
            yield from scanner.more()
        elif found[0] == "\\":
            yield from _escape(scanner, show)
        elif (yield from _ends_here(scanner)):
            return True
        else:
            show(string_inside(quote))
            scanner.at += 1


def _ends_here(scanner: Scanner) -> Step[bool]:
    """Return whether the quote here ends the string. If so, consume it."""
    while True:
        behind = _SPACE.match(scanner.text, scanner.at + 1)
        assert behind is not None
        if behind.end() < len(scanner.text):
            break
        yield from scanner.more()
    if scanner.text[behind.end()] not in _BEHIND_VALUE:
        return False
    scanner.at += 1
    return True


def _escape(scanner: Scanner, show: Callable[[str], None]) -> Step[None]:
    """Read a backslash escape. The backslash of an unknown escape is kept."""
    while len(scanner.text) < scanner.at + 2:
        yield from scanner.more()
    letter = scanner.text[scanner.at + 1]
    digits = _DIGITS.get(letter, 0)
    while len(scanner.text) < scanner.at + 2 + digits:
        yield from scanner.more()
    number = scanner.text[scanner.at + 2 : scanner.at + 2 + digits]
    if digits and re.fullmatch(r"[0-9A-Fa-f]+", number):
        show(f"\\u{number:0>4}")
        scanner.at += 2 + digits
    elif letter in _ESCAPES:
        show(string_inside(_ESCAPES[letter]))
        scanner.at += 2
    else:
        show(string_inside("\\"))
        scanner.at += 1


def literal(scanner: Scanner, depth: int = 0) -> Step[str | None]:
    """Read a value and return it as JSON, with a bare word as a string.

    Returns None if there is no valid value, or if it is nested more than 32 levels deep.
    """
    yield from scanner.space()
    pieces: list[str] = []
    if (yield from string(scanner, pieces.append)):
        return f'"{"".join(pieces)}"'
    opening = scanner.text[scanner.at]
    if opening in _CLOSING:
        return (yield from _nested(scanner, opening, depth))
    return named((yield from bare(scanner, _BEHIND_BARE)))


def _nested(scanner: Scanner, opening: str, depth: int) -> Step[str | None]:
    if depth >= _MOST_DEPTH:
        return None
    scanner.at += 1
    items: list[str] = []
    while True:
        yield from scanner.space()
        if (yield from scanner.exactly(_CLOSING[opening])):
            return (
                ("{" if opening == "{" else "[")
                + ", ".join(items)
                + ("}" if opening == "{" else "]")
            )
        item = yield from (
            _member(scanner, depth + 1) if opening == "{" else literal(scanner, depth + 1)
        )
        if item is None:
            return None
        items.append(item)
        yield from scanner.space()
        if not (yield from scanner.exactly(",")) and not scanner.text.startswith(
            _CLOSING[opening], scanner.at
        ):
            return None


def _member(scanner: Scanner, depth: int) -> Step[str | None]:
    key = yield from literal(scanner, depth)
    if key is None or not key.startswith('"'):
        return None
    yield from scanner.space()
    if not (yield from scanner.exactly(":")):
        return None
    value = yield from literal(scanner, depth)
    return None if value is None else f"{key}: {value}"


def bare(scanner: Scanner, behind: re.Pattern[str]) -> Step[str]:
    """Read the text up to a match of `behind`; return "" if it is longer than `LONGEST`."""
    start = scanner.at
    while (found := behind.search(scanner.text, scanner.at)) is None and len(
        scanner.text
    ) - start <= LONGEST:
        scanner.at = len(scanner.text)
        yield from scanner.more()
    end = len(scanner.text) if found is None else found.start()
    if end - start > LONGEST:
        scanner.at = start
        return ""
    scanner.at = end
    return scanner.text[start:end]


def named(text: str) -> str | None:
    """Return a number or constant as JSON, and any other word as a JSON string.

    Returns None for an empty text.
    """
    if not text:
        return None
    if text in _NAMES:
        return _NAMES[text]
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
