"""A reader of GBNF, the grammar format of llama.cpp.

It reads a grammar as llama.cpp does: literals, character classes, `.`, references, groups and
repetitions. A rule that is defined twice has its last definition.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TypeAlias

from kvboost_edge.errors import RequestError

__all__ = ["Alt", "Chars", "Node", "Ranges", "Ref", "Repeat", "Seq", "Text", "is_gbnf", "read_gbnf"]

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points as sorted ranges that neither overlap nor touch."""

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_NAME = re.compile(r"[\w-]+")
_NUMBER = re.compile(r"[0-9]+")
_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_LINE_END = re.compile(r"\r\n?|\n|\Z")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_MOST_DEPTH = 60  # the conversion is recursive
_MOST_SIGNS = 4
_MOST_COUNT = 100_000
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


@dataclass(eq=False)
class Chars:
    """One character of a class."""

    ranges: Ranges
    is_split: bool = False

    @functools.cached_property
    def first_bytes(self) -> int:
        """The first bytes of these characters in UTF-8, as a set of bits."""
        found = 0
        for low, high in self.ranges:
            for start, stop in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF)):
                first, last = max(low, start), min(high, stop)
                if first <= last:
                    begin, end = chr(first).encode()[0], chr(last).encode()[0]
                    found |= (1 << end + 1) - (1 << begin)
        return found


@dataclass(eq=False)
class Text:
    """A literal of no or several characters."""

    text: str
    is_split: bool = False

    @functools.cached_property
    def chars(self) -> list[Chars]:
        """The characters as nodes."""
        return [Chars(((ord(char), ord(char)),)) for char in self.text]


@dataclass(eq=False)
class Seq:
    """A sequence."""

    parts: list[Node]
    is_split: bool = False


@dataclass(eq=False)
class Alt:
    """Alternatives."""

    parts: list[Node]
    is_split: bool = False


@dataclass(eq=False)
class Repeat:
    """A repetition, without an upper bound if `most` is None."""

    part: Node
    least: int
    most: int | None
    is_split: bool = False


@dataclass(eq=False)
class Ref:
    """A reference to the rule with this index."""

    rule: int
    is_split: bool = False


Node: TypeAlias = Chars | Text | Seq | Alt | Repeat | Ref


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is in GBNF, which means that a line begins with `name ::=`."""
    return _RULE.search(text) is not None


def read_gbnf(text: str) -> list[Node]:
    """Return the rules of a grammar. The first one is `root`.

    Raises:
        RequestError: The grammar is invalid.
    """
    return _Reader(text).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._numbers: dict[str, int] = {"root": 0}
        self._rules: dict[int, Node] = {}

    def read(self) -> list[Node]:
        self._skip(_BLANK_LINES)
        while self._at < len(self._text):
            number = self._number(self._take(_NAME, "a rule's name"))
            self._skip(_BLANK)
            self._expect("::=")
            self._skip(_BLANK_LINES)
            self._rules[number] = self._alternatives(is_nested=False)
            self._take(_LINE_END, "the end of the line")
            self._skip(_BLANK_LINES)
        if 0 not in self._rules:
            raise RequestError("grammar is not valid: it has no rule 'root'; add one")
        for name, number in self._numbers.items():
            if number not in self._rules:
                raise RequestError(f"grammar is not valid: the rule {name!r} is missing; add it")
        return [self._rules[number] for number in range(len(self._rules))]

    def _alternatives(self, *, is_nested: bool) -> Node:
        parts = [self._sequence(is_nested)]
        while self._next == "|":
            self._at += 1
            self._skip(_BLANK_LINES)
            parts.append(self._sequence(is_nested))
        return parts[0] if len(parts) == 1 else Alt(parts)

    def _sequence(self, is_nested: bool) -> Node:
        blank = _BLANK_LINES if is_nested else _BLANK
        parts: list[Node] = []
        num_signs = 0
        while True:
            if self._next and self._next in "*+?{":
                if not parts:
                    raise self._error(f"{self._next!r} needs an item before it")
                num_signs += 1
                if num_signs > _MOST_SIGNS:
                    raise self._error(f"an item has more than {_MOST_SIGNS} repetitions")
                parts[-1] = self._repeated(parts[-1], blank)
            else:
                part = self._item()
                if part is None:
                    break
                parts.append(part)
                num_signs = 0
            self._skip(blank)
        return parts[0] if len(parts) == 1 else Seq(parts) if parts else Text("")

    def _item(self) -> Node | None:
        """Read one item without its repetition, or nothing where none begins."""
        first = self._next
        if first == '"':
            self._at += 1
            text = ""
            while self._next != '"':
                text += self._character()
            self._at += 1
            return Chars(((ord(text), ord(text)),)) if len(text) == 1 else Text(text)
        if first == "[":
            return self._class()
        if first == ".":
            self._at += 1
            return Chars(_complement(()))
        if first == "(":
            self._depth += 1
            if self._depth > _MOST_DEPTH:
                raise self._error(f"groups are nested more than {_MOST_DEPTH} levels deep")
            self._at += 1
            self._skip(_BLANK_LINES)
            node = self._alternatives(is_nested=True)
            self._expect(")")
            self._depth -= 1
            return node
        if _NAME.match(first):
            return Ref(self._number(self._take(_NAME, "a rule's name")))
        return None

    def _class(self) -> Chars:
        self._at += 1
        is_negated = self._next == "^"
        self._at += is_negated
        ranges = []
        while self._next != "]":
            low = high = ord(self._character())
            if self._next == "-" and not self._text.startswith("]", self._at + 1):
                self._at += 1
                high = ord(self._character())
            if low > high:
                raise self._error("a range of a character class is reversed")
            ranges.append((low, high))
        self._at += 1
        if not ranges:
            raise self._error("a character class is empty")
        return Chars(_complement(ranges) if is_negated else _without_surrogates(_joined(ranges)))

    def _repeated(self, node: Node, blank: re.Pattern[str]) -> Node:
        sign = self._next
        self._at += 1
        if sign != "{":
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
            return Repeat(node, least, most)
        self._skip(blank)
        least = most = self._count()
        self._skip(blank)
        if self._next == ",":
            self._at += 1
            self._skip(blank)
            most = None if self._next == "}" else self._count()
            self._skip(blank)
        self._expect("}")
        if most is not None and most < least:
            raise self._error(f"the repetition {{{least},{most}}} allows no count")
        return Text("") if most == 0 else Repeat(node, least, most)

    def _count(self) -> int:
        count = int(self._take(_NUMBER, "a number")[:9])
        if count > _MOST_COUNT:
            raise self._error(f"a repetition counts more than {_MOST_COUNT}")
        return count

    def _character(self) -> str:
        """Read a character of a literal or class, which may be an escape."""
        char = self._next
        if not char:
            raise self._error("a literal or character class is not closed")
        self._at += 1
        if char != "\\":
            return char
        kind = self._next
        self._at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        num_digits = _HEX.get(kind)
        if num_digits is None:
            raise self._error(f"the escape '\\{kind}' is unknown")
        digits = self._text[self._at : self._at + num_digits]
        self._at += num_digits
        if not re.fullmatch(f"[0-9a-fA-F]{{{num_digits}}}", digits):
            raise self._error(f"'\\{kind}' needs {num_digits} hexadecimal digits")
        code = int(digits, 16)
        if code > _LAST or _SURROGATES[0] <= code <= _SURROGATES[1]:
            raise self._error(f"'\\{kind}{digits}' is not a character")
        return chr(code)

    @property
    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _take(self, pattern: re.Pattern[str], what: str) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._error(f"{what} is expected")
        self._at = found.end()
        return found.group()

    def _expect(self, text: str) -> None:
        if not self._text.startswith(text, self._at):
            raise self._error(f"{text!r} is expected")
        self._at += len(text)

    def _error(self, problem: str) -> RequestError:
        line = self._text.count("\n", 0, self._at) + 1
        rest = self._text[self._at : self._at + 20]
        return RequestError(f"grammar is not valid: {problem} (line {line}, before {rest!r})")


def _joined(ranges: list[tuple[int, int]]) -> Ranges:
    """Sort ranges and join those that overlap or touch."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def _complement(ranges: list[tuple[int, int]] | tuple[()]) -> Ranges:
    """Return all characters outside the ranges."""
    found = []
    low = 0
    for start, stop in _joined([*ranges, _SURROGATES]):
        if low < start:
            found.append((low, start - 1))
        low = stop + 1
    if low <= _LAST:
        found.append((low, _LAST))
    return tuple(found)


def _without_surrogates(ranges: Ranges) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in ranges:
        if low < _SURROGATES[0] and high > _SURROGATES[1]:
            found += [(low, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, high)]
        else:
            found.append((low, high))
    return tuple(found)
