"""What a schema tells about values that are written between tags: as they are, or as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["ValueKind", "members_of", "resolved", "value_kind"]

ValueKind = Literal["string", "json", "either"]

Schema = Mapping[str, Any]
_MOST_REFERENCES = 16
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def value_kind(schema: object, root: Schema) -> ValueKind:
    """Whether a value of a schema is always a string, never one, or either. References are into `root`."""
    types = _types(schema, root)
    if types == {"string"}:
        return "string"
    return "json" if types and "string" not in types else "either"


def members_of(root: Schema) -> tuple[dict[str, Any], set[str]]:
    """The schemas of an object's members in order, those that are only required behind them, and the required names."""
    schema = resolved(root, root)
    properties = schema.get("properties")
    required = schema.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    members = dict(properties) if isinstance(properties, Mapping) else {}
    return {**members, **{name: {} for name in names if name not in members}}, set(names)


def resolved(schema: object, root: Schema) -> Schema:
    """A schema, or what it refers to in `root`; nothing for what is no schema."""
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
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _types(schema: object, root: Schema, depth: int = 0) -> set[str]:
    """The types a value may have; empty: any."""
    found = resolved(schema, root)
    if "const" in found or isinstance(found.get("enum"), list):
        values = [found["const"]] if "const" in found else found["enum"]
        return {_NAMES.get(type(value), "null") for value in values}
    types = found.get("type")
    if isinstance(types, (str, list)):
        return {types} if isinstance(types, str) else {str(one) for one in types}
    branches = found.get("anyOf", found.get("oneOf"))
    if not isinstance(branches, list) or depth == _MOST_REFERENCES:
        return set()
    parts = [_types(branch, root, depth + 1) for branch in branches]
    return set().union(*parts) if all(parts) else set()
