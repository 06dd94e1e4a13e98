"""What clients change without meaning anything by it is as it was first; what they mean stays."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvboost_edge.server.doctor.normalise import Normaliser, without_billing

A: dict[str, Any] = {"type": "function", "function": {"name": "a", "parameters": {"x": 1, "y": 2}}}
B: dict[str, Any] = {"type": "function", "function": {"name": "b", "parameters": {}}}
A_TURNED: dict[str, Any] = {"function": {"parameters": {"y": 2, "x": 1}, "name": "a"}, "type": "function"}


def test_tools_that_are_the_same_keep_their_first_order() -> None:
    normaliser = Normaliser()
    assert normaliser.tools(b"me", [A, B]) == ([A, B], False)
    tools, changed = normaliser.tools(b"me", [B, A_TURNED])
    assert changed
    assert json.dumps(tools) == json.dumps([A, B])
    assert normaliser.tools(b"you", [B, A]) == ([B, A], False)
    other = {"type": "function", "function": {"name": "a", "parameters": {"x": 1, "y": 3}}}
    assert normaliser.tools(b"me", [other, B]) == ([other, B], False)


def test_the_order_inside_of_lists_is_meant() -> None:
    normaliser = Normaliser()
    one, two = ({"type": "function", "function": {"name": "a", "enum": order}} for order in ([1, 2], [2, 1]))
    normaliser.tools(b"", [one])
    assert normaliser.tools(b"", [two]) == ([two], False)


def test_arguments_of_calls_keep_the_order_of_their_keys() -> None:
    normaliser = Normaliser()

    def said(arguments: dict[str, Any]) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": arguments}}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]

    first, changed = normaliser.messages(b"", said({"x": 1, "y": 2}))
    assert changed == []
    again, changed = normaliser.messages(b"", said({"y": 2, "x": 1}))
    assert changed == ["arguments"]
    assert json.dumps(again) == json.dumps(first)


def test_the_billing_line_of_system_messages_is_left_out() -> None:
    normaliser = Normaliser()
    text = (
        "x-anthropic-billing-header: cc_version=2.1; cch=ab12;\nYou are a coder.\nKeep x-anthropic-billing-header: so"
    )
    messages, changed = normaliser.messages(b"", [{"role": "system", "content": text}])
    assert changed == ["billing"]
    assert messages[0]["content"] == "You are a coder.\nKeep x-anthropic-billing-header: so"
    user = [{"role": "user", "content": text}]
    assert normaliser.messages(b"", user) == (user, [])
    assert without_billing("nothing of it") == "nothing of it"


@pytest.mark.parametrize("kinds", [(), ("arguments",)])
def test_each_can_be_switched_off(kinds: tuple[str, ...]) -> None:
    normaliser = Normaliser(kinds)
    normaliser.tools(b"", [A, B])
    assert normaliser.tools(b"", [B, A]) == ([B, A], False)
    billed = [{"role": "system", "content": "x-anthropic-billing-header: 1\nhi"}]
    assert normaliser.messages(b"", billed) == (billed, [])


def test_what_is_remembered_is_bounded() -> None:
    normaliser = Normaliser()
    for number in range(100):
        normaliser.tools(str(number).encode(), [A, B])
    assert len(normaliser._spaces) == 64
    for number in range(100):
        large = {"type": "function", "function": {"name": f"f{number}", "description": "x" * 20_000}}
        normaliser.tools(b"one", [large])
    assert normaliser._spaces[b"one"].num_bytes <= 1 << 20
