"""Tests of tool-call arguments as values, including numbers that JSON allows and a response cannot
contain.
"""

import json
import sys

import pytest

from helpers.server.compat_apis import APIS
from kvboost_edge.server.api.compat.arguments import arguments_of

SCHEMA = {"type": "object", "properties": {"days": {"type": "number"}}, "required": ["days"]}
MOST = sys.float_info.max


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('{"a": [1e999, -1e999, 1.5]}', {"a": [MOST, -MOST, 1.5]}),
        ('{"a": 12345678901234567890123}', {"a": 12345678901234567890123}),
        ("{}", {}),
    ],
)
def test_numbers_beyond_float64_become_the_largest_float64(text, values):
    assert arguments_of(text) == values


@pytest.mark.parametrize(
    "text", ['{"a": ', "", '{"a": NaN}', "Infinity", '{"a": ' + "1" * 5000 + "}"]
)
def test_invalid_json_arguments_are_refused(text):
    with pytest.raises(ValueError, match=r"."):
        arguments_of(text)


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
async def test_an_answer_with_an_overflowing_number_is_returned(path, app, speaker):
    """The grammar of numbers allows -1e999; the response contains the largest finite value instead."""
    speaker.text = '<tool_call>\n{"name": "weather", "arguments": {"days": -1e999}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    api = APIS[path]
    answer = await api.ask(app, api.body(tools=[tool]))
    assert api.said(answer).calls == [("weather", json.dumps({"days": -MOST}))]
