"""Hostile grammars end at most their own request, and soon, while others are answered.

KVBOOST_EDGE_TEST_LONG=1 tries more examples.
"""

import contextlib
import json
import os
import random
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.engine.fake_runner import fake_engine
from kvboost_edge.engine.request.requested_grammar import MadeGrammar
from kvboost_edge.errors import KVBoostError, RequestError
from kvboost_edge.server.api.bounds import COUNTS
from kvboost_edge.text.turns.call_grammar import calls_grammar
from kvboost_edge.text.turns.formats import Tool, TurnFormat
from kvboost_edge.text.turns.no_template import GENERIC

EXAMPLES = 1500 if os.environ.get("KVBOOST_EDGE_TEST_LONG") else 20


@pytest.fixture(scope="module")
def engine():
    with fake_engine(num_blocks=512, debug_checks=False) as engine:
        yield engine


def refs(part, count):
    """Build a chain of definitions in which each one refers to the next."""
    chain = {f"d{i}": part({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "string"}}}


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def words(count):
    rng = random.Random(count)
    return ["".join(rng.choices("abcdefgh", k=12)) for _ in range(count)]


def rules(count):
    lines = [f'r{i}: r{i + 1} | r{i + 1} r{i + 1} | "a"' for i in range(count)]
    return "\n".join(["start: r0", *lines, f'r{count}: "b"'])


PROPERTIES = {f"p{i}": {"type": "string"} for i in range(2000)}
HOSTILE = {
    "schema: a chain of 3,900 references": lambda: {
        "json_schema": refs(lambda r: {"type": "array", "items": r}, 3900)
    },
    "schema: 2,600 alternatives": lambda: {
        "json_schema": refs(lambda r: {"anyOf": [r, {"type": "null"}]}, 2600)
    },
    "schema: allOf over references": lambda: {"json_schema": refs(lambda r: {"allOf": [r]}, 3900)},
    "schema: references alone": lambda: {"json_schema": refs(lambda r: r, 7000)},
    "schema: itself": lambda: {"json_schema": {"$ref": "#"}},
    "schema: itself or itself": lambda: {"json_schema": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}},
    "schema: 2,000 properties": lambda: {
        "json_schema": {"type": "object", "properties": PROPERTIES}
    },
    "schema: 10,000 words": lambda: {"json_schema": {"enum": words(10_000)}},
    "schema: a long name": lambda: {
        "json_schema": {
            "type": "object",
            "properties": {"x" * 100_000: {}},
            "required": ["x" * 100_000],
        }
    },
    "schema: products": lambda: {
        "json_schema": {
            "allOf": [
                {"anyOf": [{"properties": {f"k{i}": {"const": j}}} for j in range(2)]}
                for i in range(18)
            ]
        }
    },
    "schema: lengths": lambda: {
        "json_schema": {"type": "string", "minLength": 10**6, "maxLength": 10**9}
    },
    "schema: counts": lambda: {
        "json_schema": {
            "type": "array",
            "items": {"type": "integer"},
            "minItems": 10**6,
            "maxItems": 10**9,
        }
    },
    "schema: patterns of names": lambda: {
        "json_schema": {
            "type": "object",
            "patternProperties": {f"^{a}.*{b}": {} for a in "abcdef" for b in "uvwxyz"},
        }
    },
    "schema: a pattern of many states": lambda: {
        "json_schema": {"type": "string", "pattern": "^.*a.{25}b.{25}c.*$"}
    },
    "schema: a large divisor": lambda: {"json_schema": {"type": "integer", "multipleOf": 9973}},
    "schema: a pattern that is catastrophic for backtracking": lambda: {
        "json_schema": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}
    },
    "schema: 400 branches": lambda: {
        "json_schema": {
            "anyOf": [{"type": "object", "properties": {f"k{i}": {"const": i}}} for i in range(400)]
        }
    },
    "regex: nested stars": lambda: {"regex": "(a|aa)*" * 40 + "b"},
    "regex: a count": lambda: {"regex": "a{0,100000}"},
    "regex: counts in counts": lambda: {"regex": "((a{0,60}){0,60}){0,60}"},
    "regex: many states": lambda: {"regex": "(a|b)*a(a|b){24}"},
    "regex: optional ones": lambda: {"regex": "a?" * 3000 + "a" * 3000},
    "regex: alternatives": lambda: {"regex": "|".join(word + ".*" for word in words(4000))},
    "regex: brackets": lambda: {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "grammar: ambiguous": lambda: {"grammar": "start: e\ne: e e | e e e | /[a-z]/"},
    "grammar: a chain of 900 rules": lambda: {"grammar": rules(900)},
    "grammar: counts in counts": lambda: {
        "grammar": 'start: (x x){0,1000}\nx: y{0,1000}\ny: z{0,1000}\nz: "a" | "b"'
    },
    "grammar: nothing": lambda: {"grammar": 'start: start start | ""'},
    "grammar: intersections": lambda: {
        "grammar": "start: A\nA: /.*a.{12}/ & /.*b.{13}/ & ~/.*c.{11}/"
    },
    "grammar: a GBNF chain": lambda: {
        "grammar": rules(900).replace("start: ", "root: ").replace(": ", " ::= ")
    },
    "grammar: a recursive GBNF chain": lambda: {
        "grammar": "\n".join(
            [
                "root ::= r0",
                *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(900)),
                "r900 ::= [a] root",
            ]
        )
    },
    "grammar: ambiguous GBNF": lambda: {"grammar": "root ::= e\ne ::= e e | e e e | [a-z]"},
    "grammar: GBNF counts": lambda: {
        "grammar": 'root ::= (x x){0,1000} root?\nx ::= y{0,1000}\ny ::= "a" | [b]{0,99999}'
    },
    "grammar: many GBNF words": lambda: {
        "grammar": "root ::= " + " | ".join(f'"{word}" root' for word in words(8000))
    },
    "grammar: a long GBNF word": lambda: {"grammar": f'root ::= "{"x" * 200_000}" root?'},
    "grammar: GBNF brackets": lambda: {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "grammar: a chain inside a schema": lambda: {
        "grammar": "start: %json " + json.dumps(refs(lambda r: {"type": "array", "items": r}, 3000))
    },
    "choice: long ones": lambda: {"choice": ["y" * 60_000, "n" * 60_000]},
}


def survives(engine, options):
    """Check that a hostile request is soon refused, answered or fails alone, that another one is
    answered, and that no blocks stay in use.
    """
    began = time.process_time()  # which other processes do not lengthen
    try:
        handle = engine.submit([1, 2, 3], max_new_tokens=30, temperature=1.0, seed=1, **options)
    except RequestError:
        pass
    else:
        other = engine.submit([4, 5], max_new_tokens=3, temperature=0)
        assert other.result(60).generated_tokens == 3
        with contextlib.suppress(KVBoostError):
            handle.result(60)
    assert time.process_time() - began < 20
    assert engine.is_alive()
    assert engine.paged_stats()["used_blocks"] == 0
    with engine._core.reading():
        engine._parts.manager.check_invariants(())


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_only_its_request(engine, name):
    survives(engine, HOSTILE[name]())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"json_schema": refs(lambda r: r, 9000)},
            "json_schema has 900[0-9] objects; at most 8000",
        ),
        (
            {"json_schema": {"enum": words(20_000)}},
            "json_schema has 240[0-9]{3} characters in names and values",
        ),
        (
            {"json_schema": {"type": "integer", "multipleOf": 999_983}},
            "multipleOf 999983; without its decimal point, it must be at most 10000",
        ),
        ({"json_schema": {"type": "number", "multipleOf": 1e300}}, "multipleOf 1e.300"),
        ({"json_schema": {"type": "number", "multipleOf": 0.123456}}, "multipleOf 0.123456"),
        (
            {"json_schema": {"type": "integer", "minimum": 2**53 + 1}},
            "minimum 9007199254740993, which the compiler would round to 9007199254740992",
        ),
        (
            {"json_schema": {"type": "integer", "exclusiveMaximum": 2**53 + 3}},
            "exclusiveMaximum 9007199254740995, which the compiler would round to .*4740996",
        ),
        (
            {"json_schema": {"type": "integer", "minimum": 10**400}},
            "would round to 9223372036854775807; use a bound of at most 9007199254740992",
        ),
        (
            {"json_schema": {"type": "integer", "minimum": -(2**63)}},
            "use bounds of less than 1e18 in magnitude",
        ),
        ({"json_schema": {"type": "number", "maximum": 1e30}}, "use bounds of less than 1e18"),
        ({"json_schema": nested(125)}, "nested more than 120 levels deep"),
        (
            {"json_schema": '{"type": "array", "items": ' + "[" * 900 + "]" * 900 + "}"},
            "nested more than 120 levels deep|is not valid JSON",
        ),
        ({"grammar": rules(3000)}, "grammar has 3002 lines; at most 1000"),
        ({"grammar": 'start: %json {"multipleOf": 999983} "x"'}, "multipleOf 999983"),
        ({"grammar": 'start: %json {"title": "%json", "multipleOf": 999983}'}, "multipleOf 999983"),
        ({"choice": ["a" * 70_000, "b" * 70_000]}, "choice has 1400[0-9]+ bytes"),
        ({"json_schema": {"$ref": "#"}}, "json_schema matches no value"),
        (
            {"grammar": 'start: "x" %json {"anyOf": [{"$ref": "#"}]}'},
            "json_schema matches no value",
        ),
    ],
    ids=[
        "objects",
        "characters",
        "divisor",
        "exponent",
        "digits",
        "rounded minimum",
        "rounded maximum",
        "minimum beyond a double",
        "minimum beyond the compiler's range",
        "maximum beyond the compiler's range",
        "depth",
        "depth as text",
        "lines",
        "inside",
        "inside, behind a text like a mark",
        "choice",
        "nothing fits",
        "nothing fits inside",
    ],
)
def test_grammars_the_compiler_cannot_bound_are_refused_first(engine, options, match):
    with pytest.raises(RequestError, match=match):
        engine.submit("x", **options)


@pytest.mark.parametrize("divisor", [0.01, 0.5, 1, 7, 10_000, 1e4])
def test_common_divisors_are_accepted(engine, divisor):
    schema = {"type": "number", "multipleOf": divisor, "minimum": 0, "maximum": 10 * divisor}
    engine.generate([1], max_new_tokens=2, temperature=0, json_schema=schema)


@pytest.mark.parametrize("most", [2**53, 2**53 + 1, 2**63 - 1, 2**64 - 1])
def test_bounds_that_are_rounded_inwards_are_accepted(engine, most):
    """The bounds of 64-bit integers are common."""
    schema = {"type": "integer", "minimum": 0, "maximum": most}
    assert engine.generate("x", json_schema=schema, max_new_tokens=1).generated_tokens == 1


def test_descriptions_and_titles_do_not_count_as_size(engine):
    schema = {"type": "boolean", "description": "d" * 200_000, "title": "t" * 200_000}
    result = engine.generate([1], max_new_tokens=9, temperature=0, json_schema=schema)
    assert result.output_text in ("true", "false")


def test_a_schema_cannot_relax_its_own_validation(engine):
    with pytest.raises(RequestError, match="not"):
        engine.generate(
            "x",
            json_schema={"x-guidance": {"lenient": True}, "not": {"required": ["a"]}},
        )


KEYWORDS = st.sampled_from(
    """type enum const anyOf oneOf allOf items prefixItems properties required minItems maxItems minLength maxLength
    pattern format minimum maximum multipleOf $ref $defs patternProperties additionalProperties minProperties
    maxProperties not if x-guidance odd""".split()
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(
        [*"string object array integer null # #/$defs/a ^a+$ ( date-time".split(), ""]
    )
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYWORDS | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
SCHEMAS = st.dictionaries(KEYWORDS, VALUES, max_size=5)
PIECES = st.sampled_from(
    [
        *"ab.()]|*+?ä^$\\\nx ~&",
        *r'[a-c] [^ {0,1000} {3} \d \p{L} \b (?i) "y" /z/ ::='.split(),
        "start: ",
        "x: ",
        "root ",
        "%json {}",
    ]
)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS)
def test_any_object_is_accepted_or_refused_as_a_schema(engine, schema):
    survives(engine, {"json_schema": schema})


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(PIECES, min_size=1, max_size=12).map("".join), st.sampled_from(["regex", "grammar"])
)
def test_any_text_is_accepted_or_refused_as_an_expression(engine, text, kind):
    survives(engine, {kind: text})


def test_the_maximum_number_of_tools_is_accepted(engine):
    """The grammar of this many tools exceeds the size limit for grammars from callers."""
    properties = {f"p{number}": {"type": "string", "description": "x" * 100} for number in range(6)}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["p0", "p1"],
        "additionalProperties": False,
    }
    tools = [Tool(f"tool_number_{number}", schema) for number in range(int(COUNTS["tools"].high))]
    format = TurnFormat(GENERIC, None, shows_tools=False, replays=True)
    wanted = {"choice": "required", "parallel": False, "reasoning": "closed"}
    made = calls_grammar(format, tools, **wanted, special_id=lambda _: None)
    with pytest.raises(RequestError, match=r"grammar has \d{6} bytes; at most 262144"):
        engine.generate("x", grammar=made)
    text = engine.generate("x", grammar=MadeGrammar(made), max_new_tokens=80, seed=1).output_text
    assert re.search(r'\{\s*"name"\s*:\s*"tool_number_\d+"', text), text
