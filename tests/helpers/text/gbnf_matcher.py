"""A slow matcher of GBNF, character by character as in llama.cpp."""

from __future__ import annotations

import re
from typing import Any

_TOKEN = re.compile(
    r'\s+|#[^\n]*|(?P<literal>"(?:\\.|[^"\\])*")|(?P<class>\[(?:\\.|[^\]\\])*\])'
    r"|(?P<name>[\w-]+)(?P<defined>[ \t]*::=)?|(?P<count>\{[^}]*\})|(?P<sign>[.()|*+?])",
    re.DOTALL,
)
_CHAR = re.compile(r"\\x(..)|\\u(....)|\\U(.{8})|\\(.)|(.)", re.DOTALL)


class GbnfMatcher:
    """The texts of a grammar in which each new rule begins with `name ::=`."""

    def __init__(self, grammar: str) -> None:
        self._rules: dict[str, Any] = {}
        tokens = [each for each in _TOKEN.finditer(grammar) if each.lastgroup]
        starts = [i for i, each in enumerate(tokens) if each["defined"]]
        for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
            self._tokens = tokens[start + 1 : stop]
            self._rules[tokens[start]["name"]] = self._alternatives()
            assert not self._tokens

    def takes(self, text: str) -> bool:
        """Return whether the grammar matches the whole text."""
        self._text = text
        self._known: dict[tuple[str, int], frozenset[int]] = {}
        before = None
        # Repeat until recursive rules find nothing more.
        while before != self._known:
            before = dict(self._known)
            self._done: set[tuple[str, int]] = set()
            ends = self._ends(("name", "root"), 0)
        return len(text) in ends

    def _ends(self, node: Any, at: int) -> frozenset[int]:
        """Return where matches that begin at a position may end."""
        kind, value = node
        if kind == "name":
            key = (value, at)
            if key not in self._done:
                self._done.add(key)
                found = self._ends(self._rules[value], at)
                self._known[key] = self._known.get(key, frozenset()) | found
            return self._known.get(key, frozenset())
        if kind == "char":
            return frozenset({at + 1} if at < len(self._text) and value(self._text[at]) else ())
        if kind == "any of":
            return frozenset[int]().union(*(self._ends(each, at) for each in value))
        if kind == "all of":
            ends = frozenset({at})
            for each in value:
                ends = frozenset[int]().union(*(self._ends(each, end) for end in ends))
            return ends
        part, least, most = value
        now = frozenset({at})
        found = now if not least else frozenset[int]()
        seen = set[frozenset[int]]()
        for count in range(1, 1 + (most if most is not None else least + len(self._text) + 1)):
            now = frozenset[int]().union(*(self._ends(part, end) for end in now))
            if count >= least:
                found |= now
                if now in seen:
                    break
                seen.add(now)
        return found

    def _alternatives(self) -> Any:
        parts = [self._sequence()]
        while self._tokens and self._tokens[0]["sign"] == "|":
            self._tokens.pop(0)
            parts.append(self._sequence())
        return ("any of", parts)

    def _sequence(self) -> Any:
        parts: list[Any] = []
        while self._tokens and self._tokens[0]["sign"] not in {"|", ")"}:
            token = self._tokens.pop(0)
            sign, count = token["sign"], token["count"]
            if token["name"]:
                parts.append(("name", token["name"]))
            elif token["literal"]:
                chars = _characters(token["literal"][1:-1])
                parts.append(("all of", [("char", char.__eq__) for char in chars]))
            elif token["class"]:
                parts.append(("char", _class(token["class"][1:-1])))
            elif sign == ".":
                parts.append(("char", lambda char: True))
            elif sign == "(":
                parts.append(self._alternatives())
                self._tokens.pop(0)
            elif count:
                least, _, most = count[1:-1].partition(",")
                top = int(most) if most.strip() else None if "," in count else int(least)
                parts[-1] = ("repeat", (parts[-1], int(least), top))
            else:
                bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
                parts[-1] = ("repeat", (parts[-1], *bounds))
        return ("all of", parts)


def _characters(text: str) -> list[str]:
    return [
        chr(int(x or u or wide, 16))
        if x or u or wide
        else {"n": "\n", "t": "\t", "r": "\r"}.get(e, e)
        if e
        else plain
        for x, u, wide, e, plain in _CHAR.findall(text)
    ]


def _class(text: str) -> Any:
    is_negated = text.startswith("^")
    chars = _characters(text[is_negated:])
    ranges = []
    i = 0
    while i < len(chars):
        is_range = chars[i + 1 : i + 2] == ["-"] and i + 2 < len(chars)
        ranges.append((chars[i], chars[i + 2] if is_range else chars[i]))
        i += 3 if is_range else 1
    return lambda char: is_negated != any(low <= char <= high for low, high in ranges)
