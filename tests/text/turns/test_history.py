"""Tests of arguments of past calls: they have the type that the template needs, in whatever form
the client sent them.
"""

import json

import pytest

from kvboost_edge.text.turns.formats import CallFormat
from kvboost_edge.text.turns.replay import object_text, with_arguments, with_objects


def given(arguments):
    calls = [{"id": "a", "function": {"name": "f", "arguments": arguments}}]
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]


@pytest.mark.parametrize(
    ("as_text", "arguments", "wanted"),
    [
        (False, '{"a": "é"}', {"a": "é"}),
        (False, {"a": 1}, {"a": 1}),
        (False, '{"a": ', '{"a": '),
        (True, {"a": "é"}, '{"a": "é"}'),
        (True, '{"a":1}', '{"a":1}'),
    ],
)
def test_arguments_have_the_form_the_template_expects(as_text, arguments, wanted):
    calls = CallFormat("json", "<tool_call>", arguments_as_text=as_text)
    assert with_arguments(given(arguments), calls) == given(wanted)


def test_unknown_templates_get_objects():
    assert with_arguments(given('{"a": 1}'), None) == given({"a": 1})
    odd = [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}, 3]}]
    assert with_arguments(odd, None) == odd


@pytest.mark.parametrize(
    "text", ['{"city": "Bo', "", "[1]", '"x"', "null", "[" * 100_000, '{"a": "\\ud800"}']
)
def test_text_that_is_not_an_object_becomes_part_of_one(text):
    wanted = {"INVALID_JSON": text}
    kept = with_arguments(given(text), None)
    assert kept == given(text)
    assert with_objects(kept, None) == given(wanted)
    calls = CallFormat("json", "<tool_call>", arguments_as_text=True)
    (_, message) = with_objects(with_arguments(given(text), calls), calls)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == wanted
    assert json.loads(object_text(text)) == wanted


@pytest.mark.parametrize("text", ['{"a":  1}', "{}", '{"é": [{}]}'])
def test_objects_are_not_wrapped(text):
    calls = CallFormat("json", "<tool_call>", arguments_as_text=True)
    assert with_objects(given(text), calls) == given(text)
    assert with_objects(given(json.loads(text)), None) == given(json.loads(text))
    assert object_text(text) == text
