"""Tests of request normalization: changes without a meaning are undone, meaningful ones stay."""

import json

import pytest

from kvboost_edge.engine.request.answer_ids import AnswerStore, KeptAnswers
from kvboost_edge.server.cache_report.normalization import Normalizer, without_billing

ME, YOU = (KeptAnswers(AnswerStore(), owner, owner) for owner in (b"me", b"you"))
A = {"type": "function", "function": {"name": "a", "parameters": {"x": 1, "y": 2}}}
B = {"type": "function", "function": {"name": "b", "parameters": {}}}
A_TURNED = {"function": {"parameters": {"y": 2, "x": 1}, "name": "a"}, "type": "function"}


def test_equal_tools_keep_their_first_order():
    normalizer = Normalizer()
    assert normalizer.tools(ME, [A, B]) == ([A, B], False)
    tools, changed = normalizer.tools(ME, [B, A_TURNED])
    assert changed
    assert json.dumps(tools) == json.dumps([A, B])
    assert normalizer.tools(YOU, [B, A]) == ([B, A], False)
    other = {"type": "function", "function": {"name": "a", "parameters": {"x": 1, "y": 3}}}
    assert normalizer.tools(ME, [other, B]) == ([other, B], False)


def test_the_order_within_lists_is_kept():
    normalizer = Normalizer()
    one, two = (
        {"type": "function", "function": {"name": "a", "enum": order}} for order in ([1, 2], [2, 1])
    )
    normalizer.tools(ME, [one])
    assert normalizer.tools(ME, [two]) == ([two], False)


def test_call_arguments_keep_their_first_key_order():
    normalizer = Normalizer()

    def said(arguments):
        call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": arguments}}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]

    first, changed = normalizer.messages(ME, said({"x": 1, "y": 2}))
    assert changed == []
    again, changed = normalizer.messages(ME, said({"y": 2, "x": 1}))
    assert changed == ["arguments"]
    assert json.dumps(again) == json.dumps(first)


def test_the_billing_line_of_system_messages_is_removed():
    normalizer = Normalizer()
    text = (
        "x-anthropic-billing-header: cc_version=2.1; cch=ab12;\nYou are a coder.\nKeep "
        "x-anthropic-billing-header: so"
    )
    messages, changed = normalizer.messages(ME, [{"role": "system", "content": text}])
    assert changed == ["billing"]
    assert messages[0]["content"] == "You are a coder.\nKeep x-anthropic-billing-header: so"
    user = [{"role": "user", "content": text}]
    assert normalizer.messages(ME, user) == (user, [])
    assert without_billing("nothing of it") == "nothing of it"


@pytest.mark.parametrize("kinds", [(), ("arguments",)])
def test_each_normalization_can_be_turned_off(kinds):
    normalizer = Normalizer(kinds)
    normalizer.tools(ME, [A, B])
    assert normalizer.tools(ME, [B, A]) == ([B, A], False)
    billed = [{"role": "system", "content": "x-anthropic-billing-header: 1\nhi"}]
    assert normalizer.messages(ME, billed) == (billed, [])


def test_many_salts_do_not_evict_another_keys_entries():
    normalizer = Normalizer()
    normalizer.tools(ME, [A, B])
    large = {"type": "function", "function": {"name": "f", "description": "x" * 400_000}}
    for number in range(200):
        normalizer.tools(YOU._replace(root=str(number).encode()), [large])
    assert normalizer._first.num_bytes <= 64 << 20
    assert normalizer.tools(ME, [B, A]) == ([A, B], True)
    assert normalizer.tools(YOU._replace(root=b"199"), [large, B]) == ([large, B], False)
