"""Replacement of JSON schema keywords that the grammar compiler does not support.

A keyword is replaced only if other keywords accept exactly the same values:

    if, then, else     becomes `anyOf` if the condition is a `const` or `enum` of one property
    dependentRequired  becomes an `anyOf` for each property
    uniqueItems        becomes an `enum` of all possible lists if the items have few values
    not                of `enum`, `const` or `type` becomes the remaining types and values

Other uses of these keywords are kept, and the compiler rejects them with an error that names them.

`with_short_integers` limits what a model writes, not which values match a schema.
"""

from __future__ import annotations

import itertools
import math
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvboost_edge.text.turns.schema_queries import (
    MOST_DEPTH,
    json_key,
    map_schemas,
    resolved,
    without_needless,
)

__all__ = ["rewritten", "with_short_integers"]

Schema = Mapping[str, Any]
Made = dict[str, Any] | bool

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_REMARKS = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})
_REWRITTEN = frozenset({"if", "then", "else", "not", "uniqueItems", "dependentRequired"})
_COMBINED = ("allOf", "anyOf", "oneOf")
_MOST_UNIQUE = 8  # distinct items of a list with uniqueItems
_MOST_LISTS = 500  # lists in one enum; the compiler takes 0.1 s for 500 and fails for 2,000
_MOST_LISTS_TOGETHER = 1_000  # lists in all enums of a schema
# Characters that the compiler's `[^...]` does not exclude.
_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f]')
# The largest integer of 16 digits that is a double. The compiler would round a larger one up.
_MOST_INTEGER = 10**16 - 2
_LARGE = 1 << 53  # a bound above this one might exclude all integers up to the previous one
_MOST_TEXTS = 1 << 15  # sum of the squared lengths of texts that a schema's patterns exclude


def rewritten(schema: Any) -> Any:
    """Return an equivalent schema with fewer keywords that the compiler lacks or ignores.

    A schema that matches no value is returned without these replacements.
    """
    plain = without_needless(schema)
    if not isinstance(plain, Mapping):
        return plain
    made = _Rewriter(plain).schema(plain, {}, 0)
    return made if isinstance(made, dict) else plain


def with_short_integers(schema: Any) -> Any:
    """Limit integers without bounds to 16 digits, in a schema that `rewritten` has returned.

    Small models sometimes never stop writing digits.

    Each missing bound is added by itself. A schema that contains larger numbers is returned
    unchanged, because a limit could conflict with them.
    """
    return schema if _names_large_number(schema) else _with_short_integers(schema, 0)


def _with_short_integers(given: Any, depth: int) -> Any:
    if not isinstance(given, Mapping) or depth > MOST_DEPTH:
        return given
    change = partial(_with_short_integers, depth=depth + 1)
    made = {
        key: value if key in _REWRITTEN else map_schemas(key, value, change)
        for key, value in given.items()
    }
    types = _listed(given.get("type"))
    if "integer" in types and "number" not in types and not {"enum", "const"} & given.keys():
        if not {"minimum", "exclusiveMinimum"} & given.keys():
            made["minimum"] = -_MOST_INTEGER
        if not {"maximum", "exclusiveMaximum"} & given.keys():
            made["maximum"] = _MOST_INTEGER
    return made


def _names_large_number(schema: Any) -> bool:
    """Return whether a number in a schema is too large for the limit of integers."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (int, float)) and abs(one) > _LARGE:
            return True
        waiting += (
            one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()
        )
    return False


class _Condition(NamedTuple):
    """Condition of an `if`: a property has one of these values.

    Attributes:
        name: name of the property.
        values: values that satisfy the condition.
        is_required: whether the condition is false if the property is missing.
        is_typed: whether the condition is false for values that are not objects.
    """

    name: str
    values: list[Any]
    is_required: bool
    is_typed: bool


class _Rewriter:
    """Rewriter of one schema. References are resolved in the root schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._lists_left = _MOST_LISTS_TOGETHER
        self._texts_left = _MOST_TEXTS

    def schema(self, given: Any, around: Schema, depth: int) -> Any:
        """Rewrite a schema and the schemas in it.

        Args:
            given: schema to rewrite.
            around: properties from enclosing schemas that apply to the same value.
            depth: nesting depth of the schema.
        """
        if not isinstance(given, Mapping) or depth > MOST_DEPTH:
            return given
        members = {**around, **_mapping(given.get("properties"))}
        given, joined = self._conditions(given, members, depth)
        change = partial(self.schema, around={}, depth=depth + 1)
        change_combined = partial(self.schema, around=members, depth=depth + 1)
        made = {
            key: value
            if key in _REWRITTEN  # is replaced below
            else map_schemas(key, value, change_combined if key in _COMBINED else change)
            for key, value in given.items()
        }
        result = self._without_repetition(made)
        if isinstance(result, dict):
            result = self._without_negation(result)
        if isinstance(result, dict):
            result = _with_dependents(result)
        return _also(result, joined) if isinstance(result, dict) else result

    # -- if, then, else --

    def _conditions(
        self, given: Schema, members: Schema, depth: int
    ) -> tuple[Schema, list[dict[str, Any]]]:
        """Separate the conditions that can be rewritten from a schema.

        Conditions are the schema's own `if` and those in its `allOf`.

        Returns:
            The schema without these conditions, and the schemas that replace them.
        """
        listed = given.get("allOf")
        parts = listed if isinstance(listed, list) else []
        own = {key: given[key] for key in ("if", "then", "else") if key in given}
        rest = {key: value for key, value in given.items() if key not in own}
        if own and "if" not in own:  # `then` and `else` have no meaning without `if`
            own = {}
        found = [*([own] if own else []), *filter(_is_condition, parts)]
        by_name: dict[str | None, list[Schema]] = {}
        for one in found:
            known = _condition(one["if"], given)
            by_name.setdefault(None if known is None else known.name, []).append(one)
        left = by_name.pop(None, [])
        joined: list[dict[str, Any]] = []
        for group in by_name.values():
            together = self._combined(given, group, members, depth)
            if together is not None:
                joined.append(together)
                continue
            for one in group:
                alone = self._combined(given, [one], members, depth)
                if alone is None:
                    left.append(one)
                else:
                    joined.append(alone)
        if any(one is own for one in left):
            rest |= own
        if parts:
            kept = [
                one
                for one in parts
                if not any(one is each for each in found) or any(one is each for each in left)
            ]
            rest = (
                {**rest, "allOf": kept} if kept else {k: v for k, v in rest.items() if k != "allOf"}
            )
        return rest, joined

    def _combined(
        self, given: Schema, found: Sequence[Schema], members: Schema, depth: int
    ) -> dict[str, Any] | None:
        """Return conditions on one property as an `anyOf`, or None if that is impossible.

        Each `then` and `else` occurs once, so nested conditions do not multiply.
        """
        known = [one for one in (_condition(each["if"], given) for each in found) if one]
        first = known[0]
        is_object = given.get("type") == "object"
        values = [value for one in known for value in one.values]
        others = self._others(values, members.get(first.name, {}))
        if others is None:
            return None
        if len(found) > 1 and not (
            is_object
            and all(one.is_required for one in known)
            and len(_distinct(values)) == len(values)
            and not any("else" in one for one in found)
        ):
            return None
        fails: dict[str, Any] = {"type": "object", "properties": {first.name: others}}
        if not first.is_required:
            fails["required"] = [first.name]
        if first.is_typed and not is_object:
            fails = {"anyOf": [fails, {"type": [one for one in _TYPES if one != "object"]}]}
        ways = [
            (_holds(condition), one.get("then", True))
            for condition, one in zip(known, found, strict=True)
        ]
        branches = []
        for condition, consequence in [*ways, (fails, found[0].get("else", True))]:
            then = self.schema(consequence, members, depth + 1)
            if then is not False:
                branches.append(condition if then is True else {"allOf": [condition, then]})
        return {"anyOf": branches} if branches else {"enum": []}

    # -- uniqueItems --

    def _without_repetition(self, given: dict[str, Any]) -> Made:
        unique = given.get("uniqueItems")
        if not isinstance(unique, bool) or not _has_sound_type(given):
            return given
        types = _types(given)
        least, most = given.get("minItems", 0), given.get("maxItems", _MOST_UNIQUE)
        rest = {key: value for key, value in given.items() if key != "uniqueItems"}
        if not unique or "array" not in types or most in (0, 1):
            return rest
        if {"enum", "const", "prefixItems", "contains"} & given.keys():
            return given
        values = _distinct(_values(resolved(given.get("items"), self._root)) or [])
        if not 1 <= len(values) <= _MOST_UNIQUE or not _is_count(least) or not _is_count(most):
            return given
        sizes = range(least, min(most, len(values)) + 1)
        count = sum(math.perm(len(values), size) for size in sizes)
        if count > min(_MOST_LISTS, self._lists_left):
            return given
        self._lists_left -= count
        lists = [list(one) for size in sizes for one in itertools.permutations(values, size)]
        rest = {
            key: value
            for key, value in rest.items()
            if key not in ("type", "items", "minItems", "maxItems")
        }
        others = [one for one in types if one != "array"]
        if not lists:
            return {**rest, "type": others} if others else False
        if others:
            return _also(rest, [{"anyOf": [{"enum": lists}, {"type": others}]}])
        return {**rest, "enum": lists}

    # -- not --

    def _without_negation(self, given: dict[str, Any]) -> Made:
        if "not" not in given:
            return given
        refused = given["not"]
        rest = {key: value for key, value in given.items() if key != "not"}
        if refused is False:
            return rest
        keys = _telling(refused)
        if refused is True or (isinstance(refused, Mapping) and not keys):
            return False
        if keys == {"type"}:
            left = _without_types(rest, refused) if _has_sound_type(rest) else None
            return given if left is None else left
        values = _values(refused)
        if values is None or not _has_sound_type(rest):
            return given
        others = self._others(values, rest)
        if others is None:
            return given
        if not isinstance(others, dict):
            return others and rest
        if "enum" in others:
            return {key: value for key, value in rest.items() if key != "const"} | others
        return _also(rest, [others])

    def _others(self, values: Sequence[Any], schema: Any) -> Made | None:
        """Return a schema for all values of `schema` except these, to be combined with `schema`.

        Returns None if this cannot be expressed.
        """
        known = resolved(schema, self._root)
        choices = _choices(known)
        keys = {json_key(value) for value in values}
        if choices is not None:
            left = [value for value in choices if json_key(value) not in keys]
            return {"enum": left} if left else False
        types = _types(known)
        if not any(_has_type(value, type_) for value in values for type_ in types):
            return True
        ways: list[dict[str, Any]] = []
        for type_ in types:
            refused = [value for value in values if _has_type(value, type_)]
            if not refused:
                ways.append({"type": type_})
            elif type_ == "boolean":
                left = [value for value in (True, False) if value not in refused]
                ways += [{"enum": left}] if left else []
            elif type_ in ("integer", "number"):
                ways += _numbers_between(type_, refused)
            elif type_ == "string":
                size = sum(len(text) ** 2 for text in refused)
                if size > self._texts_left or any(map(_ESCAPED.search, refused)):
                    return None
                self._texts_left -= size
                ways.append({"type": "string", "pattern": _other_texts(refused)})
            elif type_ != "null":
                return None
        return ways[0] if len(ways) == 1 else {"anyOf": ways} if ways else False


def _with_dependents(given: dict[str, Any]) -> dict[str, Any]:
    """Rewrite `dependentRequired` as alternatives.

    Either the property is missing, or the properties that depend on it are required.
    """
    needed = given.get("dependentRequired")
    if not isinstance(needed, Mapping) or not all(map(_are_names, needed.values())):
        return given
    rest = {key: value for key, value in given.items() if key != "dependentRequired"}
    choices = [
        {
            "anyOf": [
                {"properties": {name: False}},
                {"properties": dict.fromkeys([name, *names], True), "required": [*names]},
            ]
        }
        for name, names in needed.items()
        if names
    ]
    return _also(rest, choices)


def _also(given: dict[str, Any], schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a schema that additionally requires these schemas."""
    if not schemas:
        return given
    known = given.get("allOf", [])
    if not isinstance(known, list):  # invalid, which the compiler reports
        return given
    return {**given, "allOf": [*known, *schemas]}


# -- conditions --


def _is_condition(part: Any) -> bool:
    """Return whether a schema consists only of a condition."""
    return "if" in _telling(part) and _telling(part) <= {"if", "then", "else"}


def _condition(given: Any, around: Schema) -> _Condition | None:
    """Return the condition of an `if`, or None if it is not of a supported form.

    Args:
        given: value of the keyword `if`.
        around: schema that contains the keyword.
    """
    keys = _telling(given)
    if not isinstance(given, Mapping) or not keys <= {"properties", "required", "type"}:
        return None
    properties = given.get("properties")
    if not isinstance(properties, Mapping) or len(properties) != 1:
        return None
    ((name, schema),) = properties.items()
    values = _values(schema)
    required = given.get("required", [])
    if not values or not _are_names(required) or not {*required} <= {name}:
        return None
    if given.get("type", "object") != "object":
        return None
    always = around.get("required")
    is_there = bool(required) or (
        around.get("type") == "object" and isinstance(always, list) and name in always
    )
    return _Condition(name, _distinct(values), is_there, "type" in given)


def _holds(condition: _Condition) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object"} if condition.is_typed else {}
    made["properties"] = {condition.name: {"enum": condition.values}}
    return {**made, "required": [condition.name]} if condition.is_required else made


# -- values and types --


def _mapping(value: Any) -> Schema:
    return value if isinstance(value, Mapping) else {}


def _telling(schema: Any) -> set[str]:
    """Return the keywords of a schema that restrict values, in contrast to annotations."""
    return {*schema} - _REMARKS if isinstance(schema, Mapping) else set()


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [*value] if _are_names(value) else []


def _types(schema: Schema) -> list[str]:
    """Return the types that a schema allows by name, or all types if it names none."""
    types = _listed(schema.get("type"))
    if not types:
        return [*_TYPES]
    return [one for one in types if one != "integer" or "number" not in types]


def _has_type(value: Any, type_: str) -> bool:
    if isinstance(value, bool) or value is None:
        return type_ == ("null" if value is None else "boolean")
    if isinstance(value, (int, float)):
        return type_ == "number" or (
            type_ == "integer" and (isinstance(value, int) or value.is_integer())
        )
    if isinstance(value, (str, list)):
        return type_ == ("string" if isinstance(value, str) else "array")
    return type_ == "object"


def _values(schema: Any) -> list[Any] | None:
    """Return the values of a schema that only lists values, or None for other schemas."""
    keys = _telling(schema)
    if not keys <= {"enum", "const", "type"} or not _has_sound_type(schema):
        return None
    choices = _choices(schema)
    if choices is None or "type" not in keys:
        return choices
    types = _listed(schema["type"])
    return [one for one in choices if any(_has_type(one, type_) for type_ in types)]


def _choices(schema: Any) -> list[Any] | None:
    """Return values that include all matches of the schema, or None if they are not listed."""
    if not isinstance(schema, Mapping):
        return None
    choices = schema.get("enum")
    if "const" in schema:
        only = schema["const"]
        is_one = not isinstance(choices, list) or json_key(only) in map(json_key, choices)
        return [only] if is_one else []
    if isinstance(choices, list):
        return choices
    types = _listed(schema.get("type"))
    if not types or not {*types} <= {"boolean", "null"}:
        return None
    return [value for value in (True, False, None) if any(_has_type(value, one) for one in types)]


def _has_sound_type(schema: Any) -> bool:
    """Return whether the schema has a valid `type` or no `type`."""
    if not isinstance(schema, Mapping) or "type" not in schema:
        return True
    types = _listed(schema["type"])
    return bool(types) and {*types} <= {*_TYPES, "integer"}


def _distinct(values: Iterable[Any]) -> list[Any]:
    return [*{json_key(value): value for value in values}.values()]


def _without_types(given: dict[str, Any], other: Schema) -> Made | None:
    """Exclude the types of another schema from a schema.

    Returns None if this cannot be expressed.
    """
    if not _has_sound_type(other):
        return None
    refused = _listed(other["type"])
    choices = _choices(given)
    if choices is not None:
        left = [one for one in choices if not any(_has_type(one, type_) for type_ in refused)]
        rest = {key: value for key, value in given.items() if key != "const"}
        return {**rest, "enum": left} if left else False
    types = _types(given)
    if "integer" in refused and "number" in types and "number" not in refused:
        return None
    gone = {*refused, "integer"} if "number" in refused else {*refused}
    kept = [one for one in types if one not in gone]
    return {**given, "type": kept[0] if len(kept) == 1 else kept} if kept else False


def _numbers_between(type_: str, refused: Iterable[float]) -> list[dict[str, Any]]:
    """Return number schemas that together match all numbers except these."""
    ends = [None, *sorted(refused), None]
    found = []
    for low, high in itertools.pairwise(ends):
        one: dict[str, Any] = {"type": type_}
        if low is not None:
            one["exclusiveMinimum"] = low
        if high is not None:
            one["exclusiveMaximum"] = high
        if low is None or high is None or _lies_between(type_, low, high):
            found.append(one)
    return found


def _lies_between(type_: str, low: float, high: float) -> bool:
    return low < high and (type_ == "number" or math.floor(low) + 1 < high)


def _other_texts(refused: Iterable[str]) -> str:
    """Return a regular expression that matches all texts except these.

    Another text differs at some character or ends before one of these.
    """
    words = {*refused}
    begun = {word[:size] for word in words for size in range(len(word) + 1)}
    next_letters: dict[str, list[str]] = {front: [] for front in begun}
    for front in begun:
        if front:
            next_letters[front[:-1]].append(front[-1])
    ways = [_spelt(front) for front in sorted(begun - words)]
    for front in sorted(begun):
        letters = "".join(map(_spelt, sorted(next_letters[front])))
        ways.append(_spelt(front) + (f"[^{letters}]" if letters else "(?s:.)") + "(?s:.*)")
    return f"^(?:{'|'.join(ways)})$"


def _spelt(text: str) -> str:
    """Escape a text for a regular expression or a character class."""
    plain = string.ascii_letters + string.digits
    return "".join(one if one in plain else rf"\x{{{ord(one):x}}}" for one in text)
