"""Tests of the parser of Gemma's tool calls: any string, any depth, any cut."""

import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.text import turn_parts
from helpers.text.chat_templates import format_of, written
from helpers.text.turn_parts import arguments_of
from kvboost_edge.text.turns.formats import Tool
from kvboost_edge.text.turns.parser import CallArguments, CallStart, ContentDelta, TurnParser

ANY = [Tool("f", {}), Tool("find", {"type": "object", "properties": {"text": {"type": "string"}}})]
QUOTES = {"gemma4": '<|"|>', "escaped": "<escape>"}
EACH = pytest.mark.parametrize("name", QUOTES)
DEEP = 300


parts_of = functools.partial(turn_parts.parts_of, tools=ANY)


def deep(levels):
    value = "}"
    for level in range(levels):
        value = {"k": value} if level % 2 else [value, level]
    return {"a": value}


HOSTILE = [
    {},
    {"a": ""},
    {"a": "}"},
    {"a": "},b:1}<tool_call|", "b": "<|tool_call>call:f{a:1}<tool_call|>"},
    {"a": '<|"|', "b": "<escape", "c": '"\\"\n\t\x00\x7f', "d": '<|"|<|tool_response>response:f{'},
    {"a": "Zürich 🙂 \u2028  line", "größe": "x", "two words": "y"},
    {"a": [], "b": {}, "c": [{}, []], "d": [[1], [True, None, -1.5e-7]]},
    {
        "a": "true",
        "b": "12",
        "c": " null ",
        "d": True,
        "e": False,
        "f": None,
        "g": 12345678901234567890,
    },
    deep(32),
    deep(33),
]


@EACH
@pytest.mark.parametrize("arguments", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_arguments_parse_at_any_split(name, arguments):
    text = f"So: {written(name, [('f', arguments), ('f', {'z': 1})])} And."
    whole = parts_of(name, text)
    assert [part for part in whole if isinstance(part, ContentDelta)] == [
        ContentDelta("So:"),
        ContentDelta("And."),
    ]
    assert arguments_of(whole) == [arguments, {"z": 1}]
    for at in range(len(text) + 1):
        assert parts_of(name, text[:at], text[at:]) == whole
    assert parts_of(name, *text) == whole, "the result must not change character by character"


@EACH
def test_deep_arguments_do_not_overflow_the_stack(name):
    """The depth exceeds that of any template."""
    quote = QUOTES[name]
    calls = format_of(name).calls
    assert calls is not None
    text = f"{calls.before}f{{a:{'[' * DEEP}{quote}x{quote}{']' * DEEP}}}{calls.after}"
    (arguments,) = arguments_of(parts_of(name, text))
    assert json.dumps(arguments["a"]) == "[" * DEEP + '"x"' + "]" * DEEP
    assert parts_of(name, *text) == parts_of(name, text)
    long = f"{calls.before}f{{a:{'[' * 50_000}"
    assert arguments_count(parts_of(name, long)) == 50_000


def arguments_count(parts):
    return sum(part.text.count("[") for part in parts if isinstance(part, CallArguments))


KEYS = st.text(
    st.characters(exclude_characters=':,{}[]\n<"', exclude_categories=("C", "Z")),
    min_size=1,
    max_size=9,
)
NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))


def values(quote):
    letters = st.one_of(st.text(), st.text(st.sampled_from([*quote, *"{}[],:\\ \n", "a"])))
    # A marker may end only at the end of the string.
    texts = letters.filter(lambda text: (text + quote).index(quote) == len(text))
    leaves = st.one_of(texts, NUMBERS, st.booleans(), st.none())
    return st.recursive(
        leaves, lambda one: st.lists(one) | st.dictionaries(KEYS, one), max_leaves=9
    )


@pytest.mark.parametrize("examples", [25, pytest.param(300, marks=pytest.mark.full)])
def test_template_output_round_trips(examples):
    settings(max_examples=examples)(given(st.data())(check_written))()


def check_written(data):
    name = data.draw(st.sampled_from([*QUOTES]))
    arguments = data.draw(st.dictionaries(KEYS, values(QUOTES[name]), max_size=4))
    text = written(name, [("f", arguments)])
    whole = parts_of(name, text)
    assert arguments_of(whole) == [arguments]
    assert len(whole) == 2
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parts_of(name, *pieces) == whole


def call(inner, end="<tool_call|>"):
    return f"<|tool_call>call:f{{{inner}{end}"


@pytest.mark.parametrize(
    ("inner", "wanted"),
    [
        (" a : 1 , b : [ 1 , 2 , ] , }", {"a": 1, "b": [1, 2]}),
        ("\na:\n{\n}\n}", {"a": {}}),
        ("a:True,b:None,c:False}", {"a": True, "b": None, "c": False}),
        ("a:New York,b:NaN}", {"a": "New York", "b": "NaN"}),
        ('a:"x",<|"|>b, c<|"|>:1}', {"a": "x", "b, c": 1}),
        ('a:<|"|>x<|"|>', {"a": "x"}),
        ("a:{b:[1", {"a": {"b": [1]}}),
    ],
)
def test_minor_syntax_errors_are_tolerated(inner, wanted):
    found = parts_of("gemma4", call(inner))
    assert (arguments_of(found), found[0], len(found)) == ([wanted], CallStart(0, "f"), 2)


@pytest.mark.parametrize(
    "text",
    [
        call("a}"),
        call("a:}"),
        call(":1}"),
        call(",a:1}"),
        call("1}"),
        call("a:,b:1}"),
        call("a" * 300 + ":1}"),
        call("a:" + "1" * 300 + "}"),
        "<|tool_call>call:g{a:1}<tool_call|>",
        "<|tool_call>f{a:1}<tool_call|>",
        "<|tool_call>call:f(a:1)<tool_call|>",
        "call:f{a:1}",
    ],
)
def test_text_that_is_not_a_call_is_content(text):
    assert parts_of("gemma4", text) == [ContentDelta(text)]
    assert parts_of("gemma4", *text) == [ContentDelta(text)]


@pytest.mark.parametrize(
    ("inner", "wanted", "rest"),
    [
        ("a:1;b:2}", '{"a": "1;b:2"}', ""),
        ("a:1,b}", '{"a": 1}', ",b}<tool_call|>"),
        ("a:{b:[1,{c:}]}}", '{"a": {"b": [1, {}]}}', "c:}]}}<tool_call|>"),
        ("a:[1 {", '{"a": [1]}', "{<tool_call|>"),
    ],
)
def test_text_after_a_call_is_content(inner, wanted, rest):
    found = parts_of("gemma4", call(inner))
    assert found[:2] == [CallStart(0, "f"), CallArguments(0, wanted)]
    assert found[2:] == ([ContentDelta(rest)] if rest else [])
    assert parts_of("gemma4", *call(inner)) == found


def test_bare_words_are_strings_if_the_schema_says_so():
    found = parts_of("gemma4", "<|tool_call>call:find{text:12,other:12,in:{text:12}}<tool_call|>")
    assert arguments_of(found) == [{"text": "12", "other": 12, "in": {"text": 12}}]


def test_arguments_are_streamed():
    parser = TurnParser(format_of("gemma4"), ANY, reasoning="closed", calls=True)
    assert parser.push("Look <|tool_call>call:f{a:") == [ContentDelta("Look")]
    assert parser.push('<|"') == []
    assert parser.push('|>L"A') == [CallStart(0, "f"), CallArguments(0, '{"a": "L\\"A')]
    assert parser.push('q<|"') == [CallArguments(0, "q")]
    assert parser.push('|>,b:[{c:<|"|>x') == [CallArguments(0, '", "b": [{"c": "x')]
    assert parser.push('<|"|>},12') == [CallArguments(0, '"}')]
    assert parser.push("]}<tool_c") == [CallArguments(0, ", 12]}")]
    assert parser.push("all|><|tool_call>call:f{}") == [CallStart(1, "f"), CallArguments(1, "{}")]
    assert parser.push("<tool_call|>\nDone.") == [ContentDelta("Done.")]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("f{", None),
        ("f{a:", None),
        ('f{a:<|"|>', '{"a": "'),
        ('f{a:<|"|>x<|"', '{"a": "x'),
        ("f{a:{b:1", '{"a": {'),
        ("f{a:[1,", '{"a": [1'),
    ],
)
def test_a_truncated_call_keeps_its_partial_arguments(text, wanted):
    found = parts_of("gemma4", f"<|tool_call>call:{text}")
    assert found == [CallStart(0, "f"), *([CallArguments(0, wanted)] if wanted else [])]
