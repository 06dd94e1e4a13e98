"""Grammars for turns with several messages (see `ChannelFormat`).

Reasoning and text before a call are free. The turn ends with an answer, or with a call whose
arguments match the tool's schema.
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
    """Return the grammar of a turn with several messages.

    Args:
        channels: structure of the turn.
        tools: tools that may be called.
        required: whether the turn must end with a call instead of an answer.
        state: "opened" if the prompt ends inside reasoning, "closed" if it ends inside an answer,
            or "possible" if it ends after the start of the turn.
        special_id: returns the id of the special token with this text, or None.
        answer: JSON schema of an answer. By default, an answer is free text.
    """
    if state not in ("opened", "possible", "closed"):
        raise RequestError(f'reasoning must be "opened", "possible" or "closed", got {state!r}')
    return _Grammar(Lark(special_id), channels, answer).whole(tools, required, state)


class _Grammar:
    def __init__(
        self, lark: Lark, channels: ChannelFormat, answer: Mapping[str, Any] | None
    ) -> None:
        self._lark = lark
        self._format = channels
        self._answer: Rule | None = None if answer is None else lark.json("answer", answer)
        # Markers spelled out by ordinary tokens count too, because a parser of the text cannot tell
        # the difference.
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
            # In some models the call marker is also the end-of-turn token, which a grammar cannot
            # require.
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
        """Return the header of an answer, which may declare JSON."""
        format = self._format
        lark = self._lark
        if self._answer is None:
            return lark.literal(format.header(name))
        lark.add("as_json", [" ?", *lark.literal(format.constrain), "json"], [])
        return [*lark.literal(format.channel), name, Rule("as_json"), *lark.literal(format.message)]

    def _call(self, tool: Tool, arguments: Rule) -> list[list[Atom]]:
        """Return the two notations of a call.

        Models write the tool's name after the channel, and templates write it before.
        """
        format = self._format
        lark = self._lark
        to = f"to={escaped(format.functions + tool.name)}"
        begin = lark.literal(format.channel)
        message = lark.literal(format.message)
        kind: list[Atom] = [" ?", Rule("constrained"), "json", *message, SPACE, arguments]
        return [[*begin, f"{format.calls} {to}", *kind], [f" {to}", *begin, format.calls, *kind]]
