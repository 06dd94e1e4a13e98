"""Tools, tool choice and text format of the Responses API.

In the chat API, the same objects have another level of nesting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from kvboost_edge.server.api.bounds import COUNTS
from kvboost_edge.server.api.schemas.shared import object_schema
from kvboost_edge.server.api.schemas.strict import field_error
from kvboost_edge.server.api.schemas.tools import NAME_SCHEMA

__all__ = [
    "ChoiceField",
    "TextForm",
    "ToolList",
    "as_chosen",
    "as_format",
    "as_tool",
    "full_name",
    "names_of",
]

Json = dict[str, Any]

_FUNCTION = {"type", "name", "description", "parameters", "strict"}


def full_name(namespace: str | None, name: str) -> str:
    """Return the name of a function as shown to the model, with its namespace."""
    return f"{namespace}.{name}" if namespace else name


def as_tool(tool: Json) -> Json:
    """Convert a tool to the chat API's format."""
    function = {
        name: tool[name]
        for name in ("description", "parameters", "strict")
        if tool.get(name) is not None
    }
    name = (
        full_name(tool.get("namespace"), tool["name"])
        if isinstance(tool.get("name"), str)
        else tool.get("name")
    )
    return {"type": "function", "function": {"name": name, **function}}


def names_of(tools: Sequence[Json]) -> dict[str, Json]:
    """Map each function name shown to the model to the members of a call that identify it."""
    spaces = [{"namespace": tool["namespace"]} if "namespace" in tool else {} for tool in tools]
    return {
        full_name(tool.get("namespace"), tool["name"]): {**space, "name": tool["name"]}
        for tool, space in zip(tools, spaces, strict=True)
    }


def as_chosen(choice: Any) -> Any:
    """Convert a tool choice to the chat API's format."""
    if isinstance(choice, str):
        return choice
    if choice["type"] == "function":
        return {"type": "function", "function": {"name": choice["name"]}}
    tools = [{"type": "function", "function": {"name": tool["name"]}} for tool in choice["tools"]]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": tools}}


def as_format(text: Json) -> Json | None:
    """Convert a text format to the chat API's response_format; return None for any text."""
    form = text.get("format") or {"type": "text"}
    if form["type"] != "json_schema":
        return None if form["type"] == "text" else form
    return {
        "type": "json_schema",
        "json_schema": {name: item for name, item in form.items() if name != "type"},
    }


def _tools(value: Any) -> list[Json]:
    if not isinstance(value, list):
        raise field_error(
            "tools", "must be a list of {'type': 'function', 'name': …, 'parameters': …}"
        )
    found: list[Json] = []
    for tool in value:
        found += _tools_of(tool)
    if len(found) > COUNTS["tools"].high:
        raise field_error(
            "tools", f"holds {len(found)} functions; at most {COUNTS['tools'].high} are allowed"
        )
    return found


def _tools_of(tool: Any) -> list[Json]:
    """Return the function of a tool, or all functions of a namespace."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind not in ("function", "namespace"):
        raise field_error(
            "not_built",
            f"tools of type {kind[:64]!r} are not supported; use type 'function'",
        )
    if kind == "function":
        return [_function(tool)]
    if kind != "namespace" or not tool.keys() <= {"type", "name", "description", "tools"}:
        raise field_error("tools", "each must be {'type': 'function', 'name': …, 'parameters': …}")
    inner = tool.get("tools")
    name = tool.get("name")
    if not isinstance(name, str) or not name or not isinstance(inner, list) or not inner:
        raise field_error("tools", "a namespace must have a name and a list of tools")
    if any(not isinstance(one, dict) or one.get("type") != "function" for one in inner):
        raise field_error("tools", "a namespace may only hold tools of type 'function'")
    return [{**_function(one), "namespace": name} for one in inner]


def _function(tool: Json) -> Json:
    if not tool.keys() <= _FUNCTION or not isinstance(tool.get("name"), str):
        raise field_error(
            "tools", "a function must have a name, and may have description, parameters and strict"
        )
    whole = {"description": None, "parameters": None, "strict": None}
    return {"type": "function", "name": tool["name"], **whole, **tool}


def _choice(value: Any) -> Any:
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function" and value.keys() == {"type", "name"}:
        return value
    if (
        kind == "allowed_tools"
        and value.keys() == {"type", "mode", "tools"}
        and isinstance(value["tools"], list)
    ):
        tools = value["tools"]
        if all(
            isinstance(one, dict) and one.get("type") == "function" and one.keys() == _NAMED
            for one in tools
        ):
            return value
    raise field_error(
        "tool_choice",
        "must be 'none', 'auto', 'required', {'type': 'function', 'name': …} or {'type': "
        "'allowed_tools', 'mode': …, 'tools': […]}",
    )


def _text(value: Any) -> Json:
    if not isinstance(value, dict) or not value.keys() <= {"format", "verbosity"}:
        raise field_error("text", "must be an object with a format")
    if value.get("verbosity") not in (None, "medium"):
        raise field_error(
            "not_built",
            "text.verbosity other than 'medium' is not supported; ask for it in the prompt",
        )
    form: Any = value.get("format")
    kind = form.get("type") if isinstance(form, dict) else None
    plain = form is None or (kind in ("text", "json_object") and form.keys() == {"type"})
    if not plain and (kind != "json_schema" or not isinstance(form.get("schema"), dict)):
        raise field_error(
            "text",
            "format must be {'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', "
            "'name': …, 'schema': …}",
        )
    return {"format": form or {"type": "text"}}


_NAMED = {"type", "name"}
_FUNCTION_TYPE = {"const": "function"}
_BY_NAME = object_schema({"type": _FUNCTION_TYPE, "name": NAME_SCHEMA})
_TOOL = object_schema(
    {"type": _FUNCTION_TYPE, "name": NAME_SCHEMA},
    description={"type": ["string", "null"]},
    parameters={"type": ["object", "null"]},
    strict={"type": ["boolean", "null"]},
)
_SPACE = object_schema(
    {
        "type": {"const": "namespace"},
        "name": NAME_SCHEMA,
        "tools": {"type": "array", "minItems": 1, "items": _TOOL},
    },
    description={"type": "string"},
)
_ALLOWED = object_schema(
    {
        "type": {"const": "allowed_tools"},
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "minItems": 1, "items": _BY_NAME},
    }
)
_FORMS = {
    "anyOf": [
        object_schema({"type": {"enum": ["text", "json_object"]}}),
        object_schema(
            {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
            name={"type": "string"},
            description={"type": "string"},
            strict={"type": ["boolean", "null"]},
        ),
        {"type": "null"},
    ]
}

ToolList = Annotated[
    list[Json],
    PlainValidator(_tools),
    WithJsonSchema(
        {
            "type": "array",
            "maxItems": int(COUNTS["tools"].high),
            "items": {"anyOf": [_TOOL, _SPACE]},
        }
    ),
]
ChoiceField = Annotated[
    Any,
    PlainValidator(_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _BY_NAME, _ALLOWED]}),
]
TextForm = Annotated[
    Json,
    PlainValidator(_text),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"format": _FORMS, "verbosity": {"enum": ["medium", None]}},
            "additionalProperties": False,
        }
    ),
]
