"""Lark grammars (llguidance dialect) that enforce the model's tool-call format.

Text is free until the marker of a call. After it, the tool's name and the schema of its arguments
are enforced. A marker that is a special token of the vocabulary is also a special token in the
grammar, because text never matches special tokens there. The same marker spelled out by other
tokens counts too, because a parser of the text cannot tell the difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvboost_edge.errors import RequestError
from kvboost_edge.text.turns.formats import CallFormat, ReasoningFormat, Tool, TurnFormat
from kvboost_edge.text.turns.gemma_calls import BracedGrammar
from kvboost_edge.text.turns.harmony.grammar import channel_grammar
from kvboost_edge.text.turns.lark import (
    FREE,
    JSON_SPACE,
    SPACE,
    Atom,
    Lark,
    Rule,
    SpecialId,
    escaped,
)
from kvboost_edge.text.turns.python_literals import is_keyword
from kvboost_edge.text.turns.schema_queries import members_of, value_kind

__all__ = ["answer_grammar", "calls_grammar"]

_KEY = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"
_QUOTING = {"'", "\\", "\n", "\r"}
# Annotations, which do not restrict a schema's values.
_SAYING_NOTHING = {"description", "title", "default", "examples"}
_ID = '"[A-Za-z0-9_-]{1,64}"'


def calls_grammar(
    format: TurnFormat,
    tools: Sequence[Tool],
    *,
    choice: str,
    parallel: bool,
    reasoning: str,
    special_id: SpecialId,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """Return the grammar of a turn that may, must or must not call tools.

    Args:
        format: turn format of the model.
        tools: tools that may be called.
        choice: "auto" allows text until a call begins, then only calls. "required" allows only
            calls, at least one. "none" allows text in which no call begins.
        parallel: whether several calls may follow one another, if the model's format supports it.
        reasoning: "opened" if the prompt ends inside a reasoning block, "possible" if the turn may
            begin with one, or "closed" if it may not.
        special_id: returns the id of the special token with this text, or None.
        answer: JSON schema of a turn without calls. By default, such a turn is free text.

    Raises:
        RequestError: the model's call format is unknown, or a call is possible but `tools` is
            empty.
    """
    if format.calls is None:
        raise RequestError(
            "the tool-call format of the model's chat template is not supported; send the "
            "request without tools"
        )
    if not tools and choice != "none":
        raise RequestError(f"tool_choice {choice!r} needs at least one tool")
    if format.channels is not None:
        called = [] if choice == "none" else tools
        return channel_grammar(
            format.channels,
            called,
            required=choice == "required",
            state=reasoning,
            special_id=special_id,
            answer=answer,
        )
    lark = Lark(special_id)
    turn = _Turn(lark, format.calls, tools, parallel=parallel and format.calls.parallel)
    bodies = {"auto": turn.auto, "required": turn.required, "none": turn.none}
    if answer is not None:
        fits: list[Atom] = [SPACE, lark.json("answer", answer)]
        bodies |= {"auto": lambda unlike: [fits, *turn.required(unlike)], "none": lambda _: [fits]}
    return _behind_reasoning(lark, format.reasoning, reasoning, bodies[choice])


def answer_grammar(
    format: TurnFormat, schema: Mapping[str, Any], *, reasoning: str, special_id: SpecialId
) -> str:
    """Return the grammar of a JSON answer, with optional reasoning before it.

    Args:
        format: turn format of the model.
        schema: JSON schema of the answer.
        reasoning: as for `calls_grammar`.
        special_id: as for `calls_grammar`.
    """
    if format.channels is not None:
        return channel_grammar(
            format.channels,
            [],
            required=False,
            state=reasoning,
            special_id=special_id,
            answer=schema,
        )
    lark = Lark(special_id)
    answer = lark.json("answer", schema)
    return _behind_reasoning(lark, format.reasoning, reasoning, lambda _: [[SPACE, answer]])


Body = Callable[[str], list[list[Atom]]]
"""Function that returns the alternatives for a turn's text, as sequences of atoms.

Its argument is a marker that the text must not begin with, or "".
"""


def _behind_reasoning(lark: Lark, markers: ReasoningFormat | None, state: str, body: Body) -> str:
    """Return the complete grammar: an optional reasoning block, then the body."""
    if state not in ("opened", "possible", "closed"):
        raise RequestError(f'reasoning must be "opened", "possible" or "closed", got {state!r}')
    if markers is None or state == "closed":
        lark.add("start", *body(""))
        return lark.text()
    block = lark.reasoning(markers, opened=state == "opened")
    # Without a block, text must not begin like one, because a call marker inside would count.
    plain = body("" if state == "opened" else markers.start)
    behind = lark.add("behind", *(body("") if state == "possible" else plain))
    lark.add("start", [block, behind], *(plain if state == "possible" else []))
    return lark.text()


class _Turn:
    """Grammar of a turn that may call tools, without reasoning."""

    def __init__(
        self, lark: Lark, calls: CallFormat, tools: Sequence[Tool], *, parallel: bool
    ) -> None:
        self._lark = lark
        self._format = calls
        self._tools = tools
        self._parallel = parallel
        self._made: dict[str, Rule] = {}

    # -- bodies --

    def required(self, _: str) -> list[list[Atom]]:
        opening = self._lark.literal(self._format.opening + self._format.before)
        return [[SPACE, *opening, self._calls()]]

    def auto(self, unlike: str) -> list[list[Atom]]:
        if not self._format.trigger:
            return [*self.none(unlike), *self.required(unlike)]
        free = self._free("free", unlike)
        name = "called_plain" if unlike else "called"
        called = self._once(name, lambda: self._lark.up_to(name, free, self._format.trigger))
        behind = (
            (self._format.opening + self._format.before).lstrip().removeprefix(self._format.trigger)
        )
        return [[free], [called, *self._lark.literal(behind), self._calls()]]

    def none(self, unlike: str) -> list[list[Atom]]:
        if self._format.trigger:
            return [[self._free("none", unlike, FREE + escaped(self._format.trigger) + FREE)]]
        return [[self._free("none", unlike, self._bare_call() + FREE)]]

    def _free(self, name: str, unlike: str, *without: str) -> Rule:
        """Return a rule for free text that does not begin with the marker `unlike`."""
        name = (f"{name}_plain" if unlike else name).upper()
        block = [rf"\s*{escaped(unlike)}{FREE}"] if unlike else []
        return self._once(name, lambda: self._lark.terminal(name, FREE, without=[*without, *block]))

    def _bare_call(self) -> str:
        """Return a pattern for the start of a message that is a call without a marker."""
        names = (
            "|".join(escaped(json.dumps(tool.name, ensure_ascii=False)) for tool in self._tools)
            or '"'
        )
        front = rf"\s*{escaped((self._format.opening + self._format.before).strip())}\s*\{{\s*"
        first = self._format.members[0]
        return (
            front
            + escaped(json.dumps(first))
            + r"\s*:"
            + (rf"\s*({names})" if first == self._format.name_key else "")
        )

    def _once(self, name: str, make: Callable[[], Rule]) -> Rule:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    # -- calls --

    def _calls(self) -> Rule:
        """Return the rule for all calls of a message, without the opening of the first call."""
        return self._once("calls", self._add_calls)

    def _add_calls(self) -> Rule:
        lark = self._lark
        calls = self._format
        one = lark.add(
            "call", *([self._call(number, tool)] for number, tool in enumerate(self._tools))
        )
        more: list[Atom] = []
        if self._parallel:
            lark.add(
                "another",
                [SPACE, *lark.literal(calls.separator), SPACE, *lark.literal(calls.before), one],
            )
            more = [Rule("another*")]
        kept, left = _optional_end(lark.literal(calls.closing))
        lark.add("closing", [SPACE, *left], [])
        return lark.add("calls", [one, *more, *([SPACE, *kept] if kept else []), Rule("closing")])

    def _call(self, number: int, tool: Tool) -> Rule:
        parts = {
            "json": self._json_call,
            "named_json": self._named_json_call,
            "tagged": self._tagged_call,
            "keyword": self._keyword_call,
            "braced": self._braced_call,
        }
        after = self._lark.literal(self._format.after)
        inner = parts[self._format.kind](f"tool{number}", tool)
        return self._lark.add(f"tool{number}", [SPACE, *inner, *([SPACE, *after] if after else [])])

    def _arguments(self, name: str, tool: Tool) -> Rule:
        return self._lark.json(f"{name}_arguments", {**tool.parameters, "type": "object"})

    def _json_call(self, name: str, tool: Tool) -> list[Atom]:
        calls = self._format
        atoms: list[Atom] = [r"\{", JSON_SPACE]
        for place, member in enumerate(calls.members):
            atoms += [
                *((r",", JSON_SPACE) if place else ()),
                escaped(json.dumps(member)),
                JSON_SPACE,
                ":",
                JSON_SPACE,
            ]
            if member == calls.arguments_key:
                atoms.append(self._arguments(name, tool))
            elif member == calls.id_key:
                atoms.append(_ID)
            else:
                value = tool.name if member == calls.name_key else calls.constants[member]
                atoms.append(escaped(json.dumps(value, ensure_ascii=False)))
            atoms.append(JSON_SPACE)
        return [*atoms, r"\}"]

    def _named_json_call(self, name: str, tool: Tool) -> list[Atom]:
        between = self._lark.literal(self._format.between)
        return [escaped(tool.name), SPACE, *between, SPACE, self._arguments(name, tool)]

    def _tagged_call(self, name: str, tool: Tool) -> list[Atom]:
        atoms: list[Atom] = [escaped(tool.name), SPACE, *self._lark.literal(self._format.between)]
        members, required = members_of(tool.parameters)
        for number, (key, schema) in enumerate(members.items()):
            rule = f"{name}_argument{number}"
            self._lark.add(rule, self._tagged_argument(rule, escaped(key), schema, tool.parameters))
            atoms.append(Rule(rule if key in required else f"{rule}?"))
        if not members and tool.parameters.get("additionalProperties", True) is not False:
            self._lark.add(f"{name}_any", self._tagged_argument(f"{name}_any", _KEY, {}, {}))
            atoms.append(Rule(f"{name}_any*"))
        return atoms

    def _tagged_argument(
        self, name: str, key: str, schema: object, root: Mapping[str, Any]
    ) -> list[Atom]:
        calls = self._format
        lark = self._lark
        front = [
            SPACE,
            *lark.literal(calls.argument_before),
            key,
            *lark.literal(calls.value_before),
        ]
        choices = schema.get("enum") if isinstance(schema, Mapping) else None
        ends = lark.literal(calls.argument_after)
        if value_kind(schema, root) == "json":
            return [*front, SPACE, lark.json(f"{name}_value", _rooted(schema, root)), SPACE, *ends]
        if isinstance(choices, list):
            texts = [one if isinstance(one, str) else json.dumps(one) for one in choices]
            return [*front, SPACE, f"({'|'.join(map(escaped, texts))})", SPACE, *ends]
        text = self._once("VALUE", lambda: lark.terminal("VALUE", FREE))
        return [*front, lark.up_to(f"{name}_value", text, calls.argument_after.strip())]

    def _keyword_call(self, name: str, tool: Tool) -> list[Atom]:
        """Return the atoms of a call with keyword arguments in the schema's order.

        Optional arguments may be omitted.
        """
        lark = self._lark
        (members, required) = members_of(tool.parameters)
        for key in members:
            if not is_keyword(key):
                raise RequestError(
                    f"tool {tool.name!r} has a property {key!r}, which the model's call format, "
                    "NAME(KEY=VALUE), cannot express: it must not contain = ( ) , ' \" [ ] { } or "
                    "line ends, begin or end with a space, or exceed 256 characters; rename it"
                )
        items: list[tuple[list[Atom], bool]] = []
        for number, (key, schema) in enumerate(members.items()):
            value = lark.add(
                f"{name}_value{number}", *self._keyword_values(f"{name}_json{number}", schema, tool)
            )
            items.append(([escaped(key), SPACE, "=", SPACE, value, SPACE], key in required))
        first = lark.ordered_items(name, items, [",", SPACE])
        if not members and tool.parameters.get("additionalProperties", True) is not False:
            value = lark.add(f"{name}_any", *self._keyword_values(f"{name}_any_json", {}, tool))
            lark.add(f"{name}_other", [",", SPACE, _KEY, SPACE, "=", SPACE, value, SPACE])
            first = lark.add(
                f"{name}_free", [_KEY, SPACE, "=", SPACE, value, SPACE, Rule(f"{name}_other*")], []
            )
        return [escaped(tool.name), r"\(", SPACE, first, r"\)"]

    def _braced_call(self, name: str, tool: Tool) -> list[Atom]:
        lark = self._lark
        quote = self._format.quote

        def string() -> Rule:
            text = self._once("VALUE", lambda: lark.terminal("VALUE", FREE))
            return self._once("string", lambda: lark.up_to("string", text, quote))

        return [escaped(tool.name), BracedGrammar(lark, name, tool, quote, string).arguments()]

    def _keyword_values(self, name: str, schema: object, tool: Tool) -> list[list[Atom]]:
        """Return the notations of a value: JSON, and Python where it differs."""
        given = schema if isinstance(schema, Mapping) else {}
        ways: list[list[Atom]] = [[self._lark.json(name, _rooted(schema, tool.parameters))]]
        choices = [
            one for one in given.get("enum") or [] if isinstance(one, str) and not _QUOTING & {*one}
        ]
        if choices:
            ways.append([f"'({'|'.join(map(escaped, choices))})'"])
        elif not set(given) - _SAYING_NOTHING - {"type"}:
            python = {"string": r"'[^'\\\n\r]*'", "boolean": "(True|False)", "null": "None"}
            ways += [[text] for type_, text in python.items() if given.get("type", type_) == type_]
        return ways


def _optional_end(atoms: list[Atom]) -> tuple[list[Atom], list[Atom]]:
    """Split off the special tokens at the end of a piece.

    The end-of-turn token may be one of them, and a grammar cannot require it.
    """
    size = len(atoms)
    while size and (isinstance(atoms[size - 1], int) or atoms[size - 1] == SPACE):
        size -= 1
    return atoms[:size], atoms[size:]


def _rooted(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a member's schema with the definitions of its root schema."""
    found = dict(schema) if isinstance(schema, Mapping) else {}
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **found}
