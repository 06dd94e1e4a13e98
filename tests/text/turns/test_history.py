"""Tests of arguments of past calls: they have the type that the template needs, in whatever form
the client sent them.
"""

import pytest

from kvboost_edge.text.turns.formats import CallFormat
from kvboost_edge.text.turns.replay import with_arguments


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
