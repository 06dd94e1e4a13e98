"""Tests of the grammars of tool calls: each family's own format, with arguments that match the
schema.
"""

import functools
import re

import jsonschema_rs
import pytest

from helpers.pairwise import pairwise
from helpers.text.chat_templates import CALLING, MARKERS, TOOLS, format_of, written
from helpers.text.grammars import Vocabulary
from helpers.text.turn_parts import arguments_of, calls_of, parts_of
from kvboost_edge.errors import RequestError
from kvboost_edge.text.turns.call_grammar import answer_grammar, calls_grammar
from kvboost_edge.text.turns.formats import Tool, TurnFormat
from kvboost_edge.text.turns.parser import ReasoningDelta

PARIS = ("get_weather", {"city": "Paris", "days": 3, "unit": "c"})
POINT = ("get", {"at": {"x": -4}})
PING = ("ping", {})
EITHER = pytest.mark.parametrize("markers", [False, True], ids=["as text", "as special tokens"])
EACH = pytest.mark.parametrize("name", CALLING)


@functools.cache
def vocabulary(markers):
    return Vocabulary(MARKERS[1::2], MARKERS[::2]) if markers else Vocabulary()


def grammar(
    name,
    markers,
    *,
    choice="required",
    parallel=True,
    reasoning="closed",
    tools=TOOLS,
):
    return calls_grammar(
        format_of(name),
        tools,
        choice=choice,
        parallel=parallel,
        reasoning=reasoning,
        special_id=vocabulary(markers).codec.marker_id,
    )


@EACH
@EITHER
@pytest.mark.some(2)
def test_calls_in_the_templates_format_are_accepted(name, markers):
    words = vocabulary(markers)
    for calls in ([PARIS], [POINT], [PING], [("get_weather", {"city": ""})]):
        text = written(name, calls)
        assert words.takes(grammar(name, markers), text)
        assert words.takes(grammar(name, markers, choice="auto"), text)
        assert not words.takes(grammar(name, markers, choice="none"), text)


@EACH
@EITHER
@pytest.mark.some(2)
def test_parallel_calls_are_accepted_if_allowed(name, markers):
    if name == "llama3":
        assert "another" not in grammar(name, markers), (
            "the template accepts only one call, so the grammar must too"
        )
        return
    text = written(name, [PARIS, PING, PARIS])
    for choice in ("required", "auto"):
        assert vocabulary(markers).takes(grammar(name, markers, choice=choice), text)
        assert not vocabulary(markers).takes(
            grammar(name, markers, choice=choice, parallel=False), text
        )


@EACH
@EITHER
@pytest.mark.some(3)
def test_invalid_calls_are_rejected(name, markers):
    words = vocabulary(markers)
    wrong = [
        [("hack", {"city": "Paris"})],
        [("get_weather", {"days": 3})],
        [("get_weather", {"city": "Paris", "days": 300})],
        [("get_weather", {"city": "Paris", "unit": "k"})],
        [("get", {"at": {"x": "1"}})],
        [("ping", {"city": "Paris"})],
    ]
    for calls in wrong:
        assert not words.takes(grammar(name, markers), written(name, calls)), calls
        if name != "llama3":  # without a marker, text that is not a call is an answer
            assert not words.takes(grammar(name, markers, choice="auto"), written(name, calls)), (
                calls
            )
    assert not words.takes(grammar(name, markers), "Hello")
    assert not words.takes(grammar(name, markers), "")
    assert not words.takes(grammar(name, markers, tools=TOOLS[1:]), written(name, [PARIS])), (
        "a call of a tool that was not offered must be rejected"
    )


@EACH
@EITHER
@pytest.mark.some(2)
def test_integers_of_calls_are_limited_to_16_digits(name, markers):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    made = grammar(name, markers, tools=(Tool("count", schema),))
    takes = vocabulary(markers).takes
    assert takes(made, written(name, [("count", {"n": 10**16 - 2})]))
    assert not takes(made, written(name, [("count", {"n": 10**16})]))


@EACH
@EITHER
@pytest.mark.some(2)
def test_text_is_free_outside_calls(name, markers):
    words = vocabulary(markers)
    for choice in ("auto", "none"):
        for text in ("Hello <b>you</b> [1]", '{"a": 1}', '{"name": "Bob"}', "", "x < y"):
            assert words.takes(grammar(name, markers, choice=choice), text)
    if name != "llama3":
        text = "I shall look.\n\n" + written(name, [PARIS])
        assert words.takes(grammar(name, markers, choice="auto"), text)
        assert not words.takes(grammar(name, markers, choice="none"), text)
        assert not words.takes(grammar(name, markers, choice="auto"), text + "And more.")


def test_white_space_around_markers_is_free_and_bounded():
    words = vocabulary(False)
    for space in ("", " ", "\n", "\r\n", "\n\n"):
        call = f'<tool_call>{space}{{"name": "ping", "arguments": {{}}}}{space}</tool_call>'
        assert words.takes(grammar("hermes", False, choice="auto"), call)
    assert not words.takes(
        grammar("hermes", False), f'<tool_call>{" " * 9}{{"name": "ping", "arguments": {{}}}}'
    )


def test_a_token_may_extend_past_the_marker():
    """If the marker consists of several text tokens, the generated tokens may cut it anywhere."""
    words = Vocabulary((), ('l>{"na', "_call>\n{", "see <to"))
    made = calls_grammar(
        format_of("hermes"),
        TOOLS,
        choice="auto",
        parallel=True,
        reasoning="closed",
        special_id=words.codec.marker_id,
    )
    for text in (
        '<tool_call>{"name": "ping", "arguments": {}}</tool_call>',
        'see <tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
    ):
        assert words.takes(made, text)
    assert not words.takes(made, 'see <tool_call>\n{"name": "pong", "arguments": {}}\n</tool_call>')


@EITHER
@pytest.mark.parametrize("name", ["qwen3", "glm", "deepseek"])
def test_reasoning_may_precede_calls(name, markers):
    words = vocabulary(markers)
    call = written(name, [PARIS])
    thought = "Hm?" if markers else f"Hm, {call}?"  # reasoning text cannot contain special tokens
    for choice in ("auto", "required"):
        possible = grammar(name, markers, choice=choice, reasoning="possible")
        assert words.takes(possible, f"<think>\n{thought}\n</think>\n\n{call}")
        assert words.takes(possible, call)
        assert not words.takes(possible, f"<think>\n{thought}{call}")
        opened = grammar(name, markers, choice=choice, reasoning="opened")
        assert words.takes(opened, f"{thought}\n</think>\n\n{call}")
        assert not words.takes(opened, call)
    none = grammar(name, markers, choice="none", reasoning="opened")
    assert words.takes(none, f"{thought}\n</think>\n\nHello")
    assert not words.takes(none, f"Hm</think>{call}")


@pytest.mark.parametrize(
    ("name", "markers", "reasoning"), pairwise(CALLING, (False, True), ("closed", "possible"))
)
@pytest.mark.some(6)
def test_random_text_under_the_grammar_parses_into_valid_calls(name, markers, reasoning):
    format = format_of(name)
    words = vocabulary(markers)
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    assert format.calls is not None
    end = "</think>" if format.reasoning is None else format.reasoning.end
    wanted = [
        piece for piece in ('"', format.calls.argument_after, format.calls.quote, end) if piece
    ]
    ended = 0
    for seed in range(8):
        text, whole = words.sample(
            grammar(name, markers, reasoning=reasoning), seed, [*wanted, "1"]
        )
        parts = parts_of(format, text, reasoning=reasoning)
        if not whole:
            continue
        ended += 1
        calls = calls_of([part for part in parts if not isinstance(part, ReasoningDelta)])
        assert calls, text
        for tool, given in calls:
            jsonschema_rs.validate(schemas[tool], given)
    assert ended >= 3


@EITHER
def test_a_json_answer_follows_the_reasoning(markers):
    words = vocabulary(markers)
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/b"}},
        "required": ["a"],
        "$defs": {"b": {"enum": [1, "x"]}},
    }
    made = functools.partial(
        answer_grammar, format_of("qwen3"), schema, special_id=words.codec.marker_id
    )
    assert words.takes(made(reasoning="closed"), '{"a": "x"}')
    assert words.takes(made(reasoning="opened"), 'so {"a": 2}\n</think>\n\n{"a": 1}')
    assert words.takes(made(reasoning="possible"), '<think>so</think>{"a": 1}')
    assert words.takes(made(reasoning="possible"), '{"a": 1}')
    assert not words.takes(made(reasoning="opened"), '{"a": 1}')
    assert not words.takes(made(reasoning="possible"), '<think>so</think>{"a": 2}')


def test_impossible_grammars_are_refused_by_name():
    unknown = TurnFormat(None, None, True, True)
    with pytest.raises(
        RequestError, match="tool-call format of the model's chat template is not supported"
    ):
        calls_grammar(
            unknown,
            TOOLS,
            choice="auto",
            parallel=True,
            reasoning="closed",
            special_id=lambda _: None,
        )
    with pytest.raises(RequestError, match="'required' needs at least one tool"):
        grammar("hermes", False, tools=[])


@EITHER
def test_python_style_values_are_accepted_in_python_style_calls(markers):
    words = vocabulary(markers)
    tool = Tool(
        "f",
        {
            "properties": {
                "on": {"type": "boolean"},
                "a": {"type": "string"},
                "b": {"enum": ["x", "y"]},
            }
        },
    )
    for arguments in ("", "on=True", "on=false, a='it', b='y'", 'a="it", b="x"', "b = 'x' "):
        for free, text in ((tool, f"f({arguments})"), (Tool("f", {}), f"f({arguments})")):
            call = f"<|tool_call_start|>[{text}]<|tool_call_end|>"
            assert words.takes(grammar("lfm2", markers, tools=[free]), call), call
    for arguments in (
        "on='True'",
        "a='it' b='y'",
        "b='z'",
        "a='it', on=True",
        "on=True,",
        "c=1",
        "a=1",
    ):
        call = f"<|tool_call_start|>[f({arguments})]<|tool_call_end|>"
        assert not words.takes(grammar("lfm2", markers, tools=[tool]), call), call


# -- names of keywords --

NAMES = ("größe", "$filter", "two words")


def test_keywords_of_any_letters_are_accepted():
    tool = Tool(
        "find", {"type": "object", "properties": {name: {"type": "string"} for name in NAMES}}
    )
    text = written("lfm2", [("find", dict.fromkeys(NAMES, "x"))])
    for markers in (False, True):
        assert vocabulary(markers).takes(grammar("lfm2", markers, tools=[tool]), text)
    (found,) = arguments_of(parts_of(format_of("lfm2"), *text, tools=[tool]))
    assert found == dict.fromkeys(NAMES, "x")


@pytest.mark.parametrize("wrong", ["a=b", "a[0]", 'say "x"', "a,b", " a", "", "a" * 257])
def test_invalid_keywords_are_refused_by_name(wrong):
    tool = Tool("find", {"type": "object", "properties": {wrong: {"type": "string"}}})
    with pytest.raises(RequestError, match=re.escape(repr(wrong))):
        grammar("lfm2", False, tools=[tool])
