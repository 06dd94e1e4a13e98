"""Tools by the clients people use: OpenAI's own and LangChain."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from helpers.server.live_servers import LiveServer

MODEL = "kvboost-edge/demo"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}]
FIELDS: dict[str, Any] = {
    "model": MODEL,
    "tools": TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 200,
    "temperature": 0,
}
ASK: list[Any] = [{"role": "user", "content": "Weather in Bonn?"}]


def test_results_sent_back_find_the_calls_in_the_cache(client: openai.OpenAI) -> None:
    messages, written = [*ASK], 0
    for _ in range(2):
        answer = client.chat.completions.create(messages=messages, **FIELDS)
        usage, message = answer.usage, answer.choices[0].message
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert message.tool_calls
        assert (usage.prompt_tokens_details.cached_tokens or 0) >= written - 17
        assert answer.choices[0].finish_reason == "tool_calls"
        written = usage.prompt_tokens + usage.completion_tokens
        (call,) = message.tool_calls
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]


class Weather(BaseModel):
    city: str = Field(max_length=8)
    days: int = Field(ge=1, le=3)


def test_the_clients_helpers_understand_streams_and_types(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=ASK, **FIELDS).choices[0].message.tool_calls
    with client.chat.completions.stream(messages=ASK, **FIELDS) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds
    assert whole
    assert streamed
    assert json.loads(streamed[0].function.arguments) == json.loads(whole[0].function.arguments)
    named: Any = {"type": "function", "function": {"name": "Weather"}}
    typed = {**FIELDS, "tools": [openai.pydantic_function_tool(Weather)], "tool_choice": named}
    (call,) = client.chat.completions.parse(messages=ASK, **typed).choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)


LANGCHAIN = """
import json, sys
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

class Answer(BaseModel, extra="forbid"):
    days: int = Field(ge=1, le=3)

@tool
def weather(days: int) -> str:
    "Weather of some days"
    return "Rain"

options = {"api_key": "none", "model": "kvboost-edge/demo", "temperature": 0, "max_tokens": 200, "max_retries": 0}
model = ChatOpenAI(base_url=sys.argv[1], **options)
bound = model.bind_tools([Answer], tool_choice="required", parallel_tool_calls=False)
messages = [HumanMessage("Weather?")]
answer = bound.invoke(messages)
(call,) = answer.tool_calls
bound.invoke([*messages, answer, ToolMessage("Rain.", tool_call_id=call["id"])])
model.bind_tools([weather]).invoke(messages)
ways = [model.with_structured_output(Answer, method=way).invoke("x") for way in ("function_calling", "json_schema")]
print(json.dumps([call["name"], call["args"], *[way.model_dump() for way in ways]]))
"""


@pytest.mark.slow
def test_langchain_binds_tools_and_shapes_answers(live_server: LiveServer) -> None:
    """In a process of its own: what it warns about and starts is its own."""
    command = [sys.executable, "-c", LANGCHAIN, f"{live_server.base_url}/v1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    name, *answers = json.loads(run.stdout.splitlines()[-1])
    assert name == "Answer"
    assert all(answer["days"] in (1, 2, 3) for answer in answers)
