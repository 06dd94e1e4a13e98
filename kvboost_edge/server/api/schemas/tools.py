"""Tools, tool choice and tool calls in OpenAI's format."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, NamedTuple

from pydantic import PlainValidator, WithJsonSchema

from kvboost_edge.server.api.bounds import COUNTS
from kvboost_edge.server.api.schemas.shared import object_schema
from kvboost_edge.server.api.schemas.strict import field_error
from kvboost_edge.text.turns.replay import object_in

__all__ = [
    "NAME_SCHEMA",
    "MessageToolCall",
    "ToolCalls",
    "ToolChoice",
    "ToolChoiceField",
    "Tools",
    "size_of_tools",
]

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
_CHOICES = ("none", "auto", "required")


class ToolChoice(NamedTuple):
    """Tools that the model may call.

    Attributes:
        mode: "none", "auto" or "required".
        names: names of the tools that may be called; None for all.
    """

    mode: str
    names: tuple[str, ...] | None = None


class MessageToolCall(NamedTuple):
    """A tool call in an earlier message.

    Attributes:
        id: id of the call.
        name: name of the function.
        arguments: text that the model wrote: a JSON object, or the part of one that it wrote before
            the answer was truncated.
    """

    id: str
    name: str
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """Convert the call to the format of chat templates, with arguments as an object.

        Text that is not a JSON object is kept.
        """
        found = object_in(self.arguments)
        function = {"name": self.name, "arguments": self.arguments if found is None else found}
        return {"id": self.id, "type": "function", "function": function}


def _name(kind: str, value: Any) -> str:
    length = COUNTS["tool_name"]
    if not isinstance(value, str) or not _NAME.fullmatch(value) or len(value) > length.high:
        raise field_error(
            kind,
            f"a function's name must consist of {length.describe()} letters, digits, '_', '-' or "
            "'.'",
        )
    return value


def _tools(value: Any) -> list[dict[str, Any]]:
    """Convert tools to the format of chat templates."""
    if not isinstance(value, list):
        raise field_error(
            "tools", "must be a list of {'type': 'function', 'function': {'name': …}}"
        )
    if len(value) > COUNTS["tools"].high:
        raise field_error(
            "tools", f"holds {len(value)} entries; at most {COUNTS['tools'].high} are allowed"
        )
    tools = [_tool(one) for one in value]
    names = [tool["function"]["name"] for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise field_error(
            "tools", f"contains the function {twice!r} twice; remove or rename one of them"
        )
    size = size_of_tools(tools)
    if not _is_text(tools):
        raise field_error("tools", "contains a lone surrogate, which is not valid Unicode")
    if size > COUNTS["tools_text"].high:
        raise field_error(
            "tools", f"has {size} characters; at most {COUNTS['tools_text'].high} are allowed"
        )
    return tools


def _tool(value: Any) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise field_error(
            "not_built",
            f"tools of type {kind[:64]!r} are not supported; use type 'function'",
        )
    if kind != "function" or not value.keys() <= {"type", "function"}:
        raise field_error(
            "tools", "each must be {'type': 'function', 'function': {'name': …, 'parameters': …}}"
        )
    function = value.get("function")
    if not isinstance(function, dict) or not function.keys() <= {
        "name",
        "description",
        "parameters",
        "strict",
    }:
        raise field_error(
            "tools", "a function must have a name, and may have description, parameters and strict"
        )
    description = function.get("description")
    parameters = function.get("parameters")
    if not isinstance(description, (str, type(None))):
        raise field_error("tools", "a function's description must be a string")
    if not isinstance(parameters, (dict, type(None))):
        raise field_error("tools", "a function's parameters must be a JSON schema object")
    if "object" not in _types_of(parameters or {}):
        raise field_error("tools", "a function's parameters must be a schema of type 'object'")
    if not isinstance(function.get("strict"), (bool, type(None))):
        raise field_error("tools", "a function's strict must be true or false")
    # `strict` has no effect and is not passed to the model.
    known = {"name": _name("tools", function.get("name")), "description": description or ""}
    return {"type": "function", "function": {**known, "parameters": parameters or _ANY_ARGUMENTS}}


def _types_of(schema: dict[str, Any]) -> list[Any]:
    """Return the types that a JSON schema allows. A schema without a type allows an object."""
    types = schema.get("type", "object")
    return types if isinstance(types, list) else [types]


def _tool_choice(value: Any) -> ToolChoice:
    if isinstance(value, str) and value in _CHOICES:
        return ToolChoice(value)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function" and value.keys() == {"type", "function"}:
        return ToolChoice("required", (_chosen(value),))
    allowed = value.get("allowed_tools", value) if kind == "allowed_tools" else None
    if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list) and allowed["tools"]:
        mode = allowed.get("mode", "auto")
        if mode in ("auto", "required"):
            return ToolChoice(
                mode, tuple(_chosen(tool) for tool in allowed["tools"][: int(COUNTS["tools"].high)])
            )
    raise field_error(
        "tool_choice",
        "must be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': …}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': …, 'tools': […]}}",
    )


def _chosen(value: Any) -> str:
    function = (
        value.get("function")
        if isinstance(value, dict) and value.get("type") == "function"
        else None
    )
    return _name("tool_choice", function.get("name") if isinstance(function, dict) else None)


def _tool_calls(value: Any) -> tuple[MessageToolCall, ...]:
    if not isinstance(value, list) or len(value) > COUNTS["tool_calls"].high:
        raise field_error(
            "tool_calls", f"must be a list of at most {COUNTS['tool_calls'].high} calls"
        )
    return tuple(_called(one) for one in value)


def _called(value: Any) -> MessageToolCall:
    function = (
        value.get("function")
        if isinstance(value, dict) and value.get("type", "function") == "function"
        else None
    )
    if not isinstance(function, dict) or not isinstance(function.get("arguments") or "", str):
        raise field_error(
            "tool_calls",
            "each must be {'id': …, 'type': 'function', 'function': {'name', 'arguments'}}",
        )
    call_id = value.get("id", "")
    arguments = function.get("arguments") or "{}"
    if not isinstance(call_id, str) or len(call_id) > COUNTS["tool_call_id"].high:
        raise field_error(
            "tool_calls",
            f"an id must be a string of at most {COUNTS['tool_call_id'].high} characters",
        )
    if len(arguments) > COUNTS["text"].high:
        raise field_error(
            "tool_calls",
            f"a call's arguments have {len(arguments)} characters; "
            f"at most {COUNTS['text'].high} are allowed",
        )
    if not _is_text(arguments):
        raise field_error(
            "tool_calls", "a call's arguments contain a lone surrogate, which is not valid Unicode"
        )
    return MessageToolCall(call_id, _name("tool_calls", function.get("name")), arguments)


def _is_text(value: Any) -> bool:
    """Return whether all strings in a value are valid Unicode. JSON allows lone surrogates."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def size_of_tools(tools: list[dict[str, Any]] | None) -> int:
    """Return the approximate number of characters that the tools add to a prompt."""
    return len(json.dumps(tools, ensure_ascii=False)) if tools else 0


_FUNCTION = {"const": "function"}
NAME_SCHEMA = {
    "type": "string",
    "pattern": f"^{_NAME.pattern}$",
    "maxLength": COUNTS["tool_name"].high,
}
"""JSON Schema of a function's name."""
_TOOL = object_schema(
    {
        "type": _FUNCTION,
        "function": object_schema(
            {"name": NAME_SCHEMA},
            description={"type": "string"},
            parameters={"type": "object"},
            strict={"type": "boolean"},
        ),
    }
)
_CHOSEN = object_schema({"type": _FUNCTION, "function": object_schema({"name": NAME_SCHEMA})})
_SOME = {"type": "array", "minItems": 1, "items": _CHOSEN}
_ALLOWED = object_schema({"mode": {"enum": ["auto", "required"]}, "tools": _SOME})
_CHOICE = {
    "anyOf": [
        {"enum": list(_CHOICES)},
        _CHOSEN,
        object_schema({"type": {"const": "allowed_tools"}, "allowed_tools": _ALLOWED}),
    ]
}
_CALL = object_schema(
    {"function": object_schema({"name": NAME_SCHEMA}, arguments={"type": "string"})},
    type=_FUNCTION,
    id={"type": "string", "maxLength": COUNTS["tool_call_id"].high},
)


def _list_of(name: str, items: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"type": "array", "maxItems": COUNTS[name].high, "items": items})


Tools = Annotated[list[dict[str, Any]], PlainValidator(_tools), _list_of("tools", _TOOL)]
ToolChoiceField = Annotated[ToolChoice, PlainValidator(_tool_choice), WithJsonSchema(_CHOICE)]
ToolCalls = Annotated[
    tuple[MessageToolCall, ...], PlainValidator(_tool_calls), _list_of("tool_calls", _CALL)
]
