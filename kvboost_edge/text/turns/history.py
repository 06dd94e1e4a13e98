"""Past calls as a chat template wants them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvboost_edge.text.turns.formats import CallFormat

__all__ = ["with_arguments"]

Message = dict[str, Any]


def with_arguments(messages: Sequence[Message], calls: CallFormat | None) -> list[Message]:
    """Messages whose calls have their arguments as the template takes them: an object, or its JSON text, which is what
    clients send. What is no JSON, as of a call that was cut short, stays."""
    as_text = calls is not None and calls.arguments_as_text
    return [{**message, **_with_calls(message, as_text)} for message in messages]


def _with_calls(message: Message, as_text: bool) -> Message:
    calls = message.get("tool_calls")
    return {"tool_calls": [_with_call(call, as_text) for call in calls]} if isinstance(calls, list) else {}


def _with_call(call: Any, as_text: bool) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"], as_text)}}


def _arguments(given: Any, as_text: bool) -> Any:
    if as_text:
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given
