"""Tools over HTTP for a model whose template lists them between LFM2's markers and leaves calls out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
from tokenizers import AddedToken

from helpers.engine import fake_runner
from helpers.server import scripted_model
from helpers.text.hybrid_templates import LFM2_UNSHOWN
from kvboost_edge.text.tokenizer import Tokenizer
from server.api.test_tools import ARGUMENTS, ASK, CHAT, CLOCK, TOOLS, WEATHER, ask, calls_of, refused

MARKERS = ("<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>")
SAID = "<|tool_call_start|>[weather(city='Köln 🌧 \"x\"',days=2), clock()]<|tool_call_end|>"
CALLS: list[tuple[str, Any]] = [("weather", ARGUMENTS), ("clock", {})]


@pytest.fixture
def markers() -> tuple[str, ...]:
    return MARKERS


@pytest.fixture
def spoken_engine(monkeypatch: pytest.MonkeyPatch, markers: tuple[str, ...]) -> Iterator[Any]:
    raw, size = fake_runner.fake_tokenizer().codec.to_json(), fake_runner.VOCAB_SIZE + len(markers)
    monkeypatch.setattr(fake_runner, "fake_tokenizer", lambda: _with_markers(raw, markers))
    monkeypatch.setattr(fake_runner, "VOCAB_SIZE", size)
    monkeypatch.setattr(scripted_model, "VOCAB_SIZE", size)
    with fake_runner.fake_engine(num_blocks=1024, max_context=8000) as engine:
        engine.tokenizer.chat_template = LFM2_UNSHOWN
        yield engine


def _with_markers(raw: str, markers: tuple[str, ...]) -> Tokenizer:
    backend = fake_runner.RawTokenizer.from_str(raw)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in markers])
    return Tokenizer.from_transformers(backend)


@pytest.fixture
def speaker(spoken_engine: Any, monkeypatch: pytest.MonkeyPatch) -> scripted_model.Speaker:
    speaker = scripted_model.Speaker(spoken_engine)
    speaker.text, speaker.openings = SAID, ["<|im_start|>assistant\n"]
    monkeypatch.setattr(fake_runner, "token_logits", speaker.logits)
    return speaker


def results_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    made = answer["choices"][0]["message"]["tool_calls"]
    return [{"role": "tool", "tool_call_id": call["id"], "content": "Rain."} for call in made]


async def test_calls_and_an_answer_from_their_results(
    app: httpx.AsyncClient, speaker: scripted_model.Speaker, spoken_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await ask(app)
    assert (calls_of(first), first["choices"][0]["finish_reason"]) == (CALLS, "tool_calls")
    seen: list[list[int]] = []

    def logits(token_ids: Any) -> Any:
        seen.append([int(i) for i in token_ids])
        return speaker.logits(token_ids)

    monkeypatch.setattr(fake_runner, "token_logits", logits)
    speaker.text = "It rains."
    messages = [*ASK, first["choices"][0]["message"], *results_of(first)]
    second = await ask(app, messages=messages)
    assert second["choices"][0]["message"]["content"] == "It rains."
    written = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= written - 17, "found as it was written"
    result = "<|im_end|>\n<|im_start|>tool\n<|tool_response_start|>Rain.<|tool_response_end|>"
    turn = "<|im_start|>assistant\n"
    assert f"{turn}{SAID}{2 * result}<|im_end|>\n{turn}" in spoken_engine.tokenizer.decode(seen[0], False)
    messages[1] = json.loads(json.dumps(messages[1]))
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Bonn", "days": 2}'
    messages[1]["content"] = "I look."
    seen.clear()
    await ask(app, messages=messages)
    edited = '<|tool_call_start|>[weather(city="Bonn", days=2), clock()]<|tool_call_end|>I look.'
    assert f"{turn}{edited}{2 * result}" in spoken_engine.tokenizer.decode(seen[0], False)


async def test_a_stream_says_what_a_whole_answer_says(app: httpx.AsyncClient, speaker: scripted_model.Speaker) -> None:
    speaker.text = f"Let me look. {SAID}"
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": 300, "temperature": 0, "stream": True}
    content, made = "", dict[int, list[str]]()
    async with app.stream("POST", CHAT, json=body) as stream:
        async for line in stream.aiter_lines():
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                content += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls", ()):
                    one = made.setdefault(call["index"], ["", ""])
                    one[0] += call["function"].get("name", "")
                    one[1] += call["function"]["arguments"]
    assert content == "Let me look."
    assert [(name, json.loads(text)) for name, text in made.values()] == CALLS


async def test_a_required_call_fits_its_schema_whatever_the_model_wants(
    app: httpx.AsyncClient, spoken_engine: Any
) -> None:
    """With the fake runner's own random logits."""
    validators = {one["name"]: jsonschema_rs.validator_for(one.get("parameters", {})) for one in (WEATHER, CLOCK)}
    ended = 0
    for seed in range(12):
        answer = await ask(app, tool_choice="required", seed=seed, temperature=1, parallel_tool_calls=False)
        if answer["choices"][0]["finish_reason"] == "tool_calls":
            ((name, arguments),) = calls_of(answer)
            validators[name].validate(arguments)
            ended += 1
    assert ended >= 2


async def test_no_call_where_none_is_wanted(app: httpx.AsyncClient, speaker: scripted_model.Speaker) -> None:
    message = (await ask(app, tool_choice="none"))["choices"][0]["message"]
    assert "tool_calls" not in message
    assert "<|tool_call_start|>" not in message["content"]


@pytest.mark.parametrize("markers", [MARKERS[:2]])
async def test_a_model_without_the_tokens_of_calls_is_refused_by_name(app: httpx.AsyncClient) -> None:
    error = await refused(app)
    assert (error["param"], "not known here or not at all" in error["message"]) == ("tools", True)
