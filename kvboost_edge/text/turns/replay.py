"""Replay of earlier calls and thinking with their original token ids.

A client sends a call back as a name and arguments. The chat template renders it again with
different spaces, key order and tokens, so everything after it would miss the cache. The ids of an
answer with calls are therefore stored under the message that clients receive, and later replace the
message's content.

Most clients do not send thinking back. If the template would render it, it is restored from the
stored answer.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvboost_edge.text.rendered_chat import FindAnswer
from kvboost_edge.text.turns.formats import CallFormat, ReasoningFormat

__all__ = [
    "call_keys",
    "find_calls",
    "find_thought",
    "merge_call_marks",
    "object_in",
    "object_text",
    "thought_key",
    "with_arguments",
    "with_marks",
    "with_objects",
    "with_thoughts",
]

_INVALID = "INVALID_JSON"  # the name that Anthropic's documentation recommends
_NO_TEXT = "\ud800"  # a lone surrogate, which occurs neither in decoded text nor in client messages


def call_keys(message: Mapping[str, Any]) -> list[str]:
    """Return the keys of an assistant's message with calls, most specific first.

    The first key includes the call ids, because a model may generate the same call twice with
    different tokens. The second key omits them, because clients may assign their own ids. The
    formatting of arguments does not matter. The list is empty without calls. A key never equals the
    text of an answer.
    """
    calls = message.get("tool_calls") or ()
    if not calls:
        return []
    said = [_said(call.get("function") or {}) for call in calls]
    ids = [call.get("id") for call in calls]
    kinds = ([message.get("content") or "", said, known] for known in (ids, []))
    return [_NO_TEXT + json.dumps(kind, sort_keys=True, ensure_ascii=False) for kind in kinds]


def find_calls(message: Mapping[str, Any], find: FindAnswer) -> list[int] | None:
    """Return the generated ids of a message with calls, or None if they are not stored."""
    found = (find(key) for key in call_keys(message))
    return next((ids for ids in found if ids is not None), None)


def _said(function: Mapping[str, Any]) -> list[Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # The arguments of a truncated call are not JSON and stay text.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [function.get("name"), arguments]


def with_marks(
    messages: Sequence[dict[str, Any]], find: FindAnswer, mark: str, *, in_calls: bool = False
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Replace messages with stored calls by marks.

    Args:
        messages: messages of a chat.
        find: returns the stored ids of a key.
        mark: text that replaces the content.
        in_calls: put the marks into the arguments of the calls instead. See `merge_call_marks`.

    Returns:
        The messages, and the stored ids for each mark.
    """
    marked: list[dict[str, Any]] = []
    kept: list[list[int]] = []
    for message in messages:
        ids = find_calls(message, find) if message.get("role") == "assistant" else None
        if ids:
            kept.append(ids)
            if in_calls:
                calls = [_with_argument(call, mark) for call in message["tool_calls"]]
                message = {**message, "content": "", "tool_calls": calls}
            else:
                message = {
                    **{name: item for name, item in message.items() if name != "tool_calls"},
                    "content": mark,
                }
        marked.append(message)
    return marked, kept


def _with_argument(call: dict[str, Any], mark: str) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": {mark: mark}}}


def merge_call_marks(text: str, mark: str, calls: CallFormat) -> str:
    """Replace rendered calls of kind "braced" whose arguments are marks by a single mark."""
    before, after, between, last = map(
        re.escape, (calls.before, calls.after, calls.separator, calls.closing)
    )
    quote = re.escape(calls.quote)
    one = rf"{before}[\w.-]+\{{{mark}:{quote}{mark}{quote}\}}{after}"
    return re.sub(rf"{re.escape(calls.opening)}{one}(?:{between}{one})*{last}", mark, text)


def thought_key(message: Mapping[str, Any]) -> str:
    """Return the key of a whole answer with thinking, derived from the message without it."""
    keys = call_keys(message)
    return f"{_NO_TEXT}thought {keys[0] if keys else message.get('content') or ''}"


def find_thought(message: Mapping[str, Any], find: FindAnswer) -> list[int] | None:
    """Return the generated ids of a message including its thinking, or None if not stored."""
    return find(thought_key(message)) if message.get("role") == "assistant" else None


def with_thoughts(
    messages: Sequence[dict[str, Any]],
    reasoning: ReasoningFormat,
    decode: Callable[[list[int]], str],
    find: FindAnswer,
) -> tuple[list[dict[str, Any]], bool]:
    """Add stored thinking to assistant messages that were sent back without it.

    Returns:
        The messages, and whether thinking is stored for at least one of them.
    """
    found = []
    kept = False
    for message in messages:
        ids = find_thought(message, find)
        if ids is not None:
            kept = True
            thought, _, _ = decode(ids).partition(reasoning.end)
            thought = thought.strip().removeprefix(reasoning.start).strip()
            message = {"reasoning_content": thought, **message} if thought else message
        found.append(message)
    return found, kept


def with_arguments(
    messages: Sequence[dict[str, Any]], calls: CallFormat | None
) -> list[dict[str, Any]]:
    """Convert the arguments of calls to the form that the template expects.

    The form is an object or its JSON text. Clients send JSON text. Text that is not a JSON object,
    such as that of a truncated call, is kept, because the stored ids of the call are found by it.
    """
    return _with_calls(messages, calls, _arguments)


def with_objects(
    messages: Sequence[dict[str, Any]], calls: CallFormat | None
) -> list[dict[str, Any]]:
    """Wrap arguments that are not a JSON object in an object, because templates expect one.

    Args:
        messages: messages after `with_arguments`.
        calls: call format of the template.
    """
    return _with_calls(messages, calls, _wrapped)


def object_in(text: str) -> dict[str, Any] | None:
    """Return the JSON object in a text, or None if it is not one or contains a lone surrogate."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def object_text(arguments: Any) -> str:
    """Return arguments as the JSON text of an object, see `with_objects`."""
    return str(_wrapped(_arguments(arguments, True), True))


def _with_calls(
    messages: Sequence[dict[str, Any]],
    calls: CallFormat | None,
    convert: Callable[[Any, bool], Any],
) -> list[dict[str, Any]]:
    as_text = calls is not None and calls.arguments_as_text

    def converted(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        arguments = convert(function["arguments"], as_text)
        return {**call, "function": {**function, "arguments": arguments}}

    return [
        {**message, "tool_calls": [converted(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _arguments(given: Any, as_text: bool) -> Any:
    if as_text:
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    found = object_in(given) if isinstance(given, str) else None
    return given if found is None else found


def _wrapped(given: Any, as_text: bool) -> Any:
    if not isinstance(given, str) or (as_text and object_in(given) is not None):
        return given
    return _arguments({_INVALID: given}, as_text)
