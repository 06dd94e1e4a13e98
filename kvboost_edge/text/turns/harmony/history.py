"""Conversion of message histories to the form that templates with channels expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["one_call_each"]

Message = dict[str, Any]
_THOUGHT_KEYS = ("thinking", "reasoning_content", "reasoning")


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Split messages so that each contains one call, followed by its results.

    Templates with channels render only the first call of a message. Reasoning and text before a
    call are joined in the field `thinking`.
    """
    found: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            found.append(message)
            continue
        end = next(
            (i for i in range(at, len(messages)) if messages[i].get("role") != "tool"),
            len(messages),
        )
        results = list(messages[at:end])
        at = end
        kept = {
            key: value
            for key, value in message.items()
            if key not in (*_THOUGHT_KEYS, "content", "tool_calls")
        }
        thought = _thought_before_calls(message)
        for number, call in enumerate(calls):
            before = {"thinking": thought} if thought and number == 0 else {}
            found.append({**kept, "content": "", **before, "tool_calls": [call]})
            own = [one for one in results if number == len(calls) - 1 or _answers(one, call)]
            found += own
            results = [one for one in results if one not in own]
    return found


def _answers(result: Message, call: Any) -> bool:
    known = call.get("id") if isinstance(call, dict) else None
    return known is not None and result.get("tool_call_id") == known


def _thought_before_calls(message: Message) -> str:
    """Join the reasoning and the text of a message."""
    thought = next((message[key] for key in _THOUGHT_KEYS if message.get(key)), "")
    content = message.get("content")
    return "\n\n".join(text for text in (thought, content) if isinstance(text, str) and text)
