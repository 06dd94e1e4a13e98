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

__all__ = ["call_key", "with_marks"]


_NO_TEXT = "\ud800"  # a lone surrogate: what is decoded, and what clients send, has none


def call_key(message: Mapping[str, Any]) -> str | None:
    """What an assistant's message with calls is known by, however they are spelled; None without calls. No text of an
    answer is one."""
    said = [_said(call.get("function") or {}) for call in message.get("tool_calls") or ()]
    if not said:
        return None
    return _NO_TEXT + json.dumps([message.get("content") or "", said], sort_keys=True, ensure_ascii=False)


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
        key = call_key(message) if message.get("role") == "assistant" else None
        ids = None if key is None else find(key)
        if ids:
            kept.append(ids)
            message = {**{name: item for name, item in message.items() if name != "tool_calls"}, "content": mark}
        marked.append(message)
    return marked, kept
