"""The APIs by the clients people use: Anthropic's, Ollama's, and LangChain with OpenAI's responses."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import pytest

from helpers.server.live_servers import KEYS, LiveServer, wait_until
from server.api.test_tools_clients import PARAMETERS

MODEL = "kvboost-edge/demo"
ASK: list[Any] = [{"role": "user", "content": "Weather in Bonn?"}]
# Later versions of the client know no temperature, which the API has.
FIELDS: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "extra_body": {"temperature": 0}}
CALLS: dict[str, Any] = {**FIELDS, "max_tokens": 200, "tools": [{"name": "weather", "input_schema": PARAMETERS}]}
CALLS["tool_choice"] = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def claude(live_server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live_server.base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def llama(live_server: LiveServer) -> Iterator[ollama.Client]:
    client = ollama.Client(host=live_server.base_url, timeout=60)
    yield client
    client.close()


def test_anthropics_client_reads_whole_messages_and_streams(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(messages=ASK, system="Be brief.", **FIELDS)
    with claude.messages.stream(messages=ASK, system="Be brief.", **FIELDS) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    (block,) = whole.content
    assert block.type == "text"
    assert text == block.text != ""
    assert [one.model_dump(exclude={"citations", "parsed_output"}) for one in final.content] == [
        one.model_dump(exclude={"citations", "parsed_output"}) for one in whole.content
    ]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    events = list(claude.messages.create(messages=ASK, stream=True, **FIELDS))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")


def test_anthropics_client_counts_what_a_prompt_takes(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=ASK, system="Be brief.").input_tokens
    usage = claude.messages.create(messages=ASK, system="Be brief.", **FIELDS).usage
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    assert counted == sum(part or 0 for part in parts)


def test_anthropics_client_calls_a_tool_and_sends_the_result_back(claude: anthropic.Anthropic) -> None:
    first = claude.messages.create(messages=ASK, **CALLS)
    (call,) = first.content
    assert (call.type, first.stop_reason) == ("tool_use", "tool_use")
    assert call.input["city"] in ("Bonn", "Rome")
    assert call.input["days"] in (1, 2, 3)
    with claude.messages.stream(messages=ASK, **CALLS) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert (streamed.name, streamed.input) == (call.name, call.input)
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    said: Any = {"role": "assistant", "content": first.content}
    second = claude.messages.create(messages=[*ASK, said, {"role": "user", "content": [result]}], **CALLS)
    written = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0) + first.usage.output_tokens
    assert (second.usage.cache_read_input_tokens or 0) >= written - 17


def test_anthropics_client_keeps_what_is_marked(claude: anthropic.Anthropic, live_server: LiveServer) -> None:
    system: Any = [{"type": "text", "text": "Be brief. " * 30, "cache_control": {"type": "ephemeral"}}]
    first = claude.messages.create(messages=ASK, system=system, **FIELDS).usage
    again = claude.messages.create(messages=[{"role": "user", "content": "And Rome?"}], system=system, **FIELDS).usage
    assert (first.cache_creation_input_tokens or 0) + (first.cache_read_input_tokens or 0) > 16
    assert (again.cache_read_input_tokens or 0) > 16
    assert again.cache_creation_input_tokens == 0
    with live_server.client() as client:  # other tests share the server
        marked = [{"role": "system", "content": system[0]["text"]}]
        body = {"messages": marked, "add_generation_prompt": False}
        assert client.post("/v1/unpin", json=body).json()["blocks_unpinned"] > 0
    assert live_server.engine.paged_stats()["pinned_blocks"] == 0


def test_anthropics_client_raises_its_own_errors(claude: anthropic.Anthropic, keyed_server: LiveServer) -> None:
    with pytest.raises(anthropic.BadRequestError, match="top_p"):
        claude.messages.create(messages=ASK, **{**FIELDS, "extra_body": {"top_p": 7}})
    with pytest.raises(anthropic.NotFoundError, match="claude-none") as missing:
        claude.messages.create(messages=ASK, **{**FIELDS, "model": "claude-none"})
    assert missing.value.request_id
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="context"):
        claude.messages.create(messages=[{"role": "user", "content": "word " * 20_000}], stream=True, **FIELDS)
    keyed: Any = {"base_url": keyed_server.base_url, "max_retries": 0}
    with anthropic.Anthropic(api_key="wrong", **keyed) as other, pytest.raises(anthropic.AuthenticationError):
        other.messages.create(messages=ASK, **FIELDS)
    for key in ({"auth_token": KEYS[0]}, {"api_key": KEYS[0]}):
        with anthropic.Anthropic(**keyed, **key) as right:
            assert right.messages.create(messages=ASK, **FIELDS).role == "assistant"


async def test_anthropics_client_that_closes_its_stream_ends_the_work(live_server: LiveServer) -> None:
    fields: Any = {**FIELDS, "max_tokens": 900, "messages": ASK}
    async with (
        anthropic.AsyncAnthropic(base_url=live_server.base_url, api_key="none", max_retries=0) as client,
        client.messages.stream(**fields) as stream,
    ):
        async for _ in stream.text_stream:
            break
    await asyncio.to_thread(wait_until, live_server.idle, "the end of the request")


OPTIONS = {"temperature": 0, "num_predict": 60}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": PARAMETERS}}


def test_ollamas_client_reads_whole_answers_and_lines(llama: ollama.Client) -> None:
    whole = llama.chat(MODEL, ASK, options=OPTIONS)
    lines = list(llama.chat(MODEL, ASK, options=OPTIONS, stream=True))
    assert "".join(line.message.content or "" for line in lines) == whole.message.content != ""
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert (lines[-1].eval_count, lines[-1].done_reason) == (whole.eval_count, whole.done_reason)
    made = llama.generate(MODEL, "The mill", raw=True, options=OPTIONS)
    pieces = [line.response for line in llama.generate(MODEL, "The mill", raw=True, options=OPTIONS, stream=True)]
    assert "".join(pieces) == made.response != ""
    assert made.prompt_eval_count


def test_ollamas_client_gets_answers_of_a_form(llama: ollama.Client) -> None:
    answer = llama.chat(MODEL, ASK, format=PARAMETERS, options={**OPTIONS, "num_predict": 200})
    assert set(json.loads(answer.message.content or "")) == {"city", "days"}


def test_ollamas_client_offers_tools_and_sends_results(llama: ollama.Client) -> None:
    asked = llama.chat(MODEL, ASK, tools=[TOOL], options=OPTIONS)
    call = {"function": {"name": "weather", "arguments": {"city": "Bonn", "days": 1}}}
    messages = [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "Rain."}]
    answered = llama.chat(MODEL, messages, tools=[TOOL], options=OPTIONS)
    assert (answered.prompt_eval_count or 0) > (asked.prompt_eval_count or 0)
    assert answered.done


def test_ollamas_client_looks_at_the_model(llama: ollama.Client) -> None:
    (listed,) = {model.model for model in llama.list().models}
    assert listed
    assert [model.model for model in llama.ps().models] == [listed]
    shown = llama.show(listed)
    assert "completion" in (shown.capabilities or [])
    assert any(name.endswith("context_length") for name in shown.modelinfo or {})
    assert llama.chat(listed, [], options=OPTIONS).done_reason == "load"


def test_ollamas_client_raises_its_own_errors(llama: ollama.Client, keyed_server: LiveServer) -> None:
    with pytest.raises(ollama.ResponseError, match="not found") as missing:
        llama.chat("other", ASK)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="temperature"):
        llama.chat(MODEL, ASK, options={"temperature": 9})
    with pytest.raises(ollama.ResponseError, match="context"):
        list(llama.generate(MODEL, "word " * 20_000, stream=True))
    other = ollama.Client(host=keyed_server.base_url, headers={"Authorization": "Bearer wrong"})
    with pytest.raises(ollama.ResponseError, match="API key") as refused:
        other.list()
    assert refused.value.status_code == 401
    other.close()


LANGCHAIN = """
import json, sys
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

class Answer(BaseModel, extra="forbid"):
    days: int = Field(ge=1, le=3)

options = {"api_key": "none", "model": "kvboost-edge/demo", "temperature": 0, "max_tokens": 200, "max_retries": 0}
model = ChatOpenAI(base_url=sys.argv[1], use_responses_api=True, **options)
whole = model.invoke("Weather?")
streamed = "".join(chunk.text for chunk in model.stream("Weather?"))
kept = model.invoke("And tomorrow?", previous_response_id=whole.response_metadata["id"])
bound = model.bind_tools([Answer], tool_choice="required", parallel_tool_calls=False)
messages = [HumanMessage("Weather?")]
answer = bound.invoke(messages)
(call,) = answer.tool_calls
bound.invoke([*messages, answer, ToolMessage("Rain.", tool_call_id=call["id"])])
shaped = model.with_structured_output(Answer, method="json_schema").invoke("x")
tokens = [one.usage_metadata["input_tokens"] for one in (whole, kept)]
print(json.dumps([whole.text, streamed, call["name"], call["args"], shaped.model_dump(), tokens]))
"""


@pytest.mark.slow
def test_langchain_speaks_responses(live_server: LiveServer) -> None:
    """In a process of its own: what it warns about and starts is its own."""
    command = [sys.executable, "-c", LANGCHAIN, f"{live_server.base_url}/v1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    whole, streamed, name, arguments, shaped, tokens = json.loads(run.stdout.splitlines()[-1])
    assert whole == streamed != ""
    assert name == "Answer"
    assert {arguments["days"], shaped["days"]} <= {1, 2, 3}
    assert tokens[1] > tokens[0]
