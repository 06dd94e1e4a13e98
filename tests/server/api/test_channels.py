"""Turns in channels over the three APIs that have reasoning and calls: of a model that says what a test wrote, and of a
tiny gpt-oss that a grammar holds to a call."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import AddedToken

from helpers.engine import fake_runner
from helpers.models.gpt_oss_files import save_gpt_oss
from helpers.server.live_servers import app_client
from helpers.text.chat_templates import CHANNELS as TEMPLATE
from kvboost_edge import CPUPagedEngine
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings
from kvboost_edge.text.tokenizer import Tokenizer
from server.api.test_tools import ARGUMENTS, ASK, CLOCK, WEATHER

MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
VOCAB_SIZE = fake_runner.VOCAB_SIZE + len(MARKERS)
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, CLOCK)]
THOUGHT = "<|channel|>analysis<|message|>It may rain.<|end|><|start|>assistant"
SAID = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + json.dumps(
    ARGUMENTS, ensure_ascii=False
)
FINAL = "<|channel|>final<|message|>Fine. "


class Speaker:
    """Says `text` behind the last question, then ends the turn with `<|call|>` or `<|return|>`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.text = tokenizer, FINAL
        self._question, self._turn = (tokenizer.encode(text, False) for text in ("<|start|>user", "<|start|>assistant"))

    def logits(self, token_ids: Any) -> Any:
        ids = [int(one) for one in token_ids]
        asked = self._at(ids, self._question, range(len(ids), -1, -1))
        begun = self._at(ids, self._turn, range(asked, len(ids) + 1)) + len(self._turn)
        whole = self._tokenizer.encode(self.text, False)
        (end,) = self._tokenizer.encode("<|call|>" if self.text.endswith("}") else "<|return|>", False)
        row = np.zeros(VOCAB_SIZE, np.float32)
        row[[*whole, end][min(len(ids) - begun, len(whole))]] = 50.0
        return row

    def _at(self, ids: list[int], wanted: list[int], places: range) -> int:
        return next(at for at in places if ids[at : at + len(wanted)] == wanted)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[CPUPagedEngine]:
    raw = fake_runner.fake_tokenizer().codec.to_json()
    monkeypatch.setattr(fake_runner, "fake_tokenizer", lambda: _with_markers(raw))
    monkeypatch.setattr(fake_runner, "VOCAB_SIZE", VOCAB_SIZE)
    tokenizer = _with_markers(raw)
    ends = {tokenizer.encode(text, False)[0] for text in ("<|return|>", "<|call|>")}
    parts = dataclasses.replace(fake_runner.fake_parts(1024, max_context=8000), eos_token_ids=frozenset(ends))
    config = fake_runner.EngineConfig.from_options(debug_checks=True, reuse_gate="off")
    with CPUPagedEngine._from_parts(parts, config) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        yield engine


def _with_markers(raw: str) -> Tokenizer:
    backend = fake_runner.RawTokenizer.from_str(raw)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MARKERS])
    return Tokenizer.from_transformers(backend)


@pytest.fixture
def speaker(engine: CPUPagedEngine, monkeypatch: pytest.MonkeyPatch) -> Speaker:
    speaker = Speaker(engine.tokenizer)
    monkeypatch.setattr(fake_runner, "token_logits", speaker.logits)
    return speaker


@pytest.fixture
async def app(engine: CPUPagedEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with app_client(create_app(engine, ServerSettings(model_name="fake"))) as client:
        yield client


async def post(app: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await app.post(path, json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_chat_completions(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = THOUGHT + SAID + CALL
    choice = (await post(app, "/v1/chat/completions", messages=ASK, tools=TOOLS, max_tokens=400))["choices"][0]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("It may rain.", "Let me look.")
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", ARGUMENTS)
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("tools", [TOOLS, None])
async def test_an_answer(app: httpx.AsyncClient, speaker: Speaker, tools: Any) -> None:
    speaker.text = THOUGHT + FINAL
    body = {"messages": ASK, "max_tokens": 400, **({"tools": tools} if tools else {})}
    found = await post(app, "/v1/chat/completions", **body)
    choice = found["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Fine. ", "refusal": None,
                                 "reasoning_content": "It may rain."}  # fmt: skip
    assert choice["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] > len("It may rain.")


async def test_a_stream_says_what_a_whole_answer_says(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = THOUGHT + SAID + CALL
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": 400, "temperature": 0, "stream": True}
    found: dict[str, str] = {"content": "", "reasoning_content": "", "arguments": ""}
    reason = None
    async with app.stream("POST", "/v1/chat/completions", json=body) as stream:
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                reason = choice["finish_reason"] or reason
                delta = choice["delta"]
                found |= {name: found[name] + (delta.get(name) or "") for name in ("content", "reasoning_content")}
                for call in delta.get("tool_calls", []):
                    found["arguments"] += call["function"]["arguments"]
    assert (found["content"], found["reasoning_content"], reason) == ("Let me look.", "It may rain.", "tool_calls")
    assert json.loads(found["arguments"]) == ARGUMENTS


async def test_messages(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = THOUGHT + CALL
    tools = [{"name": "weather", "description": "Weather", "input_schema": WEATHER["parameters"]}]
    thinks = {"type": "enabled", "budget_tokens": 1024}
    found = await post(app, "/v1/messages", messages=ASK, tools=tools, thinking=thinks, max_tokens=2000)
    thought, call = found["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "It may rain.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", ARGUMENTS)
    assert found["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sun"}
    back = [*ASK, {"role": "assistant", "content": found["content"]}, {"role": "user", "content": [result]}]
    speaker.text = FINAL
    again = await post(app, "/v1/messages", messages=[*back, ASK[0]], tools=tools, max_tokens=400)
    assert [block["text"] for block in again["content"]] == ["Fine. "]


async def test_responses(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = THOUGHT + CALL
    tools = [{"type": "function", **WEATHER}]
    found = await post(app, "/v1/responses", input="And the weather?", tools=tools, store=False)
    thought, call = found["output"]
    assert thought["type"] == "reasoning"
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "weather", ARGUMENTS)
    speaker.text = THOUGHT + FINAL
    (_, said) = (await post(app, "/v1/responses", input="Well?", store=False))["output"]
    assert said["content"][0]["text"] == "Fine. "


async def test_json_stands_in_the_answer(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = THOUGHT + '<|channel|>final <|constrain|>json<|message|>{"a": 1}'
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    found = await post(app, "/v1/chat/completions", messages=ASK, guided_json=schema, max_tokens=200)
    assert found["choices"][0]["message"]["content"] == '{"a": 1}'


# -- a tiny model of the family itself --


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CPUPagedEngine]:
    """Its own logits, with a leaning to the letter that calls begin with, and to white space."""
    directory = save_gpt_oss(tmp_path_factory.mktemp("gpt-oss"), mxfp4=True, markers=MARKERS, template=TEMPLATE)
    with CPUPagedEngine.from_pretrained(str(directory), num_blocks=64, backend="cpu") as engine:
        runner, bias = engine._parts.runner, np.zeros(engine.runner_info.vocab_size, np.float32)
        for text, number in {"<|channel|>": 30, "c": 60, " ": 20}.items():
            bias[engine.tokenizer.encode(text, False)[-1]] = number
        forward = runner.forward
        runner.forward = lambda batch: forward(batch) + bias  # type: ignore[method-assign]
        yield engine


PING = {"name": "ping", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
FORCED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": ASK, "max_tokens": 120, "tool_choice": "required",
        "tools": [{"type": "function", "function": PING}],
    },
    "/v1/messages": {
        "messages": ASK, "max_tokens": 120, "tool_choice": {"type": "any"},
        "tools": [{"name": "ping", "input_schema": PING["parameters"]}],
    },
    "/v1/responses": {
        "input": "And?", "max_output_tokens": 120, "tool_choice": "required", "store": False,
        "tools": [{"type": "function", **PING}],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", FORCED)
async def test_a_tiny_model_is_held_to_a_call(path: str, tiny: CPUPagedEngine) -> None:
    """By the grammar of its own template, up to a token that ends the turn."""
    assert tiny.runner_info.architecture == "gpt_oss"
    async with app_client(create_app(tiny, ServerSettings(model_name="tiny"))) as client:
        found = await post(client, path, **FORCED[path])
    if path == "/v1/chat/completions":
        (call,), reason = found["choices"][0]["message"]["tool_calls"], found["choices"][0]["finish_reason"]
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    elif path == "/v1/messages":
        (block,), reason = found["content"], found["stop_reason"].replace("tool_use", "tool_calls")
        name, arguments = block["name"], block["input"]
    else:
        (item,), reason = found["output"], found["status"].replace("completed", "tool_calls")
        name, arguments = item["name"], json.loads(item["arguments"])
    assert (name, arguments, reason) == ("ping", {}, "tool_calls")


def test_both_ends_of_a_turn_end_it_and_the_end_of_a_message_does_not(tiny: CPUPagedEngine) -> None:
    ends = {tiny.tokenizer.decode([one], False) for one in tiny._parts.eos_token_ids}
    assert ends == {"<eos>", "<|call|>", "<|return|>"}
