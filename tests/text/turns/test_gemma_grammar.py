"""Tests of the grammar of Gemma's tool calls: values match the tool's schema, and strings are
unescaped.
"""

import contextlib
import functools
import json
import math

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from conftest import LONG
from helpers.text.chat_templates import MARKERS, format_of, written
from helpers.text.grammars import Vocabulary
from helpers.text.turn_parts import arguments_of, parts_of
from kvboost_edge.errors import RequestError
from kvboost_edge.text.turns.call_grammar import calls_grammar
from kvboost_edge.text.turns.formats import Tool
from kvboost_edge.text.turns.gemma_calls import _NOT_HELD, _SHAPES
from kvboost_edge.text.turns.parser import CallArguments, CallStart

EITHER = pytest.mark.parametrize("markers", [False, True], ids=["as text", "as special tokens"])


@functools.cache
def vocabulary(markers):
    return Vocabulary(MARKERS if markers else ())


def grammar(schema, markers):
    return calls_grammar(
        format_of("gemma4"),
        [Tool("f", schema)],
        choice="required",
        parallel=False,
        reasoning="closed",
        special_id=vocabulary(markers).codec.marker_id,
    )


def takes(schema, text, markers):
    return vocabulary(markers).takes(grammar(schema, markers), text)


def shaped(properties, *required, **more):
    return {"type": "object", "properties": properties, "required": list(required), **more}


POINT = shaped(
    {"x": {"type": "integer", "minimum": -9, "maximum": 9}}, "x", additionalProperties=False
)
TREE = {
    **shaped({"root": {"$ref": "#/$defs/node"}}, "root", additionalProperties=False),
    "$defs": {
        "node": shaped(
            {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "name",
            additionalProperties=False,
        )
    },
}
UNIONS = shaped(
    {
        "a": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "b": {"type": ["integer", "boolean"], "maximum": 5},
        "c": {
            "oneOf": [
                shaped({"kind": {"const": kind}}, "kind", additionalProperties=False)
                for kind in "xy"
            ]
        },
        "d": {"allOf": [{"$ref": "#/$defs/choice"}]},
    },
    "a",
    additionalProperties=False,
    **{"$defs": {"choice": {"enum": ["}", 1, None, [True], {"k": "v"}]}}},
)
LISTS = shaped(
    {
        "two": {"type": "array", "items": POINT, "minItems": 2, "maxItems": 3},
        "few": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
        "none": {"type": "array", "maxItems": 0},
        "some": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    },
    additionalProperties=False,
)
OTHERS = shaped(
    {"map": {"type": "object", "additionalProperties": {"type": "number"}}, "any": {}}, "any"
)
CHOICES = shaped(
    {
        "bounded": {"enum": [1, 2.5, 3, 5, "1", True, None], "minimum": 2.5, "maximum": 4},
        "open": {"enum": [1, 2, 3], "exclusiveMinimum": 1, "exclusiveMaximum": 3},
        "tenths": {"enum": [0.3, 0.35, 1], "multipleOf": 0.1},
        "lists": {"enum": [[], [1], [1, 2], "x"], "minItems": 1, "maxItems": 1},
        "both": {"const": 1, "enum": [1.0, True]},
    },
    additionalProperties=False,
)
SCHEMAS = {
    "point": POINT,
    "tree": TREE,
    "unions": UNIONS,
    "lists": LISTS,
    "others": OTHERS,
    "choices": CHOICES,
    "free": {},
}

TAKEN = [
    ("point", {"x": -9}),
    ("tree", {"root": {"name": "a}", "children": [{"name": "b"}, {"name": "", "children": []}]}}),
    ("unions", {"a": None}),
    ("unions", {"a": "it's, {b:1}", "b": 5, "c": {"kind": "y"}, "d": "}"}),
    ("unions", {"a": "", "b": True, "d": {"k": "v"}}),
    ("lists", {}),
    ("lists", {"two": [{"x": 1}, {"x": 2}], "few": [], "none": [], "some": ["a", "b", "c", "d"]}),
    ("others", {"any": [1, {"a": [None, "x"]}], "map": {"a": 1.5, "b": -2}}),
    ("choices", {"bounded": 2.5, "open": 2, "tenths": 0.3, "lists": [1], "both": 1}),
    ("choices", {"bounded": "1", "tenths": 1, "lists": "x"}),
    ("choices", {"bounded": True}),
    ("free", {}),
    ("free", {"a": {"b": [1, [], {}]}, "c": "\n"}),
]
REFUSED = [
    ("point", {}),
    ("point", {"x": 10}),
    ("point", {"x": "1"}),
    ("point", {"x": 1, "y": 1}),
    ("tree", {"root": {"children": []}}),
    ("tree", {"root": {"name": "a", "children": [{"name": 1}]}}),
    ("unions", {"a": 1}),
    ("unions", {"a": None, "b": 6}),
    ("unions", {"a": None, "c": {"kind": "z"}}),
    ("unions", {"a": None, "d": "1"}),
    ("unions", {"b": 1}),
    ("lists", {"two": [{"x": 1}]}),
    ("lists", {"two": [{"x": 1}] * 4}),
    ("lists", {"few": [True, True]}),
    ("lists", {"none": [1]}),
    ("lists", {"some": []}),
    ("others", {"any": 1, "map": {"a": "b"}}),
    ("choices", {"bounded": 1}),
    ("choices", {"bounded": 5}),
    ("choices", {"open": 1}),
    ("choices", {"open": 3}),
    ("choices", {"tenths": 0.35}),
    ("choices", {"lists": []}),
    ("choices", {"lists": [1, 2]}),
    ("choices", {"both": True}),
]


@EITHER
@pytest.mark.parametrize(("name", "arguments"), TAKEN)
def test_valid_arguments_are_accepted(name, arguments, markers):
    assert takes(SCHEMAS[name], written("gemma4", [("f", arguments)]), markers)


@EITHER
@pytest.mark.parametrize(("name", "arguments"), REFUSED)
def test_invalid_arguments_are_rejected(name, arguments, markers):
    assert not takes(SCHEMAS[name], written("gemma4", [("f", arguments)]), markers)


@EITHER
def test_members_follow_the_schemas_or_alphabetical_order(markers):
    schema = shaped({"b": {"type": "null"}, "A": {"type": "null"}, "c": {"type": "null"}}, "b")
    for inner in (
        "b:null,A:null,c:null",
        "A:null,b:null,c:null",
        "b:null",
        "b:null,c:null",
        "A:null,b:null",
    ):
        assert takes(schema, f"<|tool_call>call:f{{{inner}}}<tool_call|>", markers), inner
    for inner in ("c:null,b:null", "A:null", "b:null,b:null", "b:null,", ",b:null", "", "b: null"):
        assert not takes(schema, f"<|tool_call>call:f{{{inner}}}<tool_call|>", markers), inner


WANTED = ("<tool_call|>", '<|"|>', "}", "]", "1", ",", "x")


def sampled(schema, markers, seed):
    """Sample random text that the grammar allows, with a bias to end; return None if it did not
    end.
    """
    words = vocabulary(markers)
    made = grammar(schema, markers)
    text, ended = words.sample(made, seed, WANTED, often=0.6, ends=1.0, most=200)
    return text if ended else None


@EITHER
@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.some(3)
def test_random_text_under_the_grammar_parses_and_is_valid(name, markers):
    ended = 0
    for seed in range(10):
        text = sampled(SCHEMAS[name], markers, seed)
        if text is None:
            continue
        ended += 1
        start, arguments = parts_of(format_of("gemma4"), text, tools=[Tool("f", SCHEMAS[name])])
        assert start == CallStart(0, "f")
        assert isinstance(arguments, CallArguments)
        read = json.loads(
            arguments.text, parse_float=lambda text: min(float(text), 1e300)
        )  # 1e999 is also a number
        jsonschema_rs.validate(SCHEMAS[name], read)
    assert ended >= 3


WRONG = [
    ({"not": {}}, "'not'"),
    ({"type": "array", "prefixItems": [{}]}, "'prefixItems'"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    ({"type": "object", "patternProperties": {"a": {}}}, "'patternProperties'"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf'"),
    ({"oneOf": [{"type": "string"}, {}]}, "'oneOf'"),
    ({"anyOf": [{"type": "string"}], "type": "string"}, "'anyOf'"),
    ({"anyOf": [{"type": "array"}, {"type": "null"}], "maxItems": 2}, "'maxItems'"),
    ({"anyOf": [{"type": "array"}, {"type": "null"}], "minItems": 2}, "'minItems'"),
    ({"enum": ["x", "y"], "anyOf": [{"const": "x"}]}, "'enum' is not supported there together"),
    ({"const": {"a": 1}, "properties": {"a": {"type": "null"}}}, "together with 'properties'"),
    ({"enum": [[1]], "items": {"type": "null"}}, "together with 'items'"),
    ({"enum": [1], "minimum": 2}, "no value"),
    ({"const": 1, "enum": [2]}, "no value"),
    ({"enum": [1], "minimum": "0"}, "'minimum' cannot be"),
    ({"enum": [1], "multipleOf": 0}, "'multipleOf' cannot be 0"),
    ({"enum": [1, 2], "minimum": math.nan}, "'minimum' cannot be NaN"),
    ({"enum": [1, 2], "multipleOf": math.inf}, "'multipleOf' cannot be Infinity"),
    ({"enum": [1, "x"], "maximum": 10**400, "minimum": -math.inf}, "'minimum' cannot be -Infinity"),
    ({"enum": [math.inf], "multipleOf": 1}, "no value"),
    ({"const": math.nan}, "no value"),
    ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "'allOf'"),
    ({"enum": ['a<|"|>b']}, "ends a string"),
    ({"properties": {"a:b": {}}}, "'a:b'"),
    ({"properties": {"a{": {}}}, "'a{'"),
    ({"$ref": "#/$defs/none"}, "#/$defs/none"),
    ({"type": "text"}, "'text'"),
    (False, "no value"),
    ({"enum": []}, "no value"),
    ({"type": "string", "enum": [1, None]}, "no value"),
    ({"enum": 1}, "'enum' cannot be 1"),
    ({"type": 5}, "'type' cannot be 5"),
    ({"type": [["string"]]}, "is unknown"),
    ({"type": "array", "minItems": "2"}, "'minItems' cannot be"),
    ({"type": "array", "minItems": 2, "maxItems": 1}, "minItems 2"),
    ({"$ref": "#/$defs/none", "type": "string"}, "#/$defs/none"),
    ({"$ref": "#", "minimum": 1}, "'$ref' is not supported there together with 'minimum'"),
]


@pytest.mark.parametrize(("schema", "word"), WRONG)
def test_unsupported_schemas_are_refused_by_name(schema, word):
    with pytest.raises(RequestError) as refused:
        grammar(shaped({"a": schema}), False)
    assert word in str(refused.value)
    assert "'f'" in str(refused.value)


@pytest.mark.parametrize("bounds", [{}, {"multipleOf": 1}, {"minimum": 1}])
def test_numbers_that_json_cannot_represent_are_not_choices(bounds):
    schema = shaped({"a": {"enum": [math.inf, -math.inf, math.nan, 2], **bounds}}, "a")
    two = written("gemma4", [("f", {"a": 2})])
    assert two.count("2") == 1
    assert takes(schema, two, False)
    for other in ("Infinity", "-Infinity", "NaN"):
        assert not takes(schema, two.replace("2", other), False)


WORDS = st.sampled_from(
    [
        *_SHAPES,
        *_NOT_HELD,
        "const",
        "minimum",
        "maximum",
        "multipleOf",
        "pattern",
        "minLength",
        "a",
        "b",
    ]
)
SCHEMA_PARTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.floats(-9, 9)
    | st.sampled_from(
        ["string", "object", "array", "integer", "null", "number", "#", "#/$defs/a", "a", "", ":"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


def without_not_enforced(part):
    """Return a schema without the keywords that are not enforced. Constants are values, not schemas."""
    if isinstance(part, list):
        return [without_not_enforced(one) for one in part]
    if not isinstance(part, dict):
        return part
    return {
        key: value if key in ("const", "enum") else without_not_enforced(value)
        for key, value in part.items()
        if key not in ("pattern", "minLength")
    }


@settings(max_examples=300 if LONG else 100, deadline=None)
@given(st.dictionaries(WORDS, SCHEMA_PARTS, max_size=4), st.integers(0, 99))
def test_any_schema_is_enforced_or_refused(part, seed):
    """Text sampled from an enforced schema also matches it."""
    schema = shaped({"a": part}, "a")
    try:
        text = grammar(schema, True)
    except RequestError:
        return
    made = LLMatcher(vocabulary(True).known, LLMatcher.grammar_from_lark(text), log_level=0)
    if made.is_error():
        assert "lark" not in made.get_error().lower() or "json" in made.get_error().lower(), (
            made.get_error()
        )
        return
    told = sampled(schema, True, seed)
    if told is None:
        return
    (arguments,) = arguments_of(parts_of(format_of("gemma4"), told, tools=[Tool("f", schema)]))
    checked = without_not_enforced(schema)
    with contextlib.suppress(
        jsonschema_rs.ValidationError
    ):  # an invalid schema has no matching values
        validator = jsonschema_rs.validator_for(checked)
        assert validator.is_valid(arguments), (schema, arguments)


def test_a_schema_of_any_depth_is_enforced_or_refused():
    schema = {"type": "null"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    assert takes(
        shaped({"a": schema}),
        f"<|tool_call>call:f{{a:{'[' * 100}null{']' * 100}}}<tool_call|>",
        True,
    )
    for _ in range(2000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match="nested deeper"):
        grammar(shaped({"a": schema}), True)
