"""Reader and grammar of Gemma's call arguments: quoted strings, and all other values bare."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

from kvboost_edge.errors import RequestError
from kvboost_edge.text.turns.formats import Tool
from kvboost_edge.text.turns.lark import Atom, Lark, Rule, escaped
from kvboost_edge.text.turns.python_literals import LONGEST, bare, named, string_inside
from kvboost_edge.text.turns.scanner import Scanner, Step
from kvboost_edge.text.turns.schema_queries import (
    json_key,
    members_of,
    resolved,
    types_of,
    without_needless,
)

__all__ = ["BracedArguments", "BracedGrammar", "is_braced_key"]

_KEY = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"
_TYPES = ("string", "number", "boolean", "null", "array", "object")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_LISTS = ("minItems", "maxItems")
_OF_PARTS = ("properties", "required", "additionalProperties", "items")
_BRANCHES = ("anyOf", "oneOf", "allOf")
# Schema keywords that the grammar does not enforce, except annotations and string keywords.
_NOT_HELD = frozenset(
    {
        *(
            "not",
            "if",
            "then",
            "else",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
        ),
        *(
            "uniqueItems",
            "contains",
            "minContains",
            "maxContains",
            "prefixItems",
            "additionalItems",
        ),
        *(
            "dependencies",
            "dependentRequired",
            "dependentSchemas",
            "unevaluatedProperties",
            "unevaluatedItems",
        ),
        *("$dynamicRef", "$recursiveRef"),
    }
)
_SHAPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("properties", "$defs", "definitions"), (Mapping,)),
    **dict.fromkeys(("required", "enum", "anyOf", "oneOf", "allOf"), (list,)),
    **dict.fromkeys(("items", "additionalProperties"), (Mapping, bool)),
    **dict.fromkeys(("minItems", "maxItems"), (int,)),
    "type": (str, list),
    "$ref": (str,),
}
_BESIDE_BRANCHES = frozenset({"type", *_OF_PARTS, *_OF_LISTS, *_OF_NUMBERS})
_BESIDE_REFERENCES = _BESIDE_BRANCHES | _NOT_HELD | {"enum", "const", *_BRANCHES}
_ANY: dict[str, Any] = {}
_MOST_DEPTH = 128


_CLOSING = {"{": "}", "[": "]"}
_ENDS_KEY = r"[:,{}\[\]\n"
_ENDS_VALUE = r"[,{}\[\]\n"


def is_braced_key(name: str, quote: str) -> bool:
    """Return whether `BracedArguments` reads a key with this name unchanged."""
    ends = re.search(f"{_ENDS_KEY}{re.escape(quote[0])}]", name)
    return bool(name) and name == name.strip() and len(name) <= LONGEST and ends is None


class BracedArguments:
    """Reader of one call's arguments, which starts after the opening brace."""

    def __init__(
        self,
        scanner: Scanner,
        quote: str,
        show: Callable[[str], None],
        begin: Callable[[], None],
        texts: Collection[str],
    ) -> None:
        """Initialize the reader.

        Args:
            scanner: the text to read.
            quote: marker before and after a string.
            show: receives the arguments as JSON text.
            begin: called once before the first `show`.
            texts: names of arguments that are strings even if written bare.
        """
        self._scanner = scanner
        self._quote = quote
        self._texts = texts
        self._shown = show
        self._begin = begin
        self._begun = False
        self._open = ["}"]  # closing brackets still to come, innermost last
        self._first = True  # the innermost bracket is still empty
        first = re.escape(quote[0])
        self._ends_key = re.compile(f"{_ENDS_KEY}{first}]")
        self._ends_value = re.compile(f"{_ENDS_VALUE}{first}]")

    def read(self) -> Step[bool]:
        """Read the arguments and return whether there are any.

        The valid part is consumed and emitted as complete JSON.
        """
        scanner = self._scanner
        start = self._scanner.at
        while self._open:
            if not (yield from self._item()):
                scanner.at = start
                if self._begun:
                    self._shown("".join(reversed(self._open)))
                return self._begun
            if self._begun:
                scanner.forget()
                start = 0
        return True

    def _show(self, text: str) -> None:
        if not self._begun:
            self._begin()
            text = "{" + text
            self._begun = True
        self._shown(text)

    def _item(self) -> Step[bool]:
        """Read one item in the innermost bracket, an opening bracket, or the closing bracket."""
        scanner = self._scanner
        comma = ""
        if (yield from self._closed()):
            return True
        if not self._first:
            if not (yield from scanner.exactly(",")):
                return False
            if (yield from self._closed()):
                return True
            comma = ", "
        key = None
        if self._open[-1] == "}":
            key = yield from self._key()
            if key is None:
                return False
            comma += json.dumps(key, ensure_ascii=False) + ": "
        return (yield from self._value(comma, key in self._texts and len(self._open) == 1))

    def _closed(self) -> Step[bool]:
        yield from self._scanner.space()
        if not (yield from self._scanner.exactly(self._open[-1])):
            return False
        self._show(self._open.pop())
        self._first = False
        return True

    def _key(self) -> Step[str | None]:
        """Read a quoted or bare key and the colon after it; return None if there is none."""
        scanner = self._scanner
        pieces: list[str] = []
        if (yield from scanner.exactly(self._quote)):
            yield from scanner.up_to(self._quote, "", pieces.append)
            key = "".join(pieces)
        else:
            key = (yield from bare(scanner, self._ends_key)).strip()
        yield from scanner.space()
        return key if key and (yield from scanner.exactly(":")) else None

    def _value(self, front: str, as_text: bool) -> Step[bool]:
        scanner = self._scanner
        yield from scanner.space()
        if (yield from scanner.exactly(self._quote)):
            self._show(f'{front}"')
            yield from scanner.up_to(self._quote, "", lambda text: self._show(string_inside(text)))
            self._show('"')
        elif (opening := scanner.text[scanner.at]) in _CLOSING:
            scanner.at += 1
            self._show(front + opening)
            self._open.append(_CLOSING[opening])
            self._first = True
            return True
        else:
            value = named((yield from bare(scanner, self._ends_value)).strip())
            if value is None:
                return False
            self._show(
                front
                + (json.dumps(value, ensure_ascii=False) if as_text and value[0] != '"' else value)
            )
        self._first = False
        return True


class BracedGrammar:
    """Grammar rules for one tool's arguments.

    Each referenced schema has one rule, so schemas may be recursive.
    """

    def __init__(
        self, lark: Lark, name: str, tool: Tool, quote: str, string: Callable[[], Rule]
    ) -> None:
        """Initialize the grammar.

        Args:
            lark: grammar to which rules are added.
            name: prefix of the rule names.
            tool: tool whose arguments the rules describe.
            quote: marker before and after a string.
            string: returns the rule for any text up to and including the closing marker.
        """
        self._lark = lark
        self._name = name
        self._tool = tool
        self._quote = quote
        self._string = string
        self._root: dict[str, Any] = {**without_needless(tool.parameters), "type": "object"}
        self._rules: dict[int, Rule] = {}
        self._depth = 0

    def arguments(self) -> Rule:
        return self._value(self._root)

    def _refuse(self, what: str) -> NoReturn:
        raise RequestError(
            f"the parameters of tool {self._tool.name!r} cannot be enforced in the model's call "
            f"format, NAME{{KEY:VALUE}}: {what}"
        )

    def _value(self, schema: object) -> Rule:
        if schema is True or schema == {}:
            schema = _ANY
        if not isinstance(schema, Mapping):
            self._refuse(f"{json.dumps(schema)} allows no value")
        self._check_words(schema)
        found = resolved(schema, self._root)
        if "$ref" in schema:
            if not found:
                self._refuse(f"$ref {schema['$ref']!r} cannot be resolved")
            if beside := sorted(_BESIDE_REFERENCES & {*schema}):
                self._refuse(
                    f"'$ref' is not supported there together with {', '.join(map(repr, beside))}"
                )
            self._check_words(found)
        if id(found) not in self._rules:
            rule = self._rules[id(found)] = Rule(f"{self._name}_value{len(self._rules)}")
            self._depth += 1
            if self._depth > _MOST_DEPTH:
                self._refuse(f"it is nested deeper than {_MOST_DEPTH} levels")
            self._lark.add(rule.name, *self._ways(rule.name, found))
            self._depth -= 1
        return self._rules[id(found)]

    def _check_words(self, schema: Mapping[str, Any]) -> None:
        """Raise RequestError for malformed keywords and for keywords that cannot be enforced."""
        for key, kinds in _SHAPES.items():
            if key in schema and not isinstance(schema[key], kinds):
                self._refuse(f"{key!r} cannot be {json.dumps(schema[key])[:80]}")
        for key in sorted(_NOT_HELD & {*schema}):
            if schema[key] is not False or key in ("not", "if"):
                self._refuse(f"{key!r} is not supported")

    def _ways(self, name: str, schema: Mapping[str, Any]) -> list[list[Atom]]:
        own = schema.get("type", _TYPES)
        types = [own] if isinstance(own, str) else list(own)
        if "const" in schema or "enum" in schema:
            choices = self._choices(schema)
            ways = [self._written(one) for one in choices if _is_of(one, types)]
        elif (branches := self._branches(schema)) is not None:
            ways = [[self._value(one)] for one in branches]
        else:
            ways = [list(way) for kind in types for way in self._of_type(name, kind, schema)]
        if not ways:
            self._refuse(f"{json.dumps(schema)[:80]} allows no value")
        return ways

    def _choices(self, schema: Mapping[str, Any]) -> list[Any]:
        """Return the values of `enum` or `const` that the keywords next to it allow."""
        first = "const" if "const" in schema else "enum"
        choices = [schema["const"]] if "const" in schema else schema["enum"]
        has_parts = any(isinstance(one, (dict, list)) for one in choices)
        beside = [key for key in (*_BRANCHES, *(_OF_PARTS if has_parts else ())) if key in schema]
        if beside:
            self._refuse(
                f"{first!r} is not supported there together with {', '.join(map(repr, beside))}"
            )
        for key in _OF_NUMBERS:
            if key in schema and not (
                _is_number(schema[key]) and (key != "multipleOf" or schema[key] > 0)
            ):
                self._refuse(f"{key!r} cannot be {json.dumps(schema[key])[:80]}")
        if "enum" in schema:
            own = {json_key(one) for one in schema["enum"]}
            choices = [one for one in choices if json_key(one) in own]
        return [one for one in choices if _is_within(one, schema)]

    def _branches(self, schema: Mapping[str, Any]) -> list[Any] | None:
        """Return the alternatives of a schema, or None if it has no alternatives."""
        key = next((key for key in _BRANCHES if key in schema), None)
        if key is None:
            return None
        beside = sorted(_BESIDE_BRANCHES & {*schema})
        beside += [other for other in _BRANCHES if other in schema and other != key]
        if beside:
            self._refuse(
                f"{key!r} is not supported there together with {', '.join(map(repr, beside))}"
            )
        if key == "allOf" and len(schema[key]) > 1:
            self._refuse("'allOf' with several schemas is not supported")
        if key == "oneOf" and not all(
            self._are_apart(*two) for two in itertools.combinations(schema[key], 2)
        ):
            self._refuse("'oneOf' is supported only if types or a constant distinguish its schemas")
        return list(schema[key])

    def _are_apart(self, one: object, other: object) -> bool:
        """Return whether it is certain that no value matches both schemas.

        Disjoint types or different constants of a shared required member show this.
        """
        types = [types_of(schema, self._root) for schema in (one, other)]
        if all(types):
            kinds = [
                {"number" if type_ == "integer" else type_ for type_ in found} for found in types
            ]
            if not kinds[0] & kinds[1]:
                return True
        (left, left_names), (right, right_names) = (
            members_of(resolved(schema, self._root)) if isinstance(schema, Mapping) else ({}, set())
            for schema in (one, other)
        )
        both = left_names & right_names
        return types == [{"object"}] * 2 and any(
            "const" in left[key]
            and "const" in right[key]
            and left[key]["const"] != right[key]["const"]
            for key in both
        )

    def _of_type(self, name: str, kind: str, schema: Mapping[str, Any]) -> Iterator[list[Atom]]:
        if kind in ("integer", "number"):
            bounds = {key: schema[key] for key in _OF_NUMBERS if key in schema}
            yield [self._lark.json(f"{name}_{kind}", {"type": kind, **bounds})]
        elif kind == "object":
            yield from self._object(name, schema)
        elif kind == "array":
            yield from self._array(name, schema)
        elif kind == "string":
            yield [*self._lark.literal(self._quote), self._string()]
        elif kind in ("boolean", "null"):
            yield ["(true|false)" if kind == "boolean" else "null"]
        else:
            self._refuse(f"type {kind!r} is unknown")

    def _object(self, name: str, schema: Mapping[str, Any]) -> Iterator[list[Atom]]:
        """Yield the possible sequences of members.

        Members are in the schema's order or, as templates write them, sorted by name. Optional
        members may be omitted. A schema without members allows any members if it permits additional
        properties.
        """
        members, required = members_of(schema)
        for key in members:
            self._check_key(key)
        others = schema.get("additionalProperties", True)
        if not members:
            yield [r"\{\}"]
            if others is not False:
                one: list[Atom] = [f"{_KEY}:", self._value(others)]
                self._lark.add(f"{name}_other", [",", *one])
                yield [r"\{", *one, Rule(f"{name}_other*"), r"\}"]
            return
        written = {key: self._member(key, one) for key, one in members.items()}
        orders = [list(members), sorted(members, key=str.lower)]
        for number, order in enumerate(orders[: 1 + (orders[0] != orders[1])]):
            items = [(written[key], key in required) for key in order]
            yield [r"\{", self._lark.ordered_items(f"{name}_order{number}", items, [","]), r"\}"]

    def _member(self, key: str, schema: object) -> list[Atom]:
        return [f"{escaped(key)}:", self._value(schema)]

    def _array(self, name: str, schema: Mapping[str, Any]) -> Iterator[list[Atom]]:
        least = int(schema.get("minItems", 0))
        most = schema.get("maxItems")
        if least == 0:
            yield [r"\[\]"]
        if most is not None and int(most) < max(least, 1):
            if least > int(most):
                self._refuse(f"minItems {least} is more than maxItems {most}")
            return
        item = self._value(schema.get("items", True))
        if most is not None and int(most) == 1:
            yield [r"\[", item, r"\]"]
            return
        self._lark.add(f"{name}_next", [",", item])
        more = f"{{{max(least - 1, 0)},{'' if most is None else int(most) - 1}}}"
        yield [r"\[", item, Rule(f"{name}_next{more}"), r"\]"]

    def _check_key(self, key: str) -> None:
        if not is_braced_key(key, self._quote):
            self._refuse(
                f"the property {key!r} cannot be written: it must not contain : , {{ }} [ ] "
                f"{self._quote[0]} or line ends, begin or end with a space, or exceed 256 "
                "characters; rename it"
            )

    def _written(self, value: Any) -> list[Atom]:
        """Return the atoms that match exactly this value."""
        if isinstance(value, str):
            if self._quote in value:
                self._refuse(f"the value {value!r} contains {self._quote}, which ends a string")
            quote = self._lark.literal(self._quote)
            return [atom for atom in (*quote, escaped(value), *quote) if atom != ""]
        if isinstance(value, Mapping):
            for key in value:
                self._check_key(key)
            items = [[f"{escaped(key)}:", *self._written(one)] for key, one in value.items()]
            return [r"\{", *_with_commas(items), r"\}"]
        if isinstance(value, list):
            return [r"\[", *_with_commas([self._written(one) for one in value]), r"\]"]
        return [escaped(json.dumps(value))]


def _is_of(value: object, types: list[Any]) -> bool:
    """Return whether a value has one of these types."""
    own = types_of({"const": value}, {})
    return bool(own & {*types}) or (own == {"integer"} and "number" in types)


def _is_number(value: object) -> bool:
    """Return whether a value is a number that JSON can represent, so neither infinite nor NaN."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_within(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether the bounds of numbers and of lists allow a value.

    They allow no number that is infinite or NaN.
    """
    if isinstance(value, list):
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        return least <= len(value) and (most is None or len(value) <= most)
    if not _is_number(value):
        return not isinstance(value, float)
    number = Decimal(str(value))
    bounds = {key: Decimal(str(schema[key])) for key in _OF_NUMBERS if key in schema}
    return (
        number >= bounds.get("minimum", number)
        and number <= bounds.get("maximum", number)
        and ("exclusiveMinimum" not in bounds or number > bounds["exclusiveMinimum"])
        and ("exclusiveMaximum" not in bounds or number < bounds["exclusiveMaximum"])
        and ("multipleOf" not in bounds or Fraction(number) % Fraction(bounds["multipleOf"]) == 0)
    )


def _with_commas(items: list[list[Atom]]) -> list[Atom]:
    return [
        atom for number, item in enumerate(items) for atom in ([",", *item] if number else item)
    ]
