"""What an answer has to fit, read and bounded before anybody compiles it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvboost_edge.errors import RequestError

__all__ = ["KINDS", "MOST_BYTES", "Grammar", "read_grammar", "schema_of"]

KINDS = ("json_schema", "regex", "grammar", "choice")
MOST_BYTES = {"json_schema": 1 << 20, "regex": 1 << 16, "grammar": 1 << 20, "choice": 1 << 18}
_MOST_DEPTH = 200
_MOST_CHOICES = 10_000


class Grammar(NamedTuple):
    """What an answer has to fit. kind: "json_schema", "regex", "grammar" (Lark or GBNF) or "choice"; text: of the
    last, as of a schema, JSON."""

    kind: str
    text: str


def read_grammar(given: Mapping[str, Any]) -> Grammar | None:
    """The one of json_schema (a dict or its JSON), regex, grammar and choice that is given; RequestError for two of
    them, and for what is none. Nothing is compiled yet."""
    named = {kind: value for kind, value in given.items() if value is not None}
    if not named:
        return None
    if len(named) > 1:
        first, second = sorted(named)[:2]
        raise RequestError(f"{first}= and {second}= are both given; an answer fits one of them")
    ((kind, value),) = named.items()
    if kind == "json_schema":
        text = _schema_text(value)
    elif kind == "choice":
        text = _choice_text(value)
    elif isinstance(value, str) and value:
        text = value
    else:
        raise RequestError(f"{kind} must be a string with at least one character, not {type(value).__name__}")
    if len(text.encode()) > MOST_BYTES[kind]:
        raise RequestError(f"{kind} has {len(text.encode())} bytes; at most {MOST_BYTES[kind]} are allowed")
    return Grammar(kind, text)


def schema_of(value: object) -> dict[str, Any] | bool:
    """A JSON schema, given as it is or as its JSON; RequestError for what is none."""
    schema = value
    if isinstance(value, str):
        if len(value) > MOST_BYTES["json_schema"]:
            raise RequestError(f"json_schema has {len(value)} bytes; at most {MOST_BYTES['json_schema']} are allowed")
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"json_schema is no JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise RequestError(f"json_schema must be an object, or its JSON, not {type(schema).__name__}")
    if _depth(schema) > _MOST_DEPTH:
        raise RequestError(f"json_schema is nested more than {_MOST_DEPTH} deep")
    return schema


def _schema_text(value: object) -> str:
    schema = schema_of(value)
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json_schema is no JSON: {error}") from None


def _depth(value: object) -> int:
    """How deep objects and lists lie in one another, counted no further than the bound."""
    layer, depth = [value], 0
    while layer and depth <= _MOST_DEPTH:
        depth += 1
        layer = [
            inner
            for one in layer
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return depth


def _choice_text(value: object) -> str:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(f"choice must be a list of strings, not {type(value).__name__}")
    if not 1 <= len(value) <= _MOST_CHOICES:
        raise RequestError(f"choice has {len(value)} entries; 1 to {_MOST_CHOICES} are allowed")
    for one in value:
        if not isinstance(one, str) or not one:
            raise RequestError(f"choice holds {one!r}; each entry must be a string with at least one character")
    return json.dumps(list(value))
