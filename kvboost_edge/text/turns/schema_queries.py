"""Queries on JSON schemas: value kinds, types, members, references and redundant keywords."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

__all__ = [
    "MOST_DEPTH",
    "ValueKind",
    "in_order",
    "is_circular",
    "json_key",
    "map_schemas",
    "members_of",
    "resolved",
    "types_of",
    "value_kind",
    "without_needless",
]

ValueKind = Literal["string", "json", "either"]

Schema = Mapping[str, Any]
_MOST_REFERENCES = 16
MOST_DEPTH = 128  # the compiler's own limit
_INDEX = re.compile("0|[1-9][0-9]{0,6}")
_ANY_NAME: tuple[Any, ...] = ({"type": "string"}, {}, True)
_SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_VALUES = frozenset({"const", "enum", "default", "examples", "required"})
_NAMES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def value_kind(schema: object, root: Schema) -> ValueKind:
    """Return whether a schema's values are strings, other JSON values, or either.

    Args:
        schema: schema of the value.
        root: schema in which references are resolved.
    """
    types = types_of(schema, root)
    if types == {"string"}:
        return "string"
    return "json" if types and "string" not in types else "either"


def members_of(root: Schema) -> tuple[dict[str, Any], set[str]]:
    """Return the members of an object schema.

    Returns:
        The schemas of members by name, with members that are only required last, and the names of
            required members.
    """
    schema = resolved(root, root)
    properties = schema.get("properties")
    required = schema.get("required")
    names = (
        [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    )
    members = dict(properties) if isinstance(properties, Mapping) else {}
    return {**members, **{name: {} for name in names if name not in members}}, set(names)


def json_key(value: Any) -> Any:
    """Return a key that is shared by equal JSON values: 1 equals 1.0, but not true."""
    if isinstance(value, list):
        return ("list", *map(json_key, value))
    if isinstance(value, Mapping):
        return ("object", frozenset((name, json_key(one)) for name, one in value.items()))
    return (isinstance(value, bool), value)


def in_order(value: Any, schema: object, root: Schema) -> Any:
    """Sort the members of objects in a JSON value in the order of the schema's grammar.

    Members that the schema does not name come last. A value that equals a constant of the schema
    becomes that constant.
    """
    choices = [choice for one in _joined(schema, root) for choice in _choices(one)]
    if choices:
        own = json_key(value)
        for choice in choices:
            if json_key(choice) == own:
                return choice
    if isinstance(value, list):
        items = resolved(schema, root).get("items", {})
        return [in_order(one, items, root) for one in value]
    if not isinstance(value, dict):
        return value
    members: dict[str, Any] = {}
    required: list[str] = []
    for one in _joined(schema, root):
        found, names = members_of(one)
        properties = one.get("properties")
        for name in properties if isinstance(properties, Mapping) else ():
            members.setdefault(name, found[name])
        required += [name for name in found if name in names]
    for name in [*required, *value]:
        members.setdefault(name, {})
    return {
        name: in_order(value[name], one, root) for name, one in members.items() if name in value
    }


def _choices(schema: Schema) -> list[Any]:
    """Return the values that `const` and `enum` name."""
    enum = schema.get("enum")
    found = [schema["const"]] if "const" in schema else []
    return found + (enum if isinstance(enum, list) else [])


def _joined(schema: object, root: Schema, depth: int = 0) -> Iterator[Schema]:
    """Yield a schema and, recursively, the schemas in its allOf, anyOf and oneOf."""
    one = resolved(schema, root)
    yield one
    for keyword in ("allOf", "anyOf", "oneOf") if depth < _MOST_REFERENCES else ():
        branches = one.get(keyword)
        for branch in branches if isinstance(branches, list) else ():
            yield from _joined(branch, root, depth + 1)


def map_schemas(keyword: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to each schema in the value of a keyword."""
    if keyword in _VALUES:
        return value
    if keyword in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
        return {name: change(one) for name, one in value.items()}
    return [change(one) for one in value] if isinstance(value, list) else change(value)


def without_needless(schema: Any, depth: int = 0) -> Any:
    """Remove each `propertyNames` that only requires names to be strings.

    zod writes it for every record, and the grammar compiler does not support the keyword. Parts
    that are nested too deep for the compiler are kept.
    """
    if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
        return schema
    change = partial(without_needless, depth=depth + 1)
    return {
        key: map_schemas(key, value, change)
        for key, value in schema.items()
        if key != "propertyNames" or value not in _ANY_NAME
    }


def resolved(schema: object, root: Schema) -> Schema:
    """Follow the references of a schema within `root`; return {} if this gives no schema."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = _pointed(root, reference)
    return {}


def _pointed(root: object, reference: str) -> object:
    value = root
    for part in reference.removeprefix("#").strip("/").split("/") if len(reference) > 1 else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            is_index = _INDEX.fullmatch(name) is not None and int(name) < len(value)
            value = value[int(name)] if is_index else None
        else:
            value = value.get(name) if isinstance(value, Mapping) else None
    return value


def types_of(schema: object, root: Schema) -> set[str]:
    """Return the types that a value may have. An empty set means any type.

    Each schema is visited once, so reference cycles end.
    """
    found: set[str] = set()
    waiting = [schema]
    seen = set[int]()
    while waiting:
        one = resolved(waiting.pop(), root)
        if id(one) in seen:
            continue
        seen.add(id(one))
        types = _own_types(one)
        branches = one.get("anyOf", one.get("oneOf"))
        if types:
            found |= types
        elif isinstance(branches, list) and branches:
            waiting += branches
        else:
            return set()
    return found


def is_circular(root: object) -> bool:
    """Return whether a schema only refers to itself, in which case no value matches it."""
    waiting = [root]
    seen = set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        others = _stands_for(one, root)
        if not others:
            return False
        waiting += others
    return True


def _stands_for(schema: object, root: object) -> list[object]:
    """Return the schemas that this schema delegates to by `$ref` or as alternatives.

    The list is empty if the schema itself restricts the value.
    """
    if not isinstance(schema, Mapping):
        return []
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        return [_pointed(root, reference)]
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        if isinstance(branches, list):
            return branches
    return []


def _own_types(schema: Schema) -> set[str]:
    """Return the types that a schema itself specifies."""
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return {_NAMES.get(type(value), "null") for value in values}
    types = schema.get("type")
    if isinstance(types, list):
        return {str(one) for one in types}
    return {types} if isinstance(types, str) else set()
