"""Tests of tools for templates without tool support: plain messages with the same content."""

import json

import pytest

from helpers.text.chat_templates import TOOLS, template
from kvboost_edge.text.turns.formats import TurnFormat
from kvboost_edge.text.turns.no_template import GENERIC, with_tools_described
from kvboost_edge.text.turns.parser import CallArguments, CallStart, TurnParser

GIVEN = [
    {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
    for tool in TOOLS
]
CALL = {
    "id": "a",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city":  "Zürich"}'},
}
CHAT = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "yes"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "no"}]},
]


def test_tools_are_described_in_the_system_message():
    told = with_tools_described([{"role": "system", "content": "Be brief."}, CHAT[0]], GIVEN)
    assert [message["role"] for message in told] == ["system", "user"]
    assert told[0]["content"].startswith("Be brief.\n\nYou can call tools.")
    alone = with_tools_described(CHAT[:1], GIVEN)
    assert [message["role"] for message in alone] == ["system", "user"]
    for told_tool, tool in zip(alone[0]["content"].splitlines()[-3:], TOOLS, strict=True):
        assert json.loads(told_tool) == {"name": tool.name, "parameters": tool.parameters}


def test_tools_are_described_to_the_user_without_system_messages():
    told = with_tools_described(
        [{"role": "assistant", "content": "Hello"}, *CHAT[:1]], GIVEN, system=False
    )
    assert [message["role"] for message in told] == ["assistant", "user"]
    assert told[1]["content"].endswith("\n\nRain?")
    assert '"get_weather"' in told[1]["content"]


def test_past_calls_have_the_described_format():
    told = with_tools_described(CHAT, GIVEN)[2]
    assert told == {"role": "assistant", "content": told["content"]}
    parser = TurnParser(
        TurnFormat(GENERIC, None, False, True), TOOLS, reasoning="closed", calls=True
    )
    wanted = [
        part
        for i in range(2)
        for part in (CallStart(i, "get_weather"), CallArguments(i, '{"city":  "Zürich"}'))
    ]
    assert [*parser.push(told["content"]), *parser.close()] == wanted


@pytest.mark.parametrize("tools", [GIVEN, []])
def test_any_template_accepts_described_tools(tools):
    told = with_tools_described(CHAT, tools)
    assert [message["role"] for message in told][-3:] == ["user", "assistant", "user"], (
        "consecutive results must be one message"
    )
    text = template("smollm2").render(told)
    assert "<tool_response>\nyes\n</tool_response>\n<tool_response>\nno\n</tool_response>" in text
    assert ("You can call tools" in text) == bool(tools)


def test_messages_are_not_modified():
    before = json.dumps(CHAT)
    with_tools_described(CHAT, GIVEN)
    assert json.dumps(CHAT) == before
