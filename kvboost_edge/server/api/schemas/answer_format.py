"""Fields for structured output, as named by OpenAI, llama.cpp and vLLM.

Each field is converted to one of the engine's options json_schema, regex, grammar and choice. The
engine validates schemas and grammars.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from kvboost_edge.engine.request.requested_grammar import KINDS
from kvboost_edge.server.api.schemas.strict import field_error

__all__ = ["ResponseFormat", "Schema", "Structured", "Text", "Texts", "merged"]

_NAMES = {"json": "json_schema", **{name: name for name in KINDS}}
_ANY_OBJECT = {"type": "object"}


def _response_format(value: Any) -> dict[str, Any]:
    """Convert a response_format to the engine's options."""
    if value is None or value == {"type": "text"}:
        return {}
    kind = value.get("type") if isinstance(value, dict) else None
    # llama.cpp puts the schema next to the type.
    if kind == "json_object" and value.keys() <= {"type", "schema"}:
        return {"json_schema": _object("response_format", value.get("schema", _ANY_OBJECT))}
    inner = (
        value.get("json_schema")
        if kind == "json_schema" and value.keys() == {"type", "json_schema"}
        else None
    )
    if not isinstance(inner, dict) or not inner.keys() <= {
        "name",
        "description",
        "schema",
        "strict",
    }:
        raise field_error(
            "response_format",
            "must be {'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', "
            "'json_schema': {'name': …, 'schema': …}}",
        )
    if not isinstance(inner.get("name", ""), str) or not isinstance(
        inner.get("strict", True), (bool, type(None))
    ):
        raise field_error(
            "response_format", "json_schema.name must be a string and json_schema.strict a boolean"
        )
    return {"json_schema": _object("response_format", inner.get("schema", _ANY_OBJECT))}


def _object(kind: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise field_error(kind, "a JSON schema must be an object")
    return value


def _schema(value: Any) -> dict[str, Any] | str:
    if isinstance(value, str) and value:  # vLLM accepts a schema as text too
        return value
    return _object("json_schema", value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise field_error("grammar", "must be a string")
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise field_error("choice", "must be a list of strings")
    return value


def _structured(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value.keys() <= _NAMES.keys():
        raise field_error(
            "structured_outputs", f"must be an object with one of {', '.join(_NAMES)}"
        )
    return {_NAMES[name]: item for name, item in value.items() if item is not None}


_ANY = {"type": "object"}
ResponseFormat = Annotated[
    dict[str, Any],
    PlainValidator(_response_format),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {
                        "type": {"enum": ["text", "json_object", "json_schema"]},
                        "json_schema": _ANY,
                    },
                    "required": ["type"],
                },
            ]
        }
    ),
]
Schema = Annotated[
    dict[str, Any] | str,
    PlainValidator(_schema),
    WithJsonSchema({"anyOf": [_ANY, {"type": "string", "minLength": 1}]}),
]
Text = Annotated[str, PlainValidator(_text), WithJsonSchema({"type": "string"})]
Texts = Annotated[
    list[str],
    PlainValidator(_texts),
    WithJsonSchema({"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}),
]
Structured = Annotated[dict[str, Any], PlainValidator(_structured), WithJsonSchema(_ANY)]


def merged(fields: dict[str, dict[str, Any]]) -> dict[str, Any] | tuple[str, str]:
    """Return the engine's options of the given fields, or the names of two conflicting fields."""
    found: dict[str, Any] = {}
    first = ""
    for name, keywords in fields.items():
        if keywords and found and keywords != found:
            return first, name
        if keywords and not found:
            found = keywords
            first = name
    return found
