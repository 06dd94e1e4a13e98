"""Tool calls for models whose chat template does not list tools.

The tools are described in the system message. Past calls and results become plain messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvboost_edge.text.turns.formats import CallFormat
from kvboost_edge.text.turns.replay import object_text

__all__ = ["GENERIC", "with_tools_described"]

Message = dict[str, Any]

GENERIC = CallFormat(
    "json",
    "<tool_call>",
    before="<tool_call>\n",
    after="\n</tool_call>",
    separator="\n",
    parallel=True,
    arguments_as_text=True,
    members=("name", "arguments"),
)
"""Call format that the description in the system message asks the model to use."""

_HEAD = """\
You can call tools. To call one, write nothing but

<tool_call>
{"name": "the tool's name", "arguments": {"an argument": "its value"}}
</tool_call>

and its result follows in the next message. Several calls may follow one another. Call a tool only \
where it helps; otherwise answer as usual.

The tools, with the JSON schemas of their arguments:"""


def with_tools_described(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    system: bool = True,
) -> list[Message]:
    """Return plain messages, with the tools described in one of them.

    Args:
        messages: messages that may contain calls and results.
        tools: tools in the format of OpenAI's API. If empty, only past calls and results are
            converted.
        system: whether the template accepts system messages. If not, the first user message
            describes the tools.
    """
    plain = _joined([_plain(message) for message in messages])
    return _told(plain, "\n".join([_HEAD, *map(_line, tools)]), system) if tools else plain


def _line(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", tool)
    known = {
        key: function[key]
        for key in ("name", "description", "parameters")
        if function.get(key) is not None
    }
    return json.dumps(known, ensure_ascii=False)


def _plain(message: Mapping[str, Any]) -> Message:
    """Convert a message to one without calls, in a role that every template supports."""
    kept = {
        key: value
        for key, value in message.items()
        if key not in ("tool_calls", "tool_call_id", "name")
    }
    if message.get("role") == "tool":
        return {
            **kept,
            "role": "user",
            "content": f"<tool_response>\n{_text(message)}\n</tool_response>",
        }
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple)) or not calls:
        return dict(message)
    return {**kept, "content": "\n".join([*filter(None, [_text(message)]), *map(_call, calls)])}


def _call(call: Mapping[str, Any]) -> str:
    """Format a past call as described to the model, keeping the text of an object unchanged."""
    function = call.get("function", call)
    text = object_text(function.get("arguments", "{}"))
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'{GENERIC.before}{{"name": {name}, "arguments": {text}}}{GENERIC.after}'


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def _joined(messages: list[Message]) -> list[Message]:
    """Merge consecutive user messages, because many templates require alternating roles."""
    found: list[Message] = []
    for message in messages:
        if found and message.get("role") == found[-1].get("role") == "user":
            found[-1] = {**found[-1], "content": f"{_text(found[-1])}\n{_text(message)}"}
        else:
            found.append(message)
    return found


def _told(messages: list[Message], words: str, system: bool) -> list[Message]:
    """Add a text to the system message, or before the first user message's text.

    Args:
        messages: plain messages.
        words: text to add.
        system: whether to use the system message, which is created if missing.
    """
    if system:
        if messages and messages[0].get("role") in ("system", "developer"):
            return [{**messages[0], "content": f"{_text(messages[0])}\n\n{words}"}, *messages[1:]]
        return [{"role": "system", "content": words}, *messages]
    first = next(
        (number for number, message in enumerate(messages) if message.get("role") == "user"), None
    )
    if first is None:
        return [{"role": "user", "content": words}, *messages]
    asked = {**messages[first], "content": f"{words}\n\n{_text(messages[first])}"}
    return [*messages[:first], asked, *messages[first + 1 :]]
