"""Tests that rewritten schemas accept the same values as before.

Small values of every type are checked by another JSON Schema validator, before and after rewriting,
and by the grammar compiler.
"""

import itertools
import json

import jsonschema_rs
import pytest

from kvboost_edge.engine.grammar.compiler import check_grammar, fits_schema
from kvboost_edge.engine.request.requested_grammar import read_grammar
from kvboost_edge.errors import RequestError
from kvboost_edge.text.turns.schema_rewrite import rewritten

PLAIN = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    1.5,
    "",
    "a",
    "ab",
    "abc",
    "b",
    "ä",
    "ä\n",
    '"',
    [],
    ["a"],
    {},
]
_MISSING = object()


def objects(**values):
    """Yield all objects with these members, each missing or with one of its values."""
    for chosen in itertools.product(*([_MISSING, *some] for some in values.values())):
        pairs = zip(values, chosen, strict=True)
        yield {name: value for name, value in pairs if value is not _MISSING}


def lists(*values, most=3):
    for size in range(most + 1):
        yield from map(list, itertools.product(values, repeat=size))


def when(name, values, *, required=True, **more):
    """Return the condition that a property has one of these values."""
    return {
        "properties": {name: {"enum": values}},
        **({"required": [name]} if required else {}),
        **more,
    }


KIND = {"type": "string", "enum": ["x", "y", "z"]}
OPEN = {"type": "object", "properties": {"k": KIND, "a": {"type": "integer"}, "b": {}}}
CLOSED = {**OPEN, "additionalProperties": False}
OBJECTS = [*objects(k=["x", "y", "z", 1], a=[1, "s"], b=[True])]
NEED_A = {"required": ["a"]}
NEED_B = {"required": ["b"]}
ENUM = {"type": "array", "items": {"enum": ["a", 1, True]}, "uniqueItems": True}

EXACT = {
    # -- if, then, else --
    "if then": ({**CLOSED, "if": when("k", ["x"]), "then": NEED_A}, OBJECTS),
    "if else": ({**CLOSED, "if": when("k", ["x"]), "else": NEED_A}, OBJECTS),
    "if then else": ({**OPEN, "if": when("k", ["x"]), "then": NEED_A, "else": NEED_B}, OBJECTS),
    "if alone": ({**OPEN, "if": when("k", ["x"])}, OBJECTS),
    "then alone": ({**OPEN, "then": NEED_A, "else": False}, OBJECTS),
    "a constant": (
        {**OPEN, "if": {"properties": {"k": {"const": "y"}}, "required": ["k"]}, "then": NEED_A},
        OBJECTS,
    ),
    "a property that may be missing": (
        {**OPEN, "if": when("k", ["x", "y"], required=False), "then": NEED_A, "else": NEED_B},
        OBJECTS,
    ),
    "a property that the schema requires": (
        {**CLOSED, "required": ["k"], "if": when("k", ["x"], required=False), "then": NEED_A},
        OBJECTS,
    ),
    "a condition of all values": (
        {**OPEN, "if": when("k", ["x", "y", "z"]), "then": NEED_A, "else": NEED_B},
        OBJECTS,
    ),
    "a condition of no value there is": (
        {**OPEN, "if": when("k", ["w"]), "then": NEED_A, "else": NEED_B},
        OBJECTS,
    ),
    "then nothing": ({**CLOSED, "if": when("k", ["x"]), "then": False}, OBJECTS),
    "then another type": (
        {**CLOSED, "if": when("k", ["x"]), "then": {"properties": {"a": {"const": 1}}}},
        OBJECTS,
    ),
    "free text": (
        {
            "type": "object",
            "properties": {"k": {"type": "string"}, "a": {}},
            "if": when("k", ["x", "xy"]),
            "then": NEED_A,
            "else": {"properties": {"a": False}},
        },
        [*objects(k=["", "x", "xy", "xyz", "z", "y", 1], a=[1])],
    ),
    "any value": (
        {"type": "object", "if": when("k", ["x", None, 1, True]), "then": NEED_A},
        [*objects(k=[None, 0, 1, 2, 1.5, "x", "y", True, False, [], {}], a=[1])],
    ),
    "any type": (
        {"if": when("k", ["x"]), "then": {"type": "object", **NEED_A}},
        [*PLAIN, *objects(k=["x", "y"], a=[1])],
    ),
    "any type, an object in the condition": (
        {
            "if": when("k", ["x"], type="object"),
            "then": NEED_A,
            "else": {"type": ["object", "null"]},
        },
        [*PLAIN, *objects(k=["x", "y"], a=[1])],
    ),
    "conditions for each value": (
        {
            **CLOSED,
            "required": ["k"],
            "allOf": [
                {"if": when("k", ["x"]), "then": NEED_A},
                {"if": when("k", ["y"]), "then": NEED_B},
                {"properties": {"b": {"type": "boolean"}}},
            ],
        },
        OBJECTS,
    ),
    "conditions that overlap": (
        {
            **OPEN,
            "allOf": [
                {"if": when("k", ["x", "y"]), "then": NEED_A},
                {"if": when("k", ["y", "z"]), "then": NEED_B, "else": {"properties": {"b": False}}},
            ],
        },
        OBJECTS,
    ),
    "conditions of two properties": (
        {
            **OPEN,
            "if": when("k", ["x"]),
            "then": NEED_A,
            "allOf": [{"if": when("b", [True]), "then": NEED_A}],
        },
        OBJECTS,
    ),
    "a condition in a condition": (
        {
            **OPEN,
            "if": when("k", ["x"]),
            "then": NEED_A,
            "else": {"if": when("k", ["y"]), "then": NEED_B, "else": {"properties": {"a": False}}},
        },
        OBJECTS,
    ),
    "a condition in a property": (
        {"type": "array", "items": {**CLOSED, "if": when("k", ["x"]), "then": NEED_A}},
        [[], *([one] for one in OBJECTS)],
    ),
    "a condition in a definition": (
        {
            "$ref": "#/$defs/one",
            "$defs": {"one": {**CLOSED, "if": when("k", ["x"]), "then": NEED_A}},
        },
        OBJECTS,
    ),
    "properties named like keywords": (
        {
            "type": "object",
            "properties": {"if": KIND, "not": {"not": {"type": "null"}}, "uniqueItems": {}},
            "if": when("if", ["x"]),
            "then": {"required": ["not"]},
            "dependentRequired": {"not": ["uniqueItems"]},
        },
        [*objects(**{"if": ["x", "y"], "not": [1, None], "uniqueItems": [1]})],
    ),
    # -- dependentRequired --
    "dependent": ({**OPEN, "dependentRequired": {"a": ["b"]}}, OBJECTS),
    "dependent, closed": ({**CLOSED, "dependentRequired": {"a": ["b", "k"], "b": []}}, OBJECTS),
    "dependent on each other": ({**OPEN, "dependentRequired": {"a": ["b"], "b": ["a"]}}, OBJECTS),
    "dependent on what there is not": ({**CLOSED, "dependentRequired": {"a": ["c"]}}, OBJECTS),
    "dependent, any type": (
        {"dependentRequired": {"a": ["b"]}},
        [*PLAIN, *objects(a=[1], b=[2])],
    ),
    # -- uniqueItems --
    "unique": (ENUM, [*lists("a", 1, True, 1.5), None]),
    "not unique": ({**ENUM, "uniqueItems": False}, [*lists("a", 1, True)]),
    "unique, a few": ({**ENUM, "minItems": 1, "maxItems": 2}, [*lists("a", 1, True)]),
    "unique, too many": ({**ENUM, "minItems": 4}, [*lists("a", 1, True, most=4)]),
    "unique, one": ({**ENUM, "items": {"type": "string"}, "maxItems": 1}, [*lists("a", "b")]),
    "unique, or none": ({**ENUM, "type": ["array", "null"]}, [*lists("a", 1, "b"), None, "a", {}]),
    "unique, any type": (
        {"items": {"enum": ["a", 1]}, "uniqueItems": True},
        [*PLAIN, *lists("a", 1, "b")],
    ),
    "unique, twice the same value": (
        {"type": "array", "items": {"enum": [1, 1.0, "a"]}, "uniqueItems": True},
        [*lists(1, "a")],
    ),
    "unique truths": (
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
        [*lists(True, False, None)],
    ),
    "unique, by reference": (
        {
            "type": "array",
            "items": {"$ref": "#/$defs/one"},
            "uniqueItems": True,
            "$defs": {"one": {"type": "string", "enum": ["a", "b", 1], "description": "x"}},
        },
        [*lists("a", "b", 1)],
    ),
    "unique text": ({"type": "string", "uniqueItems": True}, PLAIN),
    "unique, three of eight": (
        {"type": "array", "items": {"enum": [*"abcdefgh"]}, "uniqueItems": True, "maxItems": 3},
        [*lists("a", "h", "x"), ["a", "b", "c", "d"]],
    ),
    # -- not --
    "not a constant": ({"not": {"const": "a"}}, PLAIN),
    "not null": ({"not": {"type": "null"}}, PLAIN),
    "not these types": ({"not": {"type": ["string", "number", "null"]}}, PLAIN),
    "no number": ({"type": ["integer", "string"], "not": {"type": "number"}}, PLAIN),
    "not an integer": ({"type": ["integer", "string"], "not": {"type": "integer"}}, PLAIN),
    "not these": ({"not": {"enum": ["", "ab", "ä", 0, 1.5, True, None]}}, PLAIN),
    "not both truths": ({"not": {"enum": [True, False]}}, PLAIN),
    "text, not these": ({"type": "string", "minLength": 1, "not": {"enum": ["a", "ab"]}}, PLAIN),
    "text, not empty": ({"type": "string", "not": {"const": ""}}, PLAIN),
    "an integer, not these": ({"type": "integer", "not": {"enum": [0, 1, "a"]}}, PLAIN),
    "a number, not these": ({"type": "number", "minimum": 0, "not": {"enum": [1, 1.0]}}, PLAIN),
    "text, not a number": ({"type": "string", "not": {"const": 1}}, PLAIN),
    "one of these, not these": ({"enum": ["a", 1, None, []], "not": {"enum": [1, []]}}, PLAIN),
    "one of these, not a type": ({"enum": ["a", 1, None, {}], "not": {"type": "number"}}, PLAIN),
    "a constant that is none": ({"const": "a", "enum": ["b", 1], "not": {"const": 1}}, PLAIN),
    "not text of these": ({"not": {"type": "string", "enum": ["a", 1]}}, PLAIN),
    "not a truth": ({"type": "boolean", "not": {"const": True}}, PLAIN),
    "not nothing": ({"type": "string", "not": False}, PLAIN),
    "not what is not": ({"type": "string", "not": {"const": "a", "enum": ["b"]}}, PLAIN),
    "never": ({"not": {}}, PLAIN),
    "never there": ({"type": "object", "properties": {"a": {"not": {}}}}, [*objects(a=[1], b=[1])]),
    "not its own type": (
        {"anyOf": [{"type": "null", "not": {"type": "null"}}, {"type": "string"}]},
        PLAIN,
    ),
}


@pytest.mark.parametrize(("schema", "values"), EXACT.values(), ids=EXACT)
@pytest.mark.some(2)
def test_a_rewritten_schema_accepts_the_same_values(schema, values):
    made = rewritten(schema)
    assert rewritten(made) == made
    before, after = jsonschema_rs.validator_for(schema), jsonschema_rs.validator_for(made)
    wanted = [before.is_valid(value) for value in values]
    assert [after.is_valid(value) for value in values] == wanted
    if any(wanted):
        assert [fits_schema(schema, value) for value in values] == wanted
    else:
        with pytest.raises(RequestError, match="not supported"):
            check_grammar(read_grammar({"json_schema": schema}))


REFUSED = {
    "if": {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "else": {"if": {"properties": {"a": {"minimum": 1}}}, "else": {"required": ["b"]}},
    "then": {"if": when("k", [[1]]), "then": {"required": ["b"]}},
    "uniqueItems": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    '"uniqueItems"': {"type": "array", "items": {"enum": [*range(9)]}, "uniqueItems": True},
    '["uniqueItems"]': {"type": "array", "items": {"enum": [*range(6)]}, "uniqueItems": True},
    "not": {"not": {"required": ["a"]}},
    '"not"': {"not": {"const": {"a": 1}}},
    '["not"]': {"not": {"type": "integer"}},
    "[not]": {"type": "string", "not": {"enum": ["a", 'say "x"']}},
    "dependentRequired": {"dependentRequired": {"a": "b"}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "contains": {"contains": {"const": 1}},
    "propertyNames": {"propertyNames": {"pattern": "^a"}},
    "unevaluatedProperties": {"unevaluatedProperties": False},
}


@pytest.mark.parametrize("word", REFUSED)
def test_unsupported_keywords_are_refused_by_name(word):
    with pytest.raises(RequestError, match="not supported") as caught:
        check_grammar(read_grammar({"json_schema": REFUSED[word]}))
    assert word.strip('[]"') in str(caught.value)


@pytest.mark.parametrize("schema", [REFUSED["not"], {"type": "array", "items": KIND}, CLOSED, {}])
def test_other_schemas_are_unchanged(schema):
    before = json.dumps(schema)
    assert rewritten(schema) == schema
    assert json.dumps(schema) == before


def test_conditions_on_many_values_become_one_choice():
    """Two choices per condition would give 2 ** 40 combinations."""
    values = [f"v{number}" for number in range(40)]
    schema = {
        "type": "object",
        "properties": {"k": {"enum": values}, **{value: {"type": "integer"} for value in values}},
        "required": ["k"],
        "additionalProperties": False,
        "allOf": [{"if": when("k", [value]), "then": {"required": [value]}} for value in values],
    }
    assert fits_schema(schema, {"k": "v7", "v7": 1})
    assert not fits_schema(schema, {"k": "v7", "v8": 1})


def test_nested_conditions_grow_linearly():
    schema = NEED_A
    for _ in range(25):
        first = {"if": when("k", ["x"]), "then": schema}
        second = {"if": when("k", ["y"], required=False), "else": NEED_B}
        schema = {"type": "object", "allOf": [first, second, {"if": when("a", [1]), "else": True}]}
    assert len(json.dumps(rewritten(schema))) < 10 * len(json.dumps(schema))


def test_unique_lists_and_patterns_are_bounded_together():
    unique = {"type": "array", "items": {"enum": [*"abcde"]}, "uniqueItems": True}
    made = rewritten({"anyOf": [unique] * 100})
    assert sum("uniqueItems" in one for one in made["anyOf"]) == 97
    refused = {"type": "string", "not": {"const": "x" * 64}}
    made = rewritten({"anyOf": [refused] * 100})
    assert sum("not" in one for one in made["anyOf"]) == 92
