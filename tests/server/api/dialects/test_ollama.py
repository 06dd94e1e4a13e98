"""Ollama's routes in its shape: JSON lines, options, tools, thinking. The model says what a test wrote."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kvboost_edge.server.api.dialects.ollama.answers import Chatted, Generated
from server.api.test_tools import ARGUMENTS, CALL, Speaker
from server.api.test_tools import TOOLS as BOTH

CHAT, GENERATE = "/api/chat", "/api/generate"
ASK = [{"role": "user", "content": "And the weather?"}]
TOOLS = BOTH[:1]
THOUGHT = "<think>\nIt may rain.\n</think>\n\n"
SAID = {
    "text": "Sun, später Regen 🌧.",
    "thoughts": f"{THOUGHT}Sun.",
    "call": f"{THOUGHT}Let me look.\n{CALL}",
    "calls": f"{CALL}\n{CALL}",
    "nothing": "",
}


async def ask(app: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": ASK, "stream": False, "options": {"temperature": 0}, **more}
    answer = await app.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    Chatted.model_validate_json(answer.content, strict=True)
    found: dict[str, Any] = answer.json()
    return found


async def lines(app: httpx.AsyncClient, path: str = CHAT, **more: Any) -> list[dict[str, Any]]:
    body: dict[str, Any] = {"model": "fake", "options": {"temperature": 0}, **more}
    if path == CHAT:
        body.setdefault("messages", ASK)
    answer = await app.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the lines add up to, without ids."""
    messages = [line["message"] for line in found]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    texts = {name: "".join(message.get(name, "") for message in messages) for name in ("content", "thinking")}
    return {**texts, "calls": calls}


@pytest.mark.parametrize("said", SAID)
async def test_a_stream_adds_up_to_the_whole(app: httpx.AsyncClient, speaker: Speaker, said: str) -> None:
    speaker.text = SAID[said]
    tools = {"tools": TOOLS} if "call" in said else {}
    whole, found = await ask(app, **tools), await lines(app, **tools)
    assert joined(found) == joined([whole])
    for name in ("done_reason", "eval_count", "prompt_eval_count"):
        assert found[-1][name] == whole[name]
    assert whole["done_reason"] == "stop"


async def test_thoughts_text_and_calls_have_their_members(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = SAID["call"]
    answer = await ask(app, tools=TOOLS)
    message = answer["message"]
    assert (message["thinking"], message["content"]) == ("It may rain.", "Let me look.")
    (call,) = message["tool_calls"]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": ARGUMENTS}
    assert answer["total_duration"] >= answer["prompt_eval_duration"] + answer["eval_duration"] > 10_000


@pytest.mark.parametrize("limit", [1, 30, 60, 80])
async def test_an_answer_cut_short_says_so(app: httpx.AsyncClient, speaker: Speaker, limit: int) -> None:
    speaker.text = SAID["call"]
    options = {"temperature": 0, "num_predict": limit}
    whole, found = await ask(app, tools=TOOLS, options=options), await lines(app, tools=TOOLS, options=options)
    assert joined(found) == joined([whole])
    assert (whole["done_reason"], whole["eval_count"]) == ("length", limit)
    assert "tool_calls" not in whole["message"]


async def test_results_find_their_calls_in_order_and_by_name(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = f"{CALL}"
    first = await ask(app, tools=BOTH)
    called = [*ASK, {**first["message"]}]
    speaker.text = "Rain."
    for result in ({}, {"tool_name": "weather"}, {"tool_call_id": first["message"]["tool_calls"][0]["id"]}):
        second = await ask(app, tools=BOTH, messages=[*called, {"role": "tool", "content": "rain", **result}])
        assert second["message"]["content"] == "Rain."
        assert second["prompt_eval_count"] > first["prompt_eval_count"] + first["eval_count"]
    cached = second["kvboost"]["hit_tokens"]
    assert sum(cached.values()) > first["prompt_eval_count"]
    for wrong in (
        [*ASK, {"role": "tool", "content": "rain"}],
        [*called, {"role": "tool", "content": "", "tool_name": "x"}],
    ):
        answer = await app.post(CHAT, json={"model": "fake", "messages": wrong, "tools": BOTH})
        assert answer.status_code == 400
        assert "no call before it waits" in answer.json()["error"]


async def test_think_false_turns_thinking_off(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = f"{THOUGHT}Sun."
    on, off = await ask(app, think=True), await ask(app, think=False)
    assert on["message"]["thinking"] == "It may rain."
    assert off["prompt_eval_count"] > on["prompt_eval_count"]  # the closed block is in the prompt
    assert "thinking" not in off["message"]


async def test_the_format_binds(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "no JSON"
    schema = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"], "additionalProperties": False}
    options = {"temperature": 0, "num_predict": 50}
    answer = await ask(app, format=schema, think=False, options=options)
    assert json.loads(answer["message"]["content"]) == {"n": 7}
    plain = await ask(app, format="", think=False, options=options)
    assert plain["message"]["content"] == "no JSON"


async def test_generate_answers_a_prompt_or_goes_on_with_it(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = f"{THOUGHT}Sun."
    found = await lines(app, GENERATE, prompt="And the weather?", system="Be brief.")
    assert "".join(line["response"] for line in found) == "Sun."
    assert "".join(line.get("thinking", "") for line in found) == "It may rain."
    body = {"model": "fake", "prompt": "<|assistant|>", "raw": True, "stream": False, "options": {"temperature": 0}}
    answer = await app.post(GENERATE, json=body)
    raw = Generated.model_validate_json(answer.content, strict=True)
    assert raw.response == speaker.text
    assert raw.prompt_eval_count < found[-1]["prompt_eval_count"]
    streamed = await lines(app, GENERATE, prompt="<|assistant|>", raw=True)
    assert "".join(line["response"] for line in streamed) == speaker.text


async def test_stop_strings_end_the_text(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "Sun and rain."
    options = {"temperature": 0, "stop": [" and"]}
    assert (await ask(app, options=options))["message"]["content"] == "Sun"
    assert joined(await lines(app, options=options))["content"] == "Sun"


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {}), (CHAT, {"messages": []}), (GENERATE, {}), (GENERATE, {"prompt": ""})]
)
async def test_nothing_asked_is_answered_as_loaded(app: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    answer = (await app.post(path, json={"model": "fake:latest", "keep_alive": "5m", **body})).json()
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("fake:latest", True, "load")


BAD: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
    (CHAT, {"messages": [{"role": "bot", "content": "x"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{}"}}]}]},
        "arguments",
    ),
    (CHAT, {"options": {"num_ctx": 10**6}}, "options.num_ctx"),
    (CHAT, {"options": {"num_predict": -3}}, "options.num_predict"),
    (CHAT, {"options": {"num_predict": 10**6}}, "options.num_predict"),
    (CHAT, {"options": {"temperature": 9}}, "options.temperature"),
    (CHAT, {"options": {"mirostat": 1}}, "options.mirostat"),
    (CHAT, {"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
    (CHAT, {"options": {"unknown": 1}}, "options.unknown"),
    (CHAT, {"format": "yaml"}, "format"),
    (CHAT, {"format": {"type": "nothing"}}, "format"),
    (CHAT, {"think": "much"}, "think"),
    (CHAT, {"tools": [{"type": "web"}]}, "tools"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 9000}]}, "the model's context"),
    (CHAT, {"model": None}, "model"),
    (GENERATE, {"template": "x"}, "template"),
    (GENERATE, {"context": [1, 2]}, "context"),
    (GENERATE, {"images": ["aGk="]}, "images"),
    (GENERATE, {"suffix": "x"}, "suffix"),
    (GENERATE, {"raw": True, "system": "x"}, "system"),
    (GENERATE, {"unknown": 1}, "unknown"),
]


@pytest.mark.parametrize(("path", "body", "word"), BAD)
async def test_bad_fields_are_named_in_ollama_s_shape(
    app: httpx.AsyncClient, path: str, body: dict[str, Any], word: str
) -> None:
    asked = {"messages": ASK} if path == CHAT else {"prompt": "hello"}
    answer = await app.post(path, json={"model": "fake", **asked, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"error"}
    assert word in answer.json()["error"]


async def test_options_of_loading_and_neutral_fields_are_taken(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "Sun."
    options = {"num_ctx": 4096, "num_gpu": 1, "num_thread": 2, "use_mmap": True, "num_keep": 4, "num_predict": -1}
    more = {"mirostat": 0, "tfs_z": 1.0, "repeat_last_n": -1, "seed": 7, "repeat_penalty": 1.0, "temperature": 0}
    answer = await ask(app, options={**options, **more}, keep_alive=-1, tools=[])
    assert answer["message"]["content"] == "Sun."


async def test_the_model_is_listed_and_shown_by_its_names(app: httpx.AsyncClient) -> None:
    (tagged,) = (await app.get("/api/tags")).json()["models"]
    (running,) = (await app.get("/api/ps")).json()["models"]
    assert tagged["name"] == running["model"] == "fake:latest"
    assert tagged["digest"] == running["digest"]
    for name in ("fake", "fake:latest"):
        shown = (await app.post("/api/show", json={"model": name})).json()
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 8000
        assert (await app.post(CHAT, json={"model": name, "messages": []})).status_code == 200
    for path in (CHAT, GENERATE, "/api/show"):
        missing = await app.post(path, json={"model": "other", "messages": []} if path == CHAT else {"model": "other"})
        assert (missing.status_code, "not found" in missing.json()["error"]) == (404, True)


async def test_an_error_behind_the_first_line_is_the_last_line(
    app: httpx.AsyncClient, speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvboost_edge.server.api.dialects.ollama.writer import OllamaWriter

    def broken(*_: Any) -> None:
        raise RuntimeError("secret")

    speaker.text = "Hello. " * 40  # more than one batch of tokens
    monkeypatch.setattr(OllamaWriter, "closed", broken)
    answer = await app.post(CHAT, json={"model": "fake", "messages": ASK, "options": {"temperature": 0}})
    last = json.loads(answer.text.splitlines()[-1])
    assert last.keys() == {"error"}
    assert "secret" not in answer.text
