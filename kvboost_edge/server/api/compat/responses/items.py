"""Items of OpenAI's Responses API: messages, tool calls, tool results, reasoning and references.

Only the structure of items is checked here. The translation to chat messages checks how they
relate.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from kvboost_edge.server.api.bounds import COUNTS
from kvboost_edge.server.api.schemas.shared import is_text, object_schema
from kvboost_edge.server.api.schemas.strict import field_error
from kvboost_edge.server.api.schemas.tools import NAME_SCHEMA
from kvboost_edge.server.api.schemas.unsupported_fields import NO_IMAGES

__all__ = ["Items", "new_id", "references", "size_of_items", "text_of"]

Json = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
# Name of the member that holds the text, by type of content part.
_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "summary_text": "text",
}
_SAID = ("input_text", "output_text", "text", "refusal")
_THOUGHT = ("reasoning_text", "text")
# Members of a content part that the model does not see.
_BESIDE = {"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"}


def new_id(prefix: str) -> str:
    """Generate an id for an item or a response."""
    return f"{prefix}_{secrets.token_hex(24)}"


def text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    """Join the texts of validated content parts."""
    return "\n".join(part[_PARTS[part["type"]]] for part in parts)


def size_of_items(items: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of characters in the texts of all items."""
    parts = sum(len(text_of(item.get("content") or item.get("summary") or ())) for item in items)
    return parts + sum(
        len(item.get("arguments", "")) + len(item.get("output", "")) for item in items
    )


def references(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the ids of the stored items that validated items refer to."""
    return [item["id"] for item in items if item["type"] == "item_reference"]


def _items(value: Any) -> list[Json]:
    """Convert a text or a list of items to complete items with id and type.

    The content of a message becomes a list of parts.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    count = COUNTS["messages"]
    if not isinstance(value, list) or not count.low <= len(value) <= count.high:
        raise field_error("items", f"must be a string, or a list of {count.describe()} items")
    items = [_item(item, number) for number, item in enumerate(value)]
    named = Counter(references(items))
    if twice := next((name for name in named if named[name] > 1), None):
        raise field_error(
            "items", f"refers to the item {twice[:64]!r} twice; remove one of the references"
        )
    return items


def _item(value: Any, number: int) -> Json:
    where = f"item {number}"
    if not isinstance(value, dict):
        raise field_error("items", f"{where} must be an object")
    kind = value.get("type")
    if kind is None:
        kind = "item_reference" if "id" in value and value.keys() <= {"id", "type"} else "message"
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise field_error("not_built", f"{where} has an unsupported type; supported: {known}")
    allowed, read = _KINDS[kind]
    given = {name: item for name, item in value.items() if item is not None}
    if unknown := next(
        (name for name in given if name not in allowed | {"type", "id", "status"}), None
    ):
        raise field_error(
            "items",
            f"{where}, of type {kind!r}, has the unknown member {unknown[:64]!r}",
        )
    for name in ("id", "status"):
        _text(given.get(name, "-"), f"{where}: {name}", "tool_call_id")
    return read(given, where)


def _message(item: Json, where: str) -> Json:
    role = item.get("role")
    content = item.get("content")
    if role not in _ROLES:
        raise field_error(
            "items", f"{where}: the role of a message must be one of {', '.join(_ROLES)}"
        )
    if isinstance(content, str):
        content = [
            {"type": "output_text" if role == "assistant" else "input_text", "text": content}
        ]
    parts = _parts(content, where, _SAID)
    whole = {
        "id": item.get("id") or new_id("msg"),
        "type": "message",
        "status": "completed",
        "role": role,
    }
    return {**whole, "content": parts}


def _call(item: Json, where: str) -> Json:
    whole = {"id": item.get("id") or new_id("fc"), "type": "function_call", "status": "completed"}
    whole["call_id"] = _text(item.get("call_id"), f"{where}: call_id", "tool_call_id")
    if item.get("namespace") is not None:
        whole["namespace"] = _text(item["namespace"], f"{where}: namespace", "tool_name")
    whole["name"] = _text(item.get("name"), f"{where}: name", "tool_name")
    return {
        **whole,
        "arguments": _text(item.get("arguments"), f"{where}: arguments", "text", empty=True),
    }


def _result(item: Json, where: str) -> Json:
    output = item.get("output")
    if isinstance(output, list):
        output = text_of(_parts(output, where, _SAID)) if output else ""
    whole = {
        "id": item.get("id") or new_id("fco"),
        "type": "function_call_output",
        "status": "completed",
    }
    whole["call_id"] = _text(item.get("call_id"), f"{where}: call_id", "tool_call_id")
    return {**whole, "output": _text(output, f"{where}: output", "text", empty=True)}


def _reasoning(item: Json, where: str) -> Json:
    if item.get("encrypted_content"):
        raise field_error(
            "not_built", f"{where}: encrypted_content was written by another server; leave it out"
        )
    summary = item.get("summary", [])
    content = item.get("content", [])
    whole = {"id": item.get("id") or new_id("rs"), "type": "reasoning", "status": "completed"}
    parts = {"summary": _parts(summary, where, ("summary_text",), least=0)}
    return {**whole, **parts, "content": _parts(content, where, _THOUGHT, least=0)}


def _reference(item: Json, where: str) -> Json:
    name = _text(item.get("id"), f"{where}: id", "tool_call_id")
    return {"id": name, "type": "item_reference"}


def _parts(value: Any, where: str, kinds: Sequence[str], least: int = 1) -> list[Json]:
    most = int(COUNTS["parts"].high)
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise field_error(
            "items", f"{where}: the content must be a string or a list of {least}..{most} parts"
        )
    return [_part(part, where, kinds) for part in value]


def _part(part: Any, where: str, kinds: Sequence[str]) -> Json:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_image":
        raise field_error("not_built", f"{where}: {NO_IMAGES}")
    if isinstance(kind, str) and kind not in kinds:
        message = (
            f"{where}: parts of type {kind[:64]!r} are not supported; supported: {', '.join(kinds)}"
        )
        raise field_error("not_built", message)
    if not isinstance(kind, str) or not part.keys() <= {"type", _PARTS[kind]} | _BESIDE:
        raise field_error(
            "items", f"{where}: each part must be {{'type': {kinds[0]!r}, 'text': string}}"
        )
    name = _PARTS[kind]
    return {
        "type": kind,
        name: _text(part.get(name), f"{where}: the {name} of a part", "text", empty=True),
    }


def _text(value: Any, what: str, count: str, *, empty: bool = False) -> str:
    most = int(COUNTS[count].high)
    if not is_text(value) or len(value) > most or not (value or empty):
        raise field_error(
            "items", f"{what} must be a string of {0 if empty else 1}..{most} characters"
        )
    return str(value)


_KINDS: Mapping[str, tuple[set[str], Callable[[Json, str], Json]]] = {
    "message": ({"role", "content", "phase"}, _message),
    "function_call": ({"call_id", "name", "namespace", "arguments"}, _call),
    "function_call_output": ({"call_id", "output"}, _result),
    "reasoning": ({"summary", "content", "encrypted_content"}, _reasoning),
    "item_reference": (set(), _reference),
}


def _length(name: str, least: int = 1) -> Json:
    return {"type": "string", "minLength": least, "maxLength": int(COUNTS[name].high)}


def _list_of_parts(kinds: Sequence[str], least: int = 1) -> Json:
    hint = {"prompt_cache_breakpoint": {"type": "object"}}
    parts = [
        object_schema(
            {"type": {"const": kind}, _PARTS[kind]: _length("text", 0)},
            **(hint if kind == "input_text" else {}),
        )
        for kind in kinds
    ]
    return {
        "type": "array",
        "minItems": least,
        "maxItems": int(COUNTS["parts"].high),
        "items": {"anyOf": parts},
    }


_TEXT = _length("text", 0)
_COMMON = {
    "id": _length("tool_call_id"),
    "status": {"enum": ["in_progress", "completed", "incomplete"]},
}
_CALL_ID = {"call_id": _length("tool_call_id")}
_SCHEMAS = [
    object_schema(
        {"role": {"enum": list(_ROLES)}, "content": {"anyOf": [_TEXT, _list_of_parts(_SAID)]}},
        type={"const": "message"},
        **_COMMON,
    ),
    object_schema(
        {"type": {"const": "function_call"}, **_CALL_ID, "name": NAME_SCHEMA, "arguments": _TEXT},
        namespace=NAME_SCHEMA,
        **_COMMON,
    ),
    object_schema(
        {
            "type": {"const": "function_call_output"},
            **_CALL_ID,
            "output": {"anyOf": [_TEXT, _list_of_parts(_SAID)]},
        },
        **_COMMON,
    ),
    object_schema(
        {"type": {"const": "reasoning"}, "summary": _list_of_parts(("summary_text",), 0)},
        content=_list_of_parts(_THOUGHT, 0),
        **_COMMON,
    ),
    object_schema({"id": _length("tool_call_id")}, type={"const": "item_reference"}),
]
_LIST = {
    "type": "array",
    "minItems": 1,
    "maxItems": int(COUNTS["messages"].high),
    "items": {"anyOf": _SCHEMAS},
}
Items = Annotated[list[Json], PlainValidator(_items), WithJsonSchema({"anyOf": [_TEXT, _LIST]})]
