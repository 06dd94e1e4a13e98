"""/v1/messages in Anthropic's shape: blocks, events, tools, thinking. The model says what a test wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.server.api_bodies import named_events
from kvboost_edge.server.api.dialects.anthropic.answers import ErrorAnswer, MessageAnswer
from server.api.test_tools import ARGUMENTS, CALL, CLOCK, WEATHER, Speaker

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASK = [{"role": "user", "content": "And the weather?"}]
TOOLS = [
    {"name": "weather", "description": "Weather of a city", "input_schema": WEATHER["parameters"]},
    {**CLOCK, "input_schema": {"type": "object"}},
]
THINKS = {"type": "enabled", "budget_tokens": 1024}
THOUGHT = "<think>\nIt may rain.\n</think>\n\n"


async def ask(app: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    answer = await app.post(PATH, json={"messages": ASK, "max_tokens": 300, "temperature": 0, **more})
    assert answer.status_code == 200, answer.text
    MessageAnswer.model_validate_json(answer.content, strict=True)
    found: dict[str, Any] = answer.json()
    return found


async def told(app: httpx.AsyncClient, **more: Any) -> list[dict[str, Any]]:
    """The events of a stream; each is named as its data says."""
    body = {"messages": ASK, "max_tokens": 300, "temperature": 0, "stream": True, **more}
    return named_events(await app.post(PATH, json=body))


def gathered(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events, as Anthropic's does."""
    assert [event["type"] for event in events[:1] + events[-2:]] == ["message_start", "message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    arguments: dict[int, str] = {}
    is_open = False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert (event["index"], is_open) == (len(message["content"]), False)
                message["content"].append(event["content_block"])
                is_open = True
            case "content_block_stop":
                assert (event["index"], is_open) == (len(message["content"]) - 1, True)
                is_open = False
            case "content_block_delta":
                assert (event["index"], is_open) == (len(message["content"]) - 1, True)
                block, delta = message["content"][-1], dict(event["delta"])
                kind = delta.pop("type").removesuffix("_delta")
                if kind == "input_json":
                    arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
                else:
                    ((name, text),) = delta.items()
                    assert kind == name
                    block[name] += text
            case other:
                raise AssertionError(other)
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    assert not is_open
    return {**message, **events[-2]["delta"], "usage": {**message["usage"], **events[-2]["usage"]}}


def blocks_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The content without ids, which are drawn."""
    return [{name: item for name, item in block.items() if name != "id"} for block in message["content"]]


async def refused(app: httpx.AsyncClient, **more: Any) -> str:
    answer = await app.post(PATH, content=json.dumps({"messages": ASK, "max_tokens": 9, **more}))
    assert answer.status_code == 400, answer.text
    error = ErrorAnswer.model_validate_json(answer.content, strict=True).error
    assert error.type == "invalid_request_error"
    return error.message


SAYINGS = [
    "It is fine.",
    "",
    f"{THOUGHT}It is fine.",
    f"Let me look.\n{CALL}",
    f"{THOUGHT}{CALL}\n{CALL}",
    f"{THOUGHT}Let me look.\n{CALL}",
]


@pytest.mark.parametrize("text", SAYINGS)
@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_a_stream_says_what_a_whole_answer_says(
    app: httpx.AsyncClient, speaker: Speaker, spoken_engine: Any, text: str, tools: Any
) -> None:
    speaker.text = text
    more = {"thinking": THINKS, "tools": tools, "system": "Be brief."}
    whole = await ask(app, **more)
    spoken_engine.reset_cache()
    streamed = gathered(await told(app, **more))
    assert blocks_of(streamed) == blocks_of(whole)
    for name in ("stop_reason", "stop_sequence", "usage", "role", "type", "model"):
        assert streamed[name] == whole[name], name


async def test_blocks_come_in_their_order(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = f"{THOUGHT}Let me look.\n{CALL}"
    answer = await ask(app, tools=TOOLS, thinking=THINKS)
    assert blocks_of(answer) == [
        {"type": "thinking", "thinking": "It may rain.", "signature": "unsigned"},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "name": "weather", "input": ARGUMENTS},
    ]
    assert answer["stop_reason"] == "tool_use"
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 10
    assert answer["usage"]["output_tokens"] > answer["usage"]["output_tokens_details"]["thinking_tokens"]


async def test_thoughts_can_be_left_out_of_what_is_shown(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = f"{THOUGHT}Fine."
    thinking = {**THINKS, "display": "omitted"}
    whole, streamed = await ask(app, thinking=thinking), gathered(await told(app, thinking=thinking))
    assert blocks_of(whole) == blocks_of(streamed)
    assert [block.get("thinking") for block in whole["content"]] == ["", None]


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {"type": "adaptive"}, THINKS])
async def test_the_template_is_told_whether_to_think(
    app: httpx.AsyncClient, speaker: Speaker, spoken_engine: Any, thinking: Any
) -> None:
    speaker.text = "Fine."
    thinks = thinking is not None and thinking["type"] != "disabled"
    prompt = spoken_engine.tokenizer.encode_chat(ASK, variables={"enable_thinking": thinks})
    usage = (await ask(app, thinking=thinking))["usage"]
    assert usage["input_tokens"] == len(prompt)
    counted = await app.post(COUNT, json={"messages": ASK, "thinking": thinking})
    assert counted.json() == {"input_tokens": len(prompt)}


async def test_why_it_ended(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "One, two, three."
    ends = {
        "end_turn": {},
        "max_tokens": {"max_tokens": 3},
        "stop_sequence": {"stop_sequences": ["four", "two", ", two"]},
    }
    for reason, more in ends.items():
        whole, streamed = await ask(app, **more), gathered(await told(app, **more))
        assert (whole["stop_reason"], streamed["stop_reason"]) == (reason, reason)
        stop = ", two" if reason == "stop_sequence" else None  # of those that end at one place the longest
        assert (whole["stop_sequence"], streamed["stop_sequence"]) == (stop, stop)
        assert blocks_of(whole) == blocks_of(streamed)
    assert blocks_of(whole) == [{"type": "text", "text": "One"}]


async def test_more_tokens_than_the_context_holds_may_be_asked_for(
    app: httpx.AsyncClient, speaker: Speaker, spoken_engine: Any
) -> None:
    """As agents do; an answer that fills the context says so."""
    speaker.text = "Fine."
    assert (await ask(app, max_tokens=1_000_000))["stop_reason"] == "end_turn"
    speaker.text = "x" * 9000
    answer = await ask(app, max_tokens=1_000_000, messages=[{"role": "user", "content": "y" * 7500}])
    assert answer["stop_reason"] == "model_context_window_exceeded"
    used = answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"]
    assert used == spoken_engine.runner_info.max_context
    assert "context is 8000" in await refused(app, messages=[{"role": "user", "content": "y" * 8000}])


async def test_no_tokens_asked_for_computes_the_prompt(app: httpx.AsyncClient, speaker: Speaker) -> None:
    messages = [{"role": "user", "content": "A text of more than one block. " * 4}]
    answer = await ask(app, max_tokens=0, messages=messages)
    assert (answer["content"], answer["stop_reason"], answer["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert gathered(await told(app, max_tokens=0, messages=messages))["content"] == []
    speaker.text = "Fine."
    assert (await ask(app, messages=messages))["usage"]["cache_read_input_tokens"] > 100


@pytest.mark.parametrize("choice", ["any", "tool", "none", "auto"])
async def test_tool_choices(app: httpx.AsyncClient, speaker: Speaker, choice: str) -> None:
    speaker.text = f"{CALL}\n{CALL}"
    named = {"name": "clock"} if choice == "tool" else {}
    several = await ask(app, tools=TOOLS, tool_choice={"type": choice, **named}, thinking=THINKS)
    names = [block["name"] for block in several["content"] if block["type"] == "tool_use"]
    expected = {"any": ["weather"] * 2, "auto": ["weather"] * 2, "none": []}
    assert set(names) == {"clock"} if named else names == expected[choice]
    one = {"type": choice, **named, **({} if choice == "none" else {"disable_parallel_tool_use": True})}
    single = await ask(app, tools=TOOLS, tool_choice=one, thinking=THINKS)
    assert len([1 for block in single["content"] if block["type"] == "tool_use"]) == (choice != "none")


PLAIN = """{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.fixture(params=["tools", "no tools"])
def either_template(request: pytest.FixtureRequest, spoken_engine: Any) -> Iterator[None]:
    """A template that has tools, or one that has none."""
    tokenizer = spoken_engine.tokenizer
    before = tokenizer.chat_template

    def use(template: str) -> None:
        tokenizer.chat_template = template
        for derived in ("turn_format", "_template"):
            vars(tokenizer).pop(derived, None)

    use(PLAIN if request.param == "no tools" else before)
    yield
    use(before)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.usefixtures("either_template")
async def test_a_round_trip_finds_the_call_in_the_cache(
    app: httpx.AsyncClient, speaker: Speaker, streams: bool
) -> None:
    speaker.text = f"Let me look.\n{CALL.replace(': ', ':')}"
    more: dict[str, Any] = {"tools": TOOLS, "thinking": THINKS}
    first = gathered(await told(app, **more)) if streams else await ask(app, **more)
    *_, call = first["content"]
    assert (call["type"], call["input"]) == ("tool_use", ARGUMENTS)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "Rain."}]}
    speaker.text = "It rains."
    content = [result, {"type": "text", "text": "So?"}]
    messages = [*ASK, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": content}]
    second = await ask(app, messages=messages, **more)
    assert blocks_of(second) == [{"type": "text", "text": "It rains."}]
    written = sum(first["usage"][name] for name in ("input_tokens", "cache_read_input_tokens", "output_tokens"))
    assert second["usage"]["cache_read_input_tokens"] >= written - 17


async def test_a_last_message_of_the_assistant_is_continued(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "It is fine."
    begun = {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}
    assert blocks_of(await ask(app, messages=[*ASK, begun], thinking=THINKS)) == [{"type": "text", "text": " fine."}]


async def test_a_schema_of_the_answer(app: httpx.AsyncClient, speaker: Speaker) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    speaker.text = '{"ok": true}'
    answer = await ask(app, output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})
    assert json.loads(answer["content"][0]["text"]) == {"ok": True}


async def test_headers_that_its_clients_send_and_look_for(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "Fine."
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "anything"}
    answer = await app.post(f"{PATH}?beta=true", json={"messages": ASK, "max_tokens": 9}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert "request-id" not in (await app.get("/v1/models")).headers


async def test_errors_are_in_its_shape(app: httpx.AsyncClient) -> None:
    missing = await app.post(PATH, json={"messages": ASK, "max_tokens": 9, "model": "claude-opus-9"})
    assert missing.status_code == 404
    assert missing.json()["type"] == "error"
    assert missing.json()["error"]["type"] == "not_found_error"
    wrong = await app.get(PATH)
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    broken = await app.post(COUNT, content=b"{")
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "leave it out" not in await refused(app, messages=[])
