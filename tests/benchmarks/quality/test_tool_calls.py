"""Tests of how tool calls of the real model are judged."""

import json

import jsonschema_rs
import pytest

from benchmarks.quality.tool_calls import REQUESTS, TOOLS, is_right, is_valid_call


def call(name, **arguments):
    return {"function": {"name": name, "arguments": json.dumps(arguments)}}


def test_requested_calls_match_their_schemas():
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for question, name, arguments in REQUESTS:
        assert jsonschema_rs.is_valid(schemas[name], arguments), question
        assert is_right(call(name, **arguments), name, arguments)


@pytest.mark.parametrize(
    ("made", "valid", "right"),
    [
        (call("set_timer", minutes=10), True, True),
        (call("set_timer", minutes=11), True, False),
        (call("set_timer", minutes="10"), False, False),
        (call("set_timer"), False, False),
        (call("play_music", artist="10"), True, False),
        (call("nothing", minutes=10), False, False),
        ({"function": {"name": "set_timer", "arguments": '{"minutes": 1'}}, False, False),
    ],
)
def test_a_call_is_valid_and_right(made, valid, right):
    assert is_valid_call(made) == valid
    assert is_right(made, "set_timer", {"minutes": 10}) == right


def test_no_call_is_not_right_and_letters_case_does_not_matter():
    assert not is_right(None, "set_timer", {"minutes": 10})
    assert is_right(call("play_music", artist="Beatles"), "play_music", {"artist": "the beatles"})
