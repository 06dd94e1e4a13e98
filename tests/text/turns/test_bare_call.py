"""Tests of messages that consist of a call without markers: when they are a call, and when they are
text.
"""

import jsonschema_rs
import pytest

from helpers.text.chat_templates import CALLING, format_of
from kvboost_edge.text.turns.formats import Tool, TurnFormat
from kvboost_edge.text.turns.no_template import GENERIC
from kvboost_edge.text.turns.parser import (
    CallArguments,
    CallStart,
    ContentDelta,
    ReasoningDelta,
    TurnParser,
    merge_parts,
)

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
TOOLS = [WEATHER, Tool("get", {})]
ONE = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
FORMATS = {"hermes": format_of("hermes"), "generic": TurnFormat(GENERIC, None, False, True)}


def accepts(tool, arguments):
    return jsonschema_rs.is_valid(tool.parameters, arguments)


def parser_of(form="hermes", reasoning="closed", **more):
    format = FORMATS.get(form) or format_of(form)
    return TurnParser(format, TOOLS, reasoning=reasoning, calls=True, accepts=accepts, **more)


def read(*texts, form="hermes", reasoning="closed"):
    parser = parser_of(form, reasoning)
    return merge_parts([*(part for text in texts for part in parser.push(text)), *parser.close()])


def call(arguments, name="get_weather"):
    return [CallStart(0, name), CallArguments(0, arguments)]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (ONE, call('{"city": "Paris"}')),
        (f"\n {ONE} \n", call('{"city": "Paris"}')),
        (f"```json\n{ONE}\n```", call('{"city": "Paris"}')),
        (f"```\n{ONE}```\n", call('{"city": "Paris"}')),
        (f"```JSON {ONE}\n\n```", call('{"city": "Paris"}')),
        (
            '{"arguments":{"days":2,\n "city":"Zürich \\"🙂\\" {[" } , "name":"get_weather"}',
            call('{"days":2,\n "city":"Zürich \\"🙂\\" {[" }'),
        ),
        ('{"name": "get", "arguments": {}}', call("{}", "get")),
        (
            '{"name": "g\\u0065t", "arguments": {"a": [1, -2.5e3, {"b": [true, null, [] ]}], "c": false}}',
            call('{"a": [1, -2.5e3, {"b": [true, null, [] ]}], "c": false}', "get"),
        ),
    ],
)
def test_a_single_object_with_or_without_a_fence_is_a_call(form, text, wanted):
    assert read(text, form=form) == wanted
    assert read(*text, form=form) == wanted, "the result must not change character by character"


NO_CALLS = {
    "an object in prose": f"You could write {ONE}",
    "an object with a remark": f"{ONE}\nThis calls the tool.",
    "a fence with a remark": f"```json\n{ONE}\n```\nThis calls the tool.",
    "a remark and a fence": f"For example:\n```json\n{ONE}\n```",
    "two objects": f"{ONE}\n{ONE}",
    "two fences": f"```json\n{ONE}\n```\n```json\n{ONE}\n```",
    "two objects in a fence": f"```json\n{ONE}\n{ONE}\n```",
    "a list": f"[{ONE}]",
    "another language's fence": f"```python\n{ONE}\n```",
    "a fence that is not closed": f"```json\n{ONE}\n",
    "an object that is not closed": ONE[:-1],
    "a quoted line": f"> {ONE}",
    "code in a line": f"`{ONE}`",
    "a tool that is not offered": ONE.replace("get_weather", "add"),
    "a name that a tool's begins with": ONE.replace("get_weather", "get_wea"),
    "arguments that do not fit": ONE.replace('"Paris"', "3"),
    "an argument that there is not": ONE.replace("city", "town"),
    "arguments as text": '{"name": "get", "arguments": "{}"}',
    "no arguments": '{"name": "get"}',
    "no name": '{"arguments": {}}',
    "one more member": '{"name": "get", "arguments": {}, "id": "1"}',
    "a member twice": '{"name": "get", "name": "get_weather", "arguments": {"city": "Paris"}}',
    "parameters": '{"name": "get", "parameters": {}}',
    "a person": '{"name": "Alice", "age": 30}',
    "another object": '{"city": "Paris"}',
    "JSON with a comma too many": '{"name": "get", "arguments": {"a": 1,}}',
    "JSON with a remark": '{"name": "get", "arguments": {} // none\n}',
    "Python": "{'name': 'get', 'arguments': {}}",
    "Python's names": '{"name": "get", "arguments": {"a": True}}',
    "a number with a zero in front": '{"name": "get", "arguments": {"a": 01}}',
    "an end of line in a string": '{"name": "get", "arguments": {"a": "x\ny"}}',
    "an escape that there is not": '{"name": "get", "arguments": {"a": "\\x"}}',
    "too deep": '{"name": "get", "arguments": {"a": ' + "[" * 80 + "]" * 80 + "}}",
    "nothing": "{}",
    "a fence of nothing": "```json\n```",
}


@pytest.mark.parametrize("text", NO_CALLS.values(), ids=NO_CALLS)
def test_an_example_stays_text(text):
    assert read(text) == [ContentDelta(text)]
    assert read(*text) == [ContentDelta(text)], "the result must not change character by character"


@pytest.mark.parametrize("form", [*CALLING])
def test_only_formats_with_json_calls_have_bare_calls(form):
    """Only hermes and qwen3 wrap JSON objects in markers. For some other families bare JSON is the
    regular format.
    """
    wraps = format_of(form).calls.wraps_objects
    assert wraps == (form in ("hermes", "qwen3"))


def test_without_a_schema_check_a_bare_call_is_text():
    parser = TurnParser(FORMATS["hermes"], TOOLS, reasoning="closed", calls=True)
    assert merge_parts([*parser.push(ONE), *parser.close()]) == [ContentDelta(ONE)]


@pytest.mark.parametrize(
    ("front", "rest"),
    [
        ("H", "ello"),
        ("``x", "y"),
        ("```p", "ython\n"),
        ("```json\n[", "1]\n```"),
        ('{"city"', ": 1}"),
        ('{"name": "Alice"', ', "age": 30}'),
        ('{"name": "get", "arguments": [', "]}"),
        ('{"name": "get", "arguments": {"a": T', 'rue}, "b": "..."}'),
        ('{"name": "get", "arguments": {"a" 1', "}}"),
        ('{"name": "get", "arguments": {"a": "x\n', 'y"}}'),
        ('{"name": "get_weather", "arguments": {"city": 3}', "}"),
        (f"{ONE} T", "his calls the tool."),
        (f"```json\n{ONE}\n```\n\nT", "his calls the tool."),
    ],
)
def test_text_is_emitted_once_it_cannot_be_a_call(front, rest):
    """The last character of `front` rules out a call."""
    parser = parser_of()
    early = [part for letter in front[:-1] for part in parser.push(letter)]
    shown = parser.push(front[-1])
    assert early == []
    assert merge_parts(shown)[0].text.strip() == front.strip()
    assert merge_parts([*shown, *parser.push(rest), *parser.close()]) == [
        ContentDelta(front + rest)
    ]


def test_a_bare_call_is_emitted_at_the_end_of_the_message():
    parser = parser_of()
    assert [part for letter in f"```json\n{ONE}\n```\n" for part in parser.push(letter)] == []
    assert parser.close() == call('{"city": "Paris"}')


def test_a_bare_call_may_follow_reasoning():
    found = read(*f"<think>\nHm.\n</think>\n\n{ONE}", form="qwen3", reasoning="possible")
    assert found == [ReasoningDelta("Hm."), *call('{"city": "Paris"}')]


def test_marked_calls_are_found_after_text_that_is_not_a_bare_call():
    marked = f"<tool_call>\n{ONE}\n</tool_call>"
    assert read(*marked) == call('{"city": "Paris"}')
    text = '{"name": "Alice"}'
    assert read(*f"{text}\n{marked}") == [ContentDelta(text), *call('{"city": "Paris"}')]
