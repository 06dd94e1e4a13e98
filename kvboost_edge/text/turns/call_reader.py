"""Reader of tool calls in a message. It emits their arguments as JSON text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvboost_edge.text.turns.formats import CallFormat, Tool
from kvboost_edge.text.turns.gemma_calls import BracedArguments
from kvboost_edge.text.turns.python_literals import keyword, literal, string, string_inside
from kvboost_edge.text.turns.scanner import EndOfText, Scanner, Step, words_of
from kvboost_edge.text.turns.schema_queries import members_of, resolved, value_kind
from kvboost_edge.text.turns.turn_parts import CallArguments, CallStart, Part

__all__ = ["CallReader"]

_LONGEST_KEY = 256


class CallReader:
    """Reader that consumes calls in a text and appends their parts.

    A call is accepted once it names a known tool and its arguments begin. Until then nothing is
    emitted, so the caller can rewind.
    """

    def __init__(
        self, scanner: Scanner, parts: list[Part], tools: Sequence[Tool], format: CallFormat
    ) -> None:
        self._scanner = scanner
        self._parts = parts
        self._format = format
        self._tools = {tool.name: tool for tool in tools}
        self._kinds: dict[str, Callable[[], Step[bool]]] = {
            "json": self._json_call,
            "named_json": self._named_json_call,
            "tagged": self._tagged_call,
            "keyword": self._keyword_call,
            "braced": self._braced_call,
        }
        self._named: str | None = None  # tool name of a call whose start is not yet emitted
        self.trigger = format.trigger
        self.count = 0

    def read(self) -> Step[bool]:
        """Consume all calls that begin here, and return whether there is one."""
        found = yield from self._first()
        if not found:
            return False
        while (yield from self._another()):
            pass
        yield from self._passed(self._format.closing)
        return True

    def _first(self) -> Step[bool]:
        begun = yield from self._scanner.piece(self._format.opening + self._format.before)
        return begun and (yield from self._call())

    def _another(self) -> Step[bool]:
        scanner = self._scanner
        before = self.count
        if not self._format.parallel:
            return False
        scanner.forget()
        try:
            begun = yield from scanner.piece(self._format.separator + self._format.before)
            if begun and (yield from self._call()):
                return True
        except EndOfText:
            if self.count > before:
                raise
        scanner.at = 0
        return False

    def _call(self) -> Step[bool]:
        self._named = None
        try:
            found = yield from self._kinds[self._format.kind]()
        except EndOfText:
            if self._named is not None:
                self._start(self._named)
            raise
        if found:
            yield from self._passed(self._format.after)
        return found

    def _passed(self, piece: str) -> Step[None]:
        """Consume a piece if it is next, and leave any other text."""
        self._scanner.forget()
        if not (yield from self._scanner.piece(piece)):
            self._scanner.at = 0

    def _start(self, name: str) -> None:
        self._named = None
        self._parts.append(CallStart(self.count, name))
        self.count += 1

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(self.count - 1, text))

    # -- {"name": NAME, "arguments": {...}} --

    def _json_call(self) -> Step[bool]:
        """Read a call with members in any order. Arguments before the name wait for the name."""
        scanner = self._scanner
        calls = self._format
        before = self.count
        waiting = ""
        first = True
        yield from scanner.space()
        if not (yield from scanner.exactly("{")):
            return False
        while True:
            key = yield from self._key()
            if key is None or (first and not calls.trigger and key != calls.members[0]):
                return self.count > before
            first = False
            if key == calls.arguments_key and self._named is not None:
                if not (yield from self._shown_arguments()):
                    return False
            elif key == calls.name_key and self.count == before:
                self._named = _text_of((yield from scanner.value()))
                if self._named not in self._tools:
                    return False
            else:
                value = yield from scanner.value()
                waiting = value if key == calls.arguments_key else waiting
            yield from scanner.space()
            if not (yield from scanner.exactly(",")):
                break
        closed = yield from scanner.exactly("}")
        if closed and self._named is not None and (not waiting or waiting[0] == "{"):
            self._start(self._named)
            self._show(waiting or "{}")
        return self.count > before

    def _key(self) -> Step[str | None]:
        """Read a member's key and the colon after it; return None if there is no key."""
        scanner = self._scanner
        yield from scanner.space()
        start = scanner.at
        if not (yield from scanner.exactly('"')):
            return None
        yield from scanner.string()
        key = scanner.text[start : scanner.at]
        yield from scanner.space()
        colon = yield from scanner.exactly(":")
        yield from scanner.space()
        return _text_of(key) if colon else None

    def _shown_arguments(self) -> Step[bool]:
        """Emit the call's start, then its object of arguments as it arrives."""
        scanner = self._scanner
        name = self._named
        yield from scanner.space()
        start = scanner.at
        if name is None or not (yield from scanner.exactly("{")):
            return False
        scanner.at = start
        self._start(name)
        yield from scanner.shown_value(self._show)
        return True

    # -- NAME between {...} --

    def _named_json_call(self) -> Step[bool]:
        found = yield from self._name()
        return found and (yield from self._shown_arguments())

    def _name(self) -> Step[bool]:
        """Read a tool's name and the piece after it, and return whether both are there."""
        scanner = self._scanner
        yield from scanner.space()
        name = yield from scanner.one_of(self._tools)
        if name is None:
            return False
        self._named = name
        return (yield from scanner.piece(self._format.between))

    # -- NAME between KEY VALUE KEY VALUE --

    def _tagged_call(self) -> Step[bool]:
        if not (yield from self._name()) or self._named is None:
            return False
        scanner = self._scanner
        calls = self._format
        name = self._named
        schema = self._tools[name].parameters
        members, _ = members_of(schema)
        before = self.count
        start = scanner.at
        while (yield from scanner.piece(calls.argument_before)):
            key = yield from self._argument_key()
            if key is None:
                break
            first = self.count == before
            if first:
                self._start(name)
            self._show(("{" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            yield from self._argument_value(members.get(key, {}), schema)
            scanner.forget()
            start = 0
        scanner.at = start
        if self.count > before:
            self._show("}")
            return True
        ends = yield from scanner.piece(calls.after)
        if ends:
            scanner.at = start
            self._start(name)
            self._show("{}")
        return ends

    def _argument_key(self) -> Step[str | None]:
        """Read an argument's key and the piece after it; return None if there is no key."""
        scanner = self._scanner
        marker = words_of(self._format.value_before)[0]
        while (end := scanner.text.find(marker, scanner.at)) < 0:
            if len(scanner.text) - scanner.at >= _LONGEST_KEY + len(marker):
                return None
            yield from scanner.more()
        key = scanner.text[scanner.at : end].strip()
        if end - scanner.at > _LONGEST_KEY:
            return None
        scanner.at = end
        return key if (yield from scanner.piece(self._format.value_before)) else None

    def _argument_value(self, schema: object, root: Mapping[str, Any]) -> Step[None]:
        """Read an argument's value and emit it as JSON.

        Strings are emitted as they arrive, other values when complete.
        """
        scanner = self._scanner
        calls = self._format
        marker, *others = words_of(calls.argument_after)
        kept = calls.argument_after[
            : len(calls.argument_after) - len(calls.argument_after.lstrip())
        ]
        if calls.value_before.endswith("\n"):
            yield from scanner.exactly("\n")
        if value_kind(schema, root) == "string" and "enum" not in resolved(schema, root):
            self._show('"')
            yield from scanner.up_to(marker, kept, lambda text: self._show(string_inside(text)))
            self._show('"')
        else:
            pieces: list[str] = []
            yield from scanner.up_to(marker, kept, pieces.append)
            self._show(_value_of("".join(pieces), schema, root))
        yield from scanner.piece(" ".join(others))

    # -- NAME(KEY=VALUE, KEY=VALUE) --

    def _keyword_call(self) -> Step[bool]:
        scanner = self._scanner
        yield from scanner.space()
        name = yield from scanner.one_of(self._tools)
        if name is None or not (yield from scanner.exactly("(")):
            return False
        self._named = name
        before = self.count
        start = scanner.at
        yield from scanner.space()
        while not (yield from scanner.exactly(")")):
            if not (yield from self._keyword_argument(name, is_first=self.count == before)):
                scanner.at = start
                if self.count > before:
                    self._show("}")
                return self.count > before
            start = 0
        if self.count == before:
            self._start(name)
            self._show("{")
        self._show("}")
        return True

    def _keyword_argument(self, name: str, *, is_first: bool) -> Step[bool]:
        """Read an argument and the text after it, and return whether there is one.

        A string is emitted as it arrives.
        """
        scanner = self._scanner
        schema = self._tools[name].parameters
        key = yield from keyword(scanner)
        yield from scanner.space()
        if not key or not (yield from scanner.exactly("=")):
            return False
        yield from scanner.space()
        front = ("{" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        if (yield from self._opened(name if is_first else None, front)):
            yield from string(scanner, self._show)
            self._show('"')
        else:
            value = yield from literal(scanner)
            if value is None:
                return False
            if is_first:
                self._start(name)
            as_text = value_kind(members_of(schema)[0].get(key, {}), schema) == "string"
            self._show(
                front
                + (json.dumps(value, ensure_ascii=False) if as_text and value[0] != '"' else value)
            )
        scanner.forget()
        yield from scanner.space()
        if (yield from scanner.exactly(",")):
            yield from scanner.space()
        scanner.forget()
        return True

    def _opened(self, name: str | None, front: str) -> Step[bool]:
        """Return whether a string begins here. If so, emit the text before it.

        Args:
            name: tool name of a call whose start is emitted first, or None.
            front: text before the string.
        """
        scanner = self._scanner
        while scanner.at == len(scanner.text):
            yield from scanner.more()
        if scanner.text[scanner.at] not in "'\"":
            return False
        if name is not None:
            self._start(name)
        self._show(f'{front}"')
        return True

    # -- NAME{KEY:VALUE,KEY:VALUE} --

    def _braced_call(self) -> Step[bool]:
        scanner = self._scanner
        if not (yield from self._name()) or self._named is None:
            return False
        yield from scanner.space()
        if not (yield from scanner.exactly("{")):
            return False
        name = self._named
        schema = self._tools[self._named].parameters
        texts = [
            key for key, one in members_of(schema)[0].items() if value_kind(one, schema) == "string"
        ]
        arguments = BracedArguments(
            scanner, self._format.quote, self._show, lambda: self._start(name), texts
        )
        return (yield from arguments.read())


def _text_of(written: str) -> str | None:
    """Return the string that a JSON text represents, or None for other values."""
    try:
        value = json.loads(written)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _value_of(text: str, schema: object, root: Mapping[str, Any]) -> str:
    """Return a value between tags as JSON.

    JSON is kept. Other text becomes a string, and so does any text where the schema allows only
    strings.
    """
    bare = text.strip()
    if value_kind(schema, root) == "string":
        return json.dumps(bare, ensure_ascii=False)
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if isinstance(value, str) else bare


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
