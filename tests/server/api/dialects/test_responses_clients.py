"""/v1/responses by OpenAI's own client, and as a coding agent asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from server.api.dialects.test_responses import CALL, PATH, rebuilt
from server.api.test_tools import Speaker
from server.api.test_tools_clients import PARAMETERS

FIELDS: dict[str, Any] = {"model": "kvboost-edge/demo", "temperature": 0, "max_output_tokens": 200}
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
# What codex (npm, 0.169) sends with its third request, its long texts cut, its ids zeroed.
CODEX = Path(__file__).parents[3] / "data" / "agents" / "codex.json"


def test_the_client_reads_whole_answers_and_streams(client: openai.OpenAI) -> None:
    whole = client.responses.create(input="Hello", **FIELDS)
    with client.responses.stream(input="Hello", **FIELDS) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text != ""
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens


def test_the_client_continues_and_forgets(client: openai.OpenAI) -> None:
    first = client.responses.create(input="Hello", **FIELDS)
    second = client.responses.create(input="More", previous_response_id=first.id, **FIELDS)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(input="x", previous_response_id=second.id, **FIELDS)
    assert caught.value.code == "response_not_found"


def test_the_client_calls_a_tool_and_sends_the_result_back(client: openai.OpenAI) -> None:
    chosen: Any = {"tools": TOOLS, "parallel_tool_calls": False}
    asked: Any = [{"role": "user", "content": "Weather in Bonn?"}]
    first = client.responses.create(input=asked, tool_choice="required", **chosen, **FIELDS)
    (call,) = first.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city", "days"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    second = client.responses.create(input=[*asked, call, result], **chosen, **FIELDS)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 17


class Fine(BaseModel):
    fine: bool


def test_the_client_parses_answers_of_a_type(client: openai.OpenAI) -> None:
    assert isinstance(client.responses.parse(input="Fine?", text_format=Fine, **FIELDS).output_parsed, Fine)


async def test_what_codex_sends_is_answered_with_a_call_of_its_tools(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = CALL.split("\n")[0] + '\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n</tool_call>'
    body = json.loads(CODEX.read_text(encoding="utf-8"))
    answer = await app.post(PATH, json={**body, "temperature": 0})
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1]["type"] == "response.completed"
    (call,) = rebuilt(events)
    assert (call["name"], json.loads(call["arguments"])) == ("exec_command", {"cmd": "ls"})
    assert (await app.get(f"{PATH}/{events[-1]['response']['id']}")).status_code == 404  # store is false
