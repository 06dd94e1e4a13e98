"""Calls of models whose chat template lists tools but omits past calls.

Such a template renders only the content of an assistant's message. If it lists the tools between
the markers of `_TOOL_LIST`, the model was trained to call in the format `KEYWORD_CALLS`. Past calls
are written into the content, before its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvboost_edge.errors import RequestError
from kvboost_edge.text.turns.formats import CallFormat

__all__ = ["KEYWORD_CALLS", "calls_by_tool_list", "with_calls_written"]

Message = dict[str, Any]

_CALL = "<|tool_call_start|>"
_CALL_END = "<|tool_call_end|>"
_TOOL_LIST = re.compile(r"<\|tool_list_start\|>(.*?)<\|tool_list_end\|>", re.DOTALL)
KEYWORD_CALLS = CallFormat(
    "keyword", _CALL, opening=f"{_CALL}[", separator=", ", closing=f"]{_CALL_END}", parallel=True
)


def calls_by_tool_list(
    prompt: str, names: Sequence[str], is_token: Callable[[str], bool]
) -> CallFormat | None:
    """Return the call format if a prompt lists exactly these tools.

    Returns None if there is no JSON list between the markers or the call markers are not tokens of
    the model.
    """
    found = _TOOL_LIST.search(prompt)
    if found is None or not (is_token(_CALL) and is_token(_CALL_END)):
        return None
    try:
        listed = json.loads(found[1])
    except (ValueError, RecursionError):
        return None
    shown = (
        isinstance(listed, list)
        and len(listed) == len(names)
        and all(name in found[1] for name in names)
    )
    return KEYWORD_CALLS if shown else None


def with_calls_written(messages: Sequence[Message], calls: CallFormat) -> list[Message]:
    """Write past calls of kind "keyword" as text before the content of their messages.

    Raises:
        RequestError: a call has no name, or its arguments are not an object.
    """
    return [
        _written(message, calls) if message.get("tool_calls") else message for message in messages
    ]


def _written(message: Message, calls: CallFormat) -> Message:
    given = message["tool_calls"]
    made = map(_call, given if isinstance(given, list) else [given])
    text = calls.separator.join(f"{calls.before}{call}{calls.after}" for call in made)
    text = f"{calls.opening}{text}{calls.closing}"
    content = message.get("content")
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    if isinstance(content, list):
        return {**kept, "content": [{"type": "text", "text": text}, *content]}
    return {**kept, "content": text + (content or "")}


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments", {}) if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise RequestError(
            f"past call {name!r} cannot be written in the model's call format, NAME(KEY=VALUE); "
            "give it a function name and a JSON object of arguments"
        )
    return f"{name}({', '.join(f'{key}={_value(value)}' for key, value in arguments.items())})"


def _value(value: object) -> str:
    """Return a value in Python's syntax, with strings in JSON's notation."""
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_value(key)}: {_value(item)}' for key, item in value.items())}}}"
    if value is None or isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
