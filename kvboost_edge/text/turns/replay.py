"""Calls of earlier turns, written with the ids they were generated with.

A client sends a call back as a name and arguments, and the chat template writes that anew: other spaces, other order of
keys, other tokens, and all behind it misses the cache. So the ids of an answer with calls are kept under what clients
have of it, and take the place of the message's content.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvboost_edge.text.answers import FindAnswer

__all__ = ["call_keys", "find_calls", "with_marks"]


_NO_TEXT = "\ud800"  # a lone surrogate: what is decoded, and what clients send, has none


def call_keys(message: Mapping[str, Any]) -> list[str]:
    """What an assistant's message with calls is known by, the surest first: with the ids of its calls, as the same may
    be called twice in other words; and without them, as clients may give their own. However the arguments are spelled;
    nothing without calls. No text of an answer is one."""
    calls = message.get("tool_calls") or ()
    if not calls:
        return []
    said = [_said(call.get("function") or {}) for call in calls]
    ids = [call.get("id") for call in calls]
    kinds = ([message.get("content") or "", said, known] for known in (ids, []))
    return [_NO_TEXT + json.dumps(kind, sort_keys=True, ensure_ascii=False) for kind in kinds]


def find_calls(message: Mapping[str, Any], find: FindAnswer) -> list[int] | None:
    """The ids a message with calls was generated with; None where they are not kept."""
    found = (find(key) for key in call_keys(message))
    return next((ids for ids in found if ids is not None), None)


def _said(function: Mapping[str, Any]) -> list[Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # one that is cut short is known by its text
            arguments = json.loads(arguments)
    return [function.get("name"), arguments]


def with_marks(
    messages: Sequence[dict[str, Any]], find: FindAnswer, mark: str
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """The messages, with `mark` as the content of those with calls whose ids are kept, and these ids."""
    marked: list[dict[str, Any]] = []
    kept: list[list[int]] = []
    for message in messages:
        ids = find_calls(message, find) if message.get("role") == "assistant" else None
        if ids:
            kept.append(ids)
            message = {**{name: item for name, item in message.items() if name != "tool_calls"}, "content": mark}
        marked.append(message)
    return marked, kept
