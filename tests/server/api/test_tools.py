"""Tool calls and reasoning over HTTP, in OpenAI's shape. The model says what a test wrote, as its grammar lets it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema_rs
import pytest

from helpers.engine import fake_runner
from helpers.engine.fake_runner import fake_engine
from helpers.server.live_servers import app_client
from helpers.server.scripted_model import TEMPLATE, Speaker
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK = {"name": "clock"}
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, CLOCK)]
ASK = [{"role": "user", "content": "And the weather?"}]
SAID = '{"name": "weather", "arguments": {"city": "Köln 🌧 \\"x\\"", "days": 2}}'
CALL = f"<tool_call>\n{SAID}\n</tool_call>"
ARGUMENTS = {"city": 'Köln 🌧 "x"', "days": 2}


async def ask(app: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": 300, "temperature": 0, **more}
    answer = await app.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(app: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    answer = await app.post(CHAT, json={"messages": ASK, "tools": TOOLS, "max_tokens": 9, **more})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def calls_of(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = answer["choices"][0]["message"]["tool_calls"]
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def names_of(answer: dict[str, Any]) -> list[str]:
    """Of calls that may be cut short."""
    return [call["function"]["name"] for call in answer["choices"][0]["message"]["tool_calls"]]


async def test_a_call_in_a_free_answer(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = f"Let me look.\n{CALL}"
    answer = await ask(app)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    assert calls_of(answer) == [("weather", ARGUMENTS)]
    call = choice["message"]["tool_calls"][0]
    assert call["type"] == "function"
    assert call["id"].isalnum()
    assert len(call["id"]) == 9


async def test_an_answer_without_a_call_is_text(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "It is <b>fine</b> <tool"
    choice = (await ask(app))["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", speaker.text)
    assert "tool_calls" not in choice["message"]


async def test_a_required_call_fits_its_schema_whatever_the_model_wants(
    app: httpx.AsyncClient, spoken_engine: Any
) -> None:
    """With the fake runner's own random logits."""
    validators = {one["name"]: jsonschema_rs.validator_for(one.get("parameters", {})) for one in (WEATHER, CLOCK)}
    ended = 0
    for seed in range(12):
        answer = await ask(app, tool_choice="required", seed=seed, temperature=1, parallel_tool_calls=False)
        if answer["choices"][0]["finish_reason"] == "length":
            continue
        ended += 1
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        ((name, arguments),) = calls_of(answer)
        validators[name].validate(arguments)
    assert ended >= 2


async def test_a_named_tool_is_called(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = CALL
    answer = await ask(app, tool_choice={"type": "function", "function": {"name": "clock"}})
    assert names_of(answer)[0] == "clock"


async def test_allowed_tools(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = CALL
    clock = [{"type": "function", "function": {"name": "clock"}}]
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": clock}}
    assert set(names_of(await ask(app, tool_choice=chosen))) == {"clock"}


async def test_no_call_where_none_is_wanted(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = f"Look: {CALL}"
    message = (await ask(app, tool_choice="none"))["choices"][0]["message"]
    assert "tool_calls" not in message
    assert "<tool_call>" not in message["content"]


async def test_several_calls_or_one(app: httpx.AsyncClient, speaker: Speaker) -> None:
    clock = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    speaker.text = f"{CALL}\n{clock}"
    assert calls_of(await ask(app)) == [("weather", ARGUMENTS), ("clock", {})]
    assert calls_of(await ask(app, parallel_tool_calls=False)) == [("weather", ARGUMENTS)]


async def test_a_call_that_is_cut_short_is_shown_as_far_as_it_came(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = CALL
    choice = (await ask(app, max_tokens=60))["choices"][0]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.dumps(ARGUMENTS, ensure_ascii=False).replace('\\"', "")[:4] == call["function"]["arguments"][:4]


async def test_a_call_that_a_stop_string_cuts_is_none_to_make(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = CALL
    choice = (await ask(app, stop=["Kö"]))["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    assert choice["finish_reason"] == "stop"
    whole = (await ask(app, stop=["\n</tool"]))["choices"][0]
    assert (calls_of({"choices": [whole]}), whole["finish_reason"]) == ([("weather", ARGUMENTS)], "tool_calls")


@pytest.mark.parametrize("text", [f"Let me look.\n{CALL}\n{CALL}", f"<think>\nHm 🌧.\n</think>\n\n{CALL}", "Fine."])
async def test_a_stream_says_what_a_whole_answer_says(app: httpx.AsyncClient, speaker: Speaker, text: str) -> None:
    speaker.text = text
    whole = (await ask(app))["choices"][0]
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    reason = None
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": 300, "temperature": 0, "stream": True}
    async with app.stream("POST", CHAT, json=body) as stream:
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                reason = choice["finish_reason"] or reason
                delta = choice["delta"]
                for name in ("content", "reasoning_content"):
                    if delta.get(name):
                        message[name] = message.get(name, "") + delta[name]
                for call in delta.get("tool_calls", []):
                    calls = message.setdefault("tool_calls", [])
                    if "id" in call:
                        assert call["index"] == len(calls)
                        calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                    else:
                        assert call["function"].keys() == {"arguments"}
                        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    for calls in (message.get("tool_calls", []), whole["message"].get("tool_calls", [])):
        for call in calls:
            call["id"] = "drawn"
    if message.get("tool_calls"):
        message["content"] = message["content"] or None
    assert (message, reason) == (whole["message"], whole["finish_reason"])


async def test_reasoning_is_apart_and_counted(app: httpx.AsyncClient, speaker: Speaker, spoken_engine: Any) -> None:
    speaker.text = "<think>\nOne, two.\n</think>\n\nThree."
    answer = await ask(app, tools=None)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"].strip(), message["content"]) == ("One, two.", "Three.")
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == len(spoken_engine.tokenizer.encode("<think>\nOne, two.\n</think>", False))


async def test_thinking_can_be_turned_off_by_the_templates_own_variable(
    app: httpx.AsyncClient, speaker: Speaker
) -> None:
    speaker.text = "Three."
    answer = await ask(app, tools=None, chat_template_kwargs={"enable_thinking": False})
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Three.", "refusal": None}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_a_schema_binds_behind_the_reasoning(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "<think>\nHm.\n</think>\n\n[1, 2]"
    schema = {"type": "array", "items": {"type": "integer"}, "maxItems": 2}
    message = (await ask(app, tools=None, guided_json=schema))["choices"][0]["message"]
    assert message["reasoning_content"].strip() == "Hm."
    assert json.loads(message["content"]) == [1, 2]


async def test_a_call_or_an_answer_that_fits(app: httpx.AsyncClient, speaker: Speaker) -> None:
    """As agents ask that want a schema of their last answer."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    speaker.text = CALL
    assert calls_of(await ask(app, guided_json=schema)) == [("weather", ARGUMENTS)]
    speaker.text = '{"ok": true}'
    assert json.loads((await ask(app, guided_json=schema))["choices"][0]["message"]["content"]) == {"ok": True}
    answer = await ask(app, guided_json=schema, tool_choice="none")
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"ok": True}


async def test_the_next_turn_finds_the_call_as_it_was_written(
    app: httpx.AsyncClient, speaker: Speaker, spoken_engine: Any
) -> None:
    """Another spelling, as the template would write it, would miss from there on."""
    speaker.text = f"Let me look.\n{CALL.replace(': ', ':')}"
    first = await ask(app)
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Rain."}
    speaker.text = "It rains."
    second = await ask(app, messages=[*ASK, message, result])
    assert second["choices"][0]["message"]["content"] == "It rains."
    written = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= written - 17
    changed = json.loads(json.dumps(message))
    changed["tool_calls"][0]["function"]["arguments"] = '{"city": "Bonn", "days": 2}'
    other = await ask(app, messages=[*ASK, changed, result])
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < written - 17, "what was edited is not replayed"


async def test_the_same_call_in_two_spellings_is_found_twice(app: httpx.AsyncClient, speaker: Speaker) -> None:
    messages, written = [*ASK], 0
    for spelled in (CALL, CALL.replace(": ", ":"), ""):
        speaker.text = spelled or "It rains."
        answer = await ask(app, messages=messages)
        usage, message = answer["usage"], answer["choices"][0]["message"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= written - 17
        written = usage["prompt_tokens"] + usage["completion_tokens"]
        messages.append(message)
        for call in message.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "Rain."})
    assert len(messages) == 6


async def test_tokenize_and_warm_know_tools(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "Fine."
    plain = (await app.post("/tokenize", json={"messages": ASK})).json()["count"]
    with_tools = (await app.post("/tokenize", json={"messages": ASK, "tools": TOOLS})).json()["count"]
    assert with_tools > plain + 100
    warmed = await app.post("/v1/warm", json={"messages": ASK, "tools": TOOLS})
    assert warmed.status_code == 200, warmed.text
    cached = (await ask(app))["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= warmed.json()["token_count"] - 16


BROKEN = {"function": {"name": "a", "arguments": "["}}
BAD = [
    ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice", "nobody"),
    ({"tool_choice": "sometimes"}, "tool_choice", "must be"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "twice"),
    ({"tools": [{"type": "web_search"}]}, "tools", "not built"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools", "object"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}]}, "tools", "enforced"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "tools", "object"),
    ({"guided_regex": "a+"}, "tools", "an answer in JSON"),
    ({"json_schema": "true"}, "tools", "whose schema is an object"),
    ({"messages": [*ASK, {"role": "tool", "content": "x"}]}, "messages", "tool_call_id"),
    ({"messages": [*ASK, {"role": "assistant", "content": None}]}, "messages", "content"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "a"}}]}]}, "messages", "role"),
    ({"messages": [*ASK, {"role": "assistant", "tool_calls": [BROKEN]}]}, "messages", "arguments"),
    ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}]}, "messages", "results"),
]


@pytest.mark.parametrize(("fields", "param", "word"), BAD, ids=range(len(BAD)))
async def test_bad_tools_are_refused_by_name(
    app: httpx.AsyncClient, fields: dict[str, Any], param: str, word: str
) -> None:
    error = await refused(app, **fields)
    assert (error["param"], word in error["message"]) == (param, True), error


@contextlib.asynccontextmanager
async def app_with(template: str) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    with fake_engine(num_blocks=512, max_context=4000) as engine:
        engine.tokenizer.chat_template = template
        async with app_client(create_app(engine, ServerSettings(model_name="fake"))) as client:
            yield client, engine


async def test_a_template_that_writes_calls_in_an_unknown_way_is_refused() -> None:
    odd = TEMPLATE.replace('{"name": "{{ call.function.name }}", "arguments":', "call:{{ call.function.name }}{")
    async with app_with(odd) as (app, _):
        assert "not known" in (await refused(app))["message"]


async def test_a_model_whose_template_shows_no_tools_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    async with app_with(plain) as (app, engine):
        speaker = Speaker(engine)
        seen: list[Any] = []

        def logits(token_ids: Any) -> Any:
            seen.append([int(i) for i in token_ids])
            return speaker.logits(token_ids)

        monkeypatch.setattr(fake_runner, "token_logits", logits)
        speaker.text = CALL
        answer = await ask(app)
        assert calls_of(answer) == [("weather", ARGUMENTS)]
        told = engine.tokenizer.decode(seen[-1][: answer["usage"]["prompt_tokens"]], skip_special_tokens=False)
        assert told.startswith("<|system|>You can call tools.")
        assert '{"name": "weather", "description": "Weather of a city", "parameters": {' in told
        result = {"role": "tool", "tool_call_id": answer["choices"][0]["message"]["tool_calls"][0]["id"]}
        messages = [*ASK, answer["choices"][0]["message"], {**result, "content": "Rain."}]
        speaker.text = "It rains."
        second = await ask(app, messages=messages)
        assert second["choices"][0]["message"]["content"] == "It rains."
        told = engine.tokenizer.decode(seen[-1], skip_special_tokens=False)
        assert f"<|assistant|>{CALL}<|end|><|user|><tool_response>\nRain.\n</tool_response><|end|>" in told
        written = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= written - 17
