"""Grammars of requests for structured output, which are read and limited before compilation.

The limits cover sizes that the compiler does not limit: recursion depth, states for numbers, and
literal text.
"""

from __future__ import annotations

import contextlib
import decimal
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvboost_edge.errors import RequestError
from kvboost_edge.text.turns.schema_queries import is_circular
from kvboost_edge.text.turns.schema_rewrite import rewritten

__all__ = [
    "KINDS",
    "MOST_BYTES",
    "Grammar",
    "MadeGrammar",
    "read_grammar",
    "schema_of",
    "schemas_in",
]

KINDS = ("json_schema", "regex", "grammar", "choice")
MOST_BYTES = {"json_schema": 1 << 20, "regex": 1 << 16, "grammar": 1 << 18, "choice": 1 << 17}
_MOST_MADE = 1 << 22
_MOST_DEPTH = 120  # the compiler's limit is 128
_MOST_CHOICES = 10_000
_MOST_OBJECTS = 8_000  # a chain of $ref through all objects takes 64 MB of the compiler's stack
# Characters in names and values. Forced text is tokenized at once, which takes 3 ms per 10,000.
_MOST_TEXT = 1 << 17
_MOST_MULTIPLE = 10_000  # each needs a compiler state; a million states take seven seconds
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
_EXACT = 1 << 53  # doubles represent all integers up to this one
_CLIP = (1 << 63) - 1
_HUGE = 1 << 1000  # larger integers do not fit into a double
_MOST_LINES = 1_000  # a chain of rules through all lines takes 3 MB of stack
_SCHEMA_MARK = re.compile(r"%json\s*")
_REMARKS = frozenset({"description", "title", "$comment", "default", "examples"})


class MadeGrammar(str):
    """A grammar that this package generated around callers' schemas.

    Only the schemas in it are checked against the limits, because its rules are not nested deeply.
    """


class Grammar(NamedTuple):
    """A grammar that an answer must match.

    Attributes:
        kind: "json_schema", "regex", "grammar" (Lark or GBNF) or "choice".
        text: text of the grammar, which is JSON for a schema or a choice.
    """

    kind: str
    text: str


def read_grammar(given: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of a request without compiling it, or None if none is given.

    Args:
        given: values of json_schema (a dict or JSON text), regex, grammar and choice.

    Raises:
        RequestError: more than one is given, or the grammar is invalid or too large.
    """
    named = {kind: value for kind, value in given.items() if value is not None}
    if not named:
        return None
    if len(named) > 1:
        first, second = sorted(named)[:2]
        raise RequestError(f"{first}= and {second}= are both given; give only one of them")
    ((kind, value),) = named.items()
    if kind == "json_schema":
        text = _schema_text(value)
    elif kind == "choice":
        text = _choice_text(value)
    elif isinstance(value, str) and value:
        text = value
    else:
        raise RequestError(
            f"{kind} must be a string with at least one character, not {type(value).__name__}"
        )
    most = _MOST_MADE if isinstance(value, MadeGrammar) else MOST_BYTES[kind]
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{kind} contains the lone surrogate {text[error.start]!a} at position "
            f"{error.start}; remove it"
        ) from None
    if num_bytes > most:
        raise RequestError(f"{kind} has {num_bytes} bytes; at most {most} are allowed")
    if kind == "grammar":
        _check_grammar(text)
    return Grammar(kind, text)


def _check_grammar(text: str) -> None:
    """Check the number of rules in a grammar and the schemas after %json.

    Each rule takes one line. The compiler rejects text after %json that is not JSON.

    Raises:
        RequestError: there are too many rules, or a schema is invalid.
    """
    num_lines = len(text.splitlines())
    if num_lines > _MOST_LINES and not isinstance(text, MadeGrammar):
        raise RequestError(f"grammar has {num_lines} lines; at most {_MOST_LINES} are allowed")
    for schema in schemas_in(text):
        _check_schema(schema)


def schemas_in(grammar: str) -> Iterator[Any]:
    """Yield the schemas after %json in a Lark grammar that are valid JSON."""
    # Decode each schema from its start, because its strings may contain another %json.
    for mark in _SCHEMA_MARK.finditer(grammar):
        with contextlib.suppress(ValueError, RecursionError):
            yield json.JSONDecoder().raw_decode(grammar, mark.end())[0]


def schema_of(value: object) -> dict[str, Any] | bool:
    """Return a JSON schema given as a value or as JSON text.

    Raises:
        RequestError: the value is not a schema, is too large, or allows no value.
    """
    schema = value
    if isinstance(value, str):
        if len(value) > MOST_BYTES["json_schema"]:
            raise RequestError(
                f"json_schema has {len(value)} bytes; at most {MOST_BYTES['json_schema']} are "
                "allowed"
            )
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"json_schema is not valid JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise RequestError(
            f"json_schema must be an object or its JSON text, not {type(schema).__name__}"
        )
    _check_schema(schema)
    return schema


def _schema_text(value: object) -> str:
    schema = schema_of(value)
    try:
        made = rewritten(schema)
        text = json.dumps(made, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json_schema is not valid JSON: {error}") from None
    _check_size(made)
    return text


def _check_schema(schema: object) -> None:
    """Check that a schema is not too large and allows a value.

    Raises:
        RequestError: the schema is too large or allows no value.
    """
    _check_size(schema)
    if is_circular(schema):
        raise RequestError(
            "json_schema matches no value, because its $ref refers to itself; add an alternative "
            "without it"
        )


def _check_size(schema: object) -> None:
    """Check a schema's nesting depth and number of members.

    Raises:
        RequestError: the schema exceeds a limit.
    """
    layer = [schema]
    depth = 0
    num_objects = 0
    num_chars = 0
    while layer:
        depth += 1
        if depth > _MOST_DEPTH:
            raise RequestError(
                f"json_schema is nested more than {_MOST_DEPTH} levels deep; flatten it"
            )
        objects = [value for value in layer if isinstance(value, dict)]
        num_objects += len(objects)
        num_chars += sum(len(value) for value in layer if isinstance(value, str))
        num_chars += sum(len(str(name)) for each in objects for name in each)
        for each in objects:
            _check_multiple(each.get("multipleOf"))
            _check_bounds(each)
        layer = [inner for value in layer for inner in _inside(value)]
    if num_objects > _MOST_OBJECTS:
        raise RequestError(
            f"json_schema has {num_objects} objects; at most {_MOST_OBJECTS} are allowed"
        )
    if num_chars > _MOST_TEXT:
        raise RequestError(
            f"json_schema has {num_chars} characters in names and values; at most {_MOST_TEXT} "
            "are allowed"
        )


def _inside(value: object) -> list[object]:
    """Return the members of an object or a list, without descriptions."""
    if isinstance(value, dict):
        return [
            inner
            for name, inner in value.items()
            if not (name in _REMARKS and isinstance(inner, str))
        ]
    return value if isinstance(value, list) else []


def _check_multiple(value: object) -> None:
    """Check the digits of a `multipleOf` value.

    Raises:
        RequestError: the number formed by its digits exceeds the limit.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return
    _, digits, exponent = decimal.Decimal(str(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    if decimal.Decimal((0, digits, max(0, exponent))) > _MOST_MULTIPLE:
        raise RequestError(
            f"json_schema has multipleOf {value}; without its decimal point, it must be at most "
            f"{_MOST_MULTIPLE}"
        )


def _check_bounds(schema: Mapping[Any, Any]) -> None:
    """Check the bounds of an integer, which the compiler rounds to a double and clips to 64 bits.

    Raises:
        RequestError: a rounded bound would allow integers that the schema excludes.
    """
    for key, sign in _BOUNDS.items():
        value = schema.get(key)
        if not isinstance(value, int) or abs(value) <= _EXACT:
            continue
        rounded = int(float(max(-_HUGE, min(value, _HUGE))))
        rounded = max(-_CLIP - 1, min(rounded, _CLIP))
        if sign * rounded > sign * value:
            raise RequestError(
                f"json_schema has {key} {value}, which the compiler would round to {rounded}; "
                f"use a bound of at most {_EXACT} in magnitude"
            )


def _choice_text(value: object) -> str:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(f"choice must be a list of strings, not {type(value).__name__}")
    if not 1 <= len(value) <= _MOST_CHOICES:
        raise RequestError(f"choice has {len(value)} entries; 1 to {_MOST_CHOICES} are allowed")
    for one in value:
        if not isinstance(one, str) or not one:
            raise RequestError(
                f"choice holds {one!r}; each entry must be a string with at least one character"
            )
    return json.dumps(list(value))
