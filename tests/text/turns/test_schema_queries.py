"""Tests of queries to a schema about a value between tags."""

import pytest

from kvboost_edge.text.turns.schema_queries import (
    is_circular,
    members_of,
    value_kind,
    without_needless,
)

ROOT = {
    "$defs": {
        "name": {"type": "string"},
        "loop": {"$ref": "#/$defs/loop"},
        "a/b": {"type": "null"},
    },
    "definitions": {"size": {"enum": [1, 2.5]}, "both": [{}, {"type": "null"}]},
}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string"}, "string"),
        ({"enum": ["a", "b"]}, "string"),
        ({"const": "a"}, "string"),
        ({"$ref": "#/$defs/name"}, "string"),
        ({"anyOf": [{"type": "string"}, {"const": "x"}]}, "string"),
        ({"type": "integer"}, "json"),
        ({"type": ["array", "null"]}, "json"),
        ({"enum": [1, True, None]}, "json"),
        ({"$ref": "#/definitions/size"}, "json"),
        ({"$ref": "#/$defs/a~1b"}, "json"),
        ({"$ref": "#/definitions/both/1"}, "json"),
        ({"$ref": "#/definitions/both/2"}, "either"),
        ({"$ref": "#/definitions/both/-1"}, "either"),
        ({"anyOf": [{"type": "object"}, {"type": "null"}]}, "json"),
        ({"type": ["string", "null"]}, "either"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "either"),
        ({"enum": ["a", None]}, "either"),
        ({}, "either"),
        (True, "either"),
        ({"description": "anything"}, "either"),
        ({"$ref": "#/$defs/loop"}, "either"),
        ({"$ref": "#/$defs/nowhere"}, "either"),
        ({"$ref": "https://example.com/a.json"}, "either"),
        ({"anyOf": [{"type": "integer"}, {}]}, "either"),
    ],
)
def test_value_kind_of_schemas(schema, kind):
    assert value_kind(schema, ROOT) == kind


def test_a_self_reference_adds_no_kind():
    root = {"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}
    assert value_kind({"$ref": "#/$defs/n"}, root) == "json"


ITSELF = {"$ref": "#"}


@pytest.mark.parametrize(
    ("schema", "circular"),
    [
        (ITSELF, True),
        ({**ITSELF, "title": "a"}, True),
        ({"anyOf": [ITSELF, {"$ref": "#/anyOf/0"}]}, True),
        ({"oneOf": [{"allOf": [ITSELF]}]}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": ITSELF}}, True),
        ({"anyOf": [ITSELF, {"type": "string"}]}, False),
        ({"anyOf": [ITSELF, True]}, False),
        ({"properties": {"a": ITSELF}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}, False),
        ({"$ref": "#/$defs/nowhere"}, False),
        ({"$ref": "https://example.com/a.json"}, False),
        ({"anyOf": []}, False),
        ({}, False),
        (True, False),
    ],
)
def test_circular_schemas_are_detected(schema, circular):
    assert is_circular(schema) == circular


@pytest.mark.parametrize(
    ("root", "names", "required"),
    [
        ({}, [], set()),
        ({"properties": {"b": {}, "a": {}}, "required": ["a"]}, ["b", "a"], {"a"}),
        ({"properties": {"a": {}}, "required": ["c"]}, ["a", "c"], {"c"}),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"y": {}}}}}, ["y"], set()),
        ({"properties": 3, "required": "no"}, [], set()),
    ],
)
def test_members_keep_their_order(root, names, required):
    members, found = members_of(root)
    assert (list(members), found) == (names, required)


def test_mutually_recursive_schemas_are_visited_once():
    """Following every branch would take 10 ** 16 steps."""
    circle = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 10}}}
    assert value_kind({"$ref": "#/$defs/a"}, circle) == "either"
    circle["$defs"]["a"]["anyOf"].append({"type": "string"})
    assert value_kind({"$ref": "#/$defs/a"}, circle) == "string"


def test_needless_property_names_are_removed():
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}
    named = {
        "properties": {"propertyNames": {"type": "string"}},
        "const": record,
        "required": ["propertyNames"],
    }
    short = {"type": "object", "propertyNames": {"maxLength": 3}}
    schema = {"properties": {"a": record, "b": {"anyOf": [record, short]}}, "$defs": {"c": named}}
    plain = {"type": "object", "additionalProperties": {}}
    assert without_needless(schema) == {
        "properties": {"a": plain, "b": {"anyOf": [plain, short]}},
        "$defs": {"c": named},
    }
    deep = record
    for _ in range(10_000):
        deep = {"items": deep}
    assert without_needless(deep)
