"""Grammars for turns that consist of messages, see `ChannelFormat`.

Reasoning and text before a call are free. The turn ends with an answer, or with a call whose
arguments match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvboost_edge.errors import RequestError
from kvboost_edge.text.turns.formats import ChannelFormat, Tool
from kvboost_edge.text.turns.lark import FREE, SPACE, Atom, Lark, Rule, SpecialId, escaped

__all__ = ["channel_grammar"]


def channel_grammar(
    channels: ChannelFormat,
    tools: Sequence[Tool],
    *,
    required: bool,
    state: str,
    special_id: SpecialId,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """Return the grammar of a turn.

    Args:
        tools: tools that may be called; with `required` one of them is.
        state: "opened": the prompt ended inside reasoning; "possible": after the start of the turn;
            "closed": inside an answer.
        answer: JSON schema of an answer; None: text.
    """
    if state not in ("opened", "possible", "closed"):
        raise RequestError(f'reasoning {state!r} must be "opened", "possible" or "closed"')
    return _Grammar(Lark(special_id), channels, answer).whole(tools, required, state)


class _Grammar:
    def __init__(
        self, lark: Lark, channels: ChannelFormat, answer: Mapping[str, Any] | None
    ) -> None:
        self._lark = lark
        self._format = channels
        self._answer: Rule | None = None if answer is None else lark.json("answer", answer)
        # Letters that spell a marker count as the marker: a reader of the text cannot tell them
        # apart.
        marks = (*channels.ends, channels.start)
        self._free = lark.terminal(
            "SAID", FREE, without=[FREE + escaped(mark) + FREE for mark in marks]
        )
        self._text = lark.terminal("TEXT", FREE)

    def whole(self, tools: Sequence[Tool], required: bool, state: str) -> str:
        lark = self._lark
        format = self._format
        rest = [lark.up_to("rest", self._text, format.end), *lark.literal(format.start)]
        lark.add(
            "before",
            *(
                [*lark.literal(format.header(name)), *rest]
                for name in (format.thoughts, format.calls)
            ),
        )
        ends: list[list[Atom]] = [] if required else [[*self._head(format.answer), *self._said()]]
        if tools:
            arguments = [
                lark.json(f"tool{i}", {**tool.parameters, "type": "object"})
                for i, tool in enumerate(tools)
            ]
            lark.add("constrained", lark.literal(format.constrain), [])
            calls = [
                way
                for tool, rule in zip(tools, arguments, strict=True)
                for way in self._call(tool, rule)
            ]
            # In some models' files the end of a call ends the turn, which a grammar cannot require.
            lark.add("called", [SPACE, *lark.literal(format.called)], [])
            ends.append([lark.add("call", *calls), Rule("called")])
        lark.add("behind", *([Rule("before*"), *end] for end in ends))
        starts: dict[str, list[list[Atom]]] = {
            "possible": [[Rule("behind")]],
            "opened": [[*rest, Rule("behind")]],
            "closed": [[*rest, Rule("behind")] if required else list(self._said())],
        }
        lark.add("start", *starts[state])
        return lark.text()

    def _said(self) -> Sequence[Atom]:
        return [self._free] if self._answer is None else [SPACE, self._answer]

    def _head(self, name: str) -> list[Atom]:
        """Return the header of an answer, which may be marked as JSON."""
        format = self._format
        lark = self._lark
        if self._answer is None:
            return lark.literal(format.header(name))
        lark.add("as_json", [" ?", *lark.literal(format.constrain), "json"], [])
        return [*lark.literal(format.channel), name, Rule("as_json"), *lark.literal(format.message)]

    def _call(self, tool: Tool, arguments: Rule) -> list[list[Atom]]:
        """Return the forms of a call: the tool is named after the channel, as models do, or before
        it, as templates do.
        """
        format = self._format
        lark = self._lark
        to = f"to={escaped(format.functions + tool.name)}"
        begin = lark.literal(format.channel)
        message = lark.literal(format.message)
        kind: list[Atom] = [" ?", Rule("constrained"), "json", *message, SPACE, arguments]
        return [[*begin, f"{format.calls} {to}", *kind], [f" {to}", *begin, format.calls, *kind]]
