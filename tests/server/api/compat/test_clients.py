"""Tests of the APIs with common clients: OpenAI, Anthropic, Ollama, LangChain and LlamaIndex."""

from __future__ import annotations

import json
import subprocess
import sys

import anthropic
import numpy as np
import ollama
import openai
import pytest
from pydantic import BaseModel, Field

from helpers.server.live_servers import KEYS

MODEL = "kvboost-edge/demo"
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bonn", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Weather in Bonn?"}]
CHAT = {
    "model": MODEL,
    "tools": [
        {
            "type": "function",
            "function": {"name": "weather", "parameters": PARAMETERS, "strict": True},
        }
    ],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 200,
    "temperature": 0,
}
RESPONSES = {"model": MODEL, "temperature": 0, "max_output_tokens": 200}
RESPONSE_TOOLS = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
# Newer versions of the client lack the API's temperature.
MESSAGES = {"model": MODEL, "max_tokens": 60, "extra_body": {"temperature": 0}}
CALLS = {**MESSAGES, "max_tokens": 200, "tools": [{"name": "weather", "input_schema": PARAMETERS}]}
CALLS["tool_choice"] = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
OPTIONS = {"temperature": 0, "num_predict": 60}


class Weather(BaseModel):
    city: str = Field(max_length=8)
    days: int = Field(ge=1, le=3)


# -- OpenAI: chats --

# The client's models of parsed answers are generic, and it dumps them as ones without parameters.
_PARSED = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")


def test_tool_results_hit_the_cached_tool_calls(client):
    messages = [*ASK]
    written = 0
    for _ in range(2):
        answer = client.chat.completions.create(messages=messages, **CHAT)
        usage = answer.usage
        message = answer.choices[0].message
        assert (usage.prompt_tokens_details.cached_tokens or 0) >= written - 17
        assert answer.choices[0].finish_reason == "tool_calls"
        written = usage.prompt_tokens + usage.completion_tokens
        (call,) = message.tool_calls
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]


@_PARSED
def test_openai_stream_and_parse_helpers_work(client):
    whole = client.chat.completions.create(messages=ASK, **CHAT).choices[0].message.tool_calls
    with client.chat.completions.stream(messages=ASK, **CHAT) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds
    assert json.loads(streamed[0].function.arguments) == json.loads(whole[0].function.arguments)
    named = {"type": "function", "function": {"name": "Weather"}}
    typed = {**CHAT, "tools": [openai.pydantic_function_tool(Weather)], "tool_choice": named}
    message = client.chat.completions.parse(messages=ASK, **typed).choices[0].message
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    plain = {"model": MODEL, "max_tokens": 200, "temperature": 0}
    answer = client.chat.completions.parse(
        messages=[*ASK, message, result], response_format=Weather, **plain
    )
    again = answer.choices[0].message
    assert isinstance(again.parsed, Weather)
    messages = [*ASK, message, result, again, *ASK]
    assert client.chat.completions.create(messages=messages, **plain).choices[0].message.content


# -- OpenAI: responses --


def test_openai_responses_whole_and_streamed(client):
    whole = client.responses.create(input="Hello", **RESPONSES)
    with client.responses.stream(input="Hello", **RESPONSES) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text != ""
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens


def test_openai_responses_are_continued_and_deleted(client):
    first = client.responses.create(input="Hello", **RESPONSES)
    second = client.responses.create(input="More", previous_response_id=first.id, **RESPONSES)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(input="x", previous_response_id=second.id, **RESPONSES)
    assert caught.value.code == "response_not_found"


def test_openai_responses_tool_call_and_result(client):
    chosen = {"tools": RESPONSE_TOOLS, "parallel_tool_calls": False, **RESPONSES}
    first = client.responses.create(input=ASK, tool_choice="required", **chosen)
    (call,) = first.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city", "days"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    second = client.responses.create(input=[*ASK, call, result], **chosen)
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 17


@_PARSED
def test_openai_responses_parse_a_typed_answer(client):
    answer = client.responses.parse(input="x", text_format=Weather, **RESPONSES)
    assert isinstance(answer.output_parsed, Weather)
    assert client.responses.create(input=[*answer.output, *ASK], **RESPONSES).output_text


# -- Anthropic --


@pytest.fixture(scope="module")
def claude(live_server):
    with anthropic.Anthropic(
        base_url=live_server.base_url, api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def test_anthropic_messages_whole_and_streamed(claude):
    whole = claude.messages.create(messages=ASK, system="Be brief.", **MESSAGES)
    with claude.messages.stream(messages=ASK, system="Be brief.", **MESSAGES) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    (block,) = whole.content
    assert (block.type, text) == ("text", block.text)
    assert text
    assert [one.text for one in final.content] == [text]
    assert (final.stop_reason, final.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )
    events = list(claude.messages.create(messages=ASK, stream=True, **MESSAGES))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")


def test_anthropic_tool_call_and_result(claude):
    first = claude.messages.create(messages=ASK, **CALLS)
    (call,) = first.content
    assert (call.type, first.stop_reason) == ("tool_use", "tool_use")
    assert call.input["city"] in ("Bonn", "Rome")
    assert call.input["days"] in (1, 2, 3)
    with claude.messages.stream(messages=ASK, **CALLS) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.type, streamed.name, streamed.input) == ("tool_use", call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    said = {"role": "assistant", "content": first.content}
    second = claude.messages.create(
        messages=[*ASK, said, {"role": "user", "content": [result]}], **CALLS
    )
    written = (
        first.usage.input_tokens + first.usage.cache_read_input_tokens + first.usage.output_tokens
    )
    assert second.usage.cache_read_input_tokens >= written - 17
    counted = claude.messages.count_tokens(
        model=MODEL, messages=ASK, tools=CALLS["tools"], tool_choice=CALLS["tool_choice"]
    )
    assert counted.input_tokens + first.usage.output_tokens == written


def test_anthropic_client_raises_its_own_exceptions(claude, keyed_server):
    with pytest.raises(anthropic.BadRequestError, match="top_p"):
        claude.messages.create(messages=ASK, **{**MESSAGES, "extra_body": {"top_p": 7}})
    with pytest.raises(anthropic.NotFoundError, match="claude-none") as missing:
        claude.messages.create(messages=ASK, **{**MESSAGES, "model": "claude-none"})
    assert missing.value.request_id
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="context"):
        claude.messages.create(
            messages=[{"role": "user", "content": "word " * 20_000}], stream=True, **MESSAGES
        )
    keyed = {"base_url": keyed_server.base_url, "max_retries": 0}
    with (
        anthropic.Anthropic(api_key="wrong", **keyed) as other,
        pytest.raises(anthropic.AuthenticationError),
    ):
        other.messages.create(messages=ASK, **MESSAGES)
    for key in ({"auth_token": KEYS[0]}, {"api_key": KEYS[0]}):
        with anthropic.Anthropic(**keyed, **key) as right:
            assert right.messages.create(messages=ASK, **MESSAGES).role == "assistant"


# -- Ollama --


@pytest.fixture
def llama(live_server):
    client = ollama.Client(host=live_server.base_url, timeout=60)
    yield client
    client.close()


def test_ollama_chat_and_generate_whole_and_streamed(llama):
    whole = llama.chat(MODEL, ASK, options=OPTIONS)
    lines = list(llama.chat(MODEL, ASK, options=OPTIONS, stream=True))
    assert "".join(line.message.content or "" for line in lines) == whole.message.content != ""
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert (lines[-1].eval_count, lines[-1].done_reason) == (whole.eval_count, whole.done_reason)
    made = llama.generate(MODEL, "The mill", raw=True, options=OPTIONS)
    pieces = [
        line.response
        for line in llama.generate(MODEL, "The mill", raw=True, options=OPTIONS, stream=True)
    ]
    assert "".join(pieces) == made.response != ""
    assert made.prompt_eval_count


def test_ollama_format_tools_and_tool_results(llama):
    answer = llama.chat(MODEL, ASK, format=PARAMETERS, options={**OPTIONS, "num_predict": 200})
    assert set(json.loads(answer.message.content)) == {"city", "days"}
    tools = [
        {
            "type": "function",
            "function": {"name": "weather", "description": "Weather", "parameters": PARAMETERS},
        }
    ]
    asked = llama.chat(MODEL, ASK, tools=tools, options=OPTIONS)
    call = {"function": {"name": "weather", "arguments": {"city": "Bonn", "days": 1}}}
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "Rain."},
    ]
    answered = llama.chat(MODEL, messages, tools=tools, options=OPTIONS)
    assert answered.prompt_eval_count > asked.prompt_eval_count
    assert answered.done


def test_ollama_list_ps_show_and_load(llama):
    (listed,) = {model.model for model in llama.list().models}
    assert listed
    assert [model.model for model in llama.ps().models] == [listed]
    shown = llama.show(listed)
    assert "completion" in shown.capabilities
    assert any(name.endswith("context_length") for name in shown.modelinfo)
    assert llama.chat(listed, [], options=OPTIONS).done_reason == "load"


def test_ollama_client_raises_its_own_exceptions(llama, keyed_server):
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


# -- LangChain and LlamaIndex, each in its own process, which isolates their warnings and threads --

LANGCHAIN = """
import json, sys
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

class Answer(BaseModel, extra="forbid"):
    days: int = Field(ge=1, le=3)

@tool
def weather(days: int) -> str:
    "Weather of some days"
    return "Rain"

base = {"base_url": sys.argv[1], "api_key": "none", "model": "kvboost-edge/demo", "max_retries": 0}
conversation = [("system", "Answer in one sentence."), ("human", "What grinds the corn?")]
brief = ChatOpenAI(max_tokens=10, temperature=0, **base)
whole = brief.invoke(conversation)
streamed = "".join(piece.content for piece in brief.stream(conversation))
both = [one.content for one in brief.batch([conversation, conversation])]
made = []
for responses in (False, True):
    model = ChatOpenAI(max_tokens=200, temperature=0, use_responses_api=responses, **base)
    bound = model.bind_tools([Answer], tool_choice="required", parallel_tool_calls=False)
    messages = [HumanMessage("Weather?")]
    answer = bound.invoke(messages)
    (call,) = answer.tool_calls
    bound.invoke([*messages, answer, ToolMessage("Rain.", tool_call_id=call["id"])])
    model.bind_tools([weather]).invoke(messages)
    ways = [model.with_structured_output(Answer, method=way) for way in ("function_calling", "json_schema")]
    made += [call["args"], *[way.invoke("x").model_dump() for way in ways]]
first = model.invoke("Weather?")
again = "".join(chunk.text for chunk in model.stream("Weather?"))
kept = model.invoke("And tomorrow?", previous_response_id=first.response_metadata["id"])
tokens = [one.usage_metadata["input_tokens"] for one in (whole, first, kept)]
# Otherwise it sends the token ids of another vocabulary.
embeddings = OpenAIEmbeddings(check_embedding_ctx_length=False, **base)
vectors = [*embeddings.embed_documents(["How are you?", "x"]), embeddings.embed_query("x")]
print(json.dumps([[whole.content, streamed, *both], made, [first.text, again], tokens, vectors]))
"""
LLAMAINDEX = """
import json, sys
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai import OpenAI

class Local(OpenAI):
    @property
    def metadata(self):  # theirs knows OpenAI's model names only
        from llama_index.core.llms import LLMMetadata
        return LLMMetadata(context_window=2048, num_output=10, is_chat_model=True, model_name=self.model)

options = {"api_key": "none", "model": "kvboost-edge/demo", "temperature": 0, "max_tokens": 10, "max_retries": 0}
model = Local(api_base=sys.argv[1], **options)
system = ChatMessage(role="system", content="Answer in one sentence.")
conversation = [system, ChatMessage(role="user", content="What grinds the corn?")]
answer = model.chat(conversation)
pieces = [piece.delta for piece in model.stream_chat(conversation)]
print(json.dumps([[answer.message.content, "".join(pieces)], answer.additional_kwargs["prompt_tokens"]]))
"""
CONVERSATION = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What grinds the corn?"},
]


def told_by(program, server):
    command = [sys.executable, "-c", program, f"{server.base_url}/v1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.slow
def test_langchain_chat_tools_structured_output_and_embeddings(live_server):
    engine = live_server.engine
    texts, made, (first, again), tokens, vectors = told_by(LANGCHAIN, live_server)
    expected = engine.generate(CONVERSATION, max_new_tokens=10)
    assert (texts, tokens[0]) == ([expected.output_text] * 4, expected.prompt_tokens)
    assert len(made) == 6
    assert all(answer["days"] in (1, 2, 3) for answer in made)
    assert first == again != ""
    assert tokens[2] > tokens[1]
    assert (np.array(vectors, np.float32) == engine.embed(["How are you?", "x", "x"])).all()


@pytest.mark.full
@pytest.mark.slow
def test_llamaindex_chats(live_server):
    expected = live_server.engine.generate(CONVERSATION, max_new_tokens=10)
    assert told_by(LLAMAINDEX, live_server) == [[expected.output_text] * 2, expected.prompt_tokens]
