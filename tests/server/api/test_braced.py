"""Calls between braces over HTTP, as a template like Gemma 4's shows them: the whole way from tools to results."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema_rs
import pytest

from helpers.engine import fake_runner
from helpers.engine.fake_runner import fake_engine
from helpers.server.live_servers import app_client
from helpers.server.scripted_model import Speaker
from helpers.text.gemma_templates import GEMMA4
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "at": {"type": "array", "items": {"enum": ["noon", "night"]}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK: dict[str, Any] = {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}}
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, CLOCK)]
ASK = [{"role": "user", "content": "And the weather?"}]
CITY = 'Köln 🌧 "x", {a:1}\n<|"|'
CALL = f'<|tool_call>call:weather{{at:[<|"|>noon<|"|>],city:<|"|>{CITY}<|"|>,days:2}}<tool_call|>'
ARGUMENTS = {"at": ["noon"], "city": CITY, "days": 2}
NOW = "<|tool_call>call:clock{}<tool_call|>"


@pytest.fixture
def spoken_engine(spoken_engine: Any) -> Any:
    spoken_engine.tokenizer.chat_template = GEMMA4
    return spoken_engine


@pytest.fixture
def speaker(speaker: Speaker) -> Speaker:
    speaker.openings = ["<|turn>model\n", "<tool_response|>"]
    return speaker


async def ask(app: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": 300, "temperature": 0, **more}
    answer = await app.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(app: httpx.AsyncClient) -> tuple[list[tuple[str, str]], str]:
    """The calls that the chunks join to, and the content."""
    calls: list[tuple[str, str]] = []
    content = ""
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": 300, "temperature": 0, "stream": True}
    async with app.stream("POST", CHAT, json=body) as stream:
        async for line in stream.aiter_lines():
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                content += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls", ()):
                    if "id" in call:
                        calls.append((call["function"]["name"], ""))
                    name, arguments = calls[call["index"]]
                    calls[call["index"]] = (name, arguments + call["function"]["arguments"])
    return calls, content


def functions_of(answer: dict[str, Any]) -> list[tuple[str, str]]:
    calls = answer["choices"][0]["message"]["tool_calls"]
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


async def test_calls_whole_and_streamed(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = f"<|channel>thought\nHm.\n<channel|>Let me look.{CALL}{NOW}"
    answer = await ask(app)
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Let me look.")
    assert choice["message"]["reasoning_content"] == "Hm."
    found = functions_of(answer)
    assert [(name, json.loads(text)) for name, text in found] == [("weather", ARGUMENTS), ("clock", {})]
    assert await streamed(app) == (found, "Let me look.")
    assert [name for name, _ in functions_of(await ask(app, parallel_tool_calls=False))] == ["weather"]


async def test_a_call_fits_whatever_the_model_wants(app: httpx.AsyncClient) -> None:
    """With the fake runner's own random logits."""
    validators = {one["name"]: jsonschema_rs.validator_for(one["parameters"]) for one in (WEATHER, CLOCK)}
    ended = 0
    for seed in range(12):
        answer = await ask(app, tool_choice="required", seed=seed, temperature=1, parallel_tool_calls=False)
        if answer["choices"][0]["finish_reason"] == "length":
            continue
        ended += 1
        ((name, arguments),) = functions_of(answer)
        validators[name].validate(json.loads(arguments))
    assert ended >= 2


async def test_choices_bind(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = CALL
    named = await ask(app, tool_choice={"type": "function", "function": {"name": "clock"}})
    assert {name for name, _ in functions_of(named)} == {"clock"}
    message = (await ask(app, tool_choice="none"))["choices"][0]["message"]
    assert "tool_calls" not in message
    assert "<|tool_call>" not in message["content"]
    speaker.text = "Fine."
    assert (await ask(app))["choices"][0]["message"]["content"] == "Fine."


async def test_calls_that_are_cut(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = CALL
    length = (await ask(app, max_tokens=len(CALL[: CALL.index("Köln") + 1])))["choices"][0]
    assert length["finish_reason"] == "length"
    assert length["message"]["tool_calls"][0]["function"]["arguments"] == '{"at": ["noon"], "city": "K'
    stopped = (await ask(app, stop=["Kö"]))["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["message"]["tool_calls"][0]["function"]["arguments"] == '{"at": ["noon"], "city": "'


async def test_the_next_turn_finds_the_call_and_shows_its_result(
    app: httpx.AsyncClient, speaker: Speaker, spoken_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def logits(token_ids: Any) -> Any:
        seen.append([int(i) for i in token_ids])
        return speaker.logits(token_ids)

    monkeypatch.setattr(fake_runner, "token_logits", logits)
    written = 0
    messages: list[dict[str, Any]] = [*ASK]
    spelled = '<|tool_call>call:weather{city:<|"|>Bonn<|"|>,days:2,at:[]}<tool_call|>'  # not the template's order
    for text in (f"Let me look.{spelled}", spelled, "It rains."):
        speaker.text = text
        answer = await ask(app, messages=messages)
        usage, message = answer["usage"], answer["choices"][0]["message"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= written - 17
        written = usage["prompt_tokens"] + usage["completion_tokens"]
        messages.append(message)
        for call in message.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "Rain."})
    assert messages[-1]["content"] == "It rains."
    told = spoken_engine.tokenizer.decode(seen[-1], skip_special_tokens=False)
    result = '<|tool_response>response:weather{value:<|"|>Rain.<|"|>}<tool_response|>'
    assert told.endswith(f"model\nLet me look.{spelled}{result}{spelled}{result}It rains.")


@pytest.mark.parametrize(
    ("schema", "word"),
    [({"not": {}}, "'not' is not held"), ({"properties": {"a:b": {}}}, "rename it")],
)
async def test_what_cannot_be_held_is_refused_by_name(app: httpx.AsyncClient, schema: Any, word: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}
    answer = await app.post(CHAT, json={"messages": ASK, "tools": [tool], "max_tokens": 9})
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["error"]["message"]


@pytest.mark.parametrize(("known", "odd"), [("{{ key }}:", "{{ key }}=>"), ('<|"|>', "'"), ("'['", "'('")])
async def test_another_unknown_way_is_still_refused_by_name(known: str, odd: str) -> None:
    template = GEMMA4.replace(f"'{known}'", f'"{odd}"').replace(known, odd)
    with fake_engine(num_blocks=64, max_context=900) as engine:
        engine.tokenizer.chat_template = template
        async with app_client(create_app(engine, ServerSettings(model_name="fake"))) as client:
            answer = await client.post(CHAT, json={"messages": ASK, "tools": TOOLS, "max_tokens": 9})
    assert answer.status_code == 400
    assert "not known" in answer.json()["error"]["message"]
