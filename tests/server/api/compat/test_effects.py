"""Tests of each field that limits reasoning, sent by the client of its original API.

The clients are the packages `openai`, `anthropic` and `ollama`. Each response equals that of the
engine with the same settings.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import anthropic
import ollama
import openai
import pytest

from helpers.engine.thinking_model import OPENED
from helpers.server.live_servers import ENGINE_OPTIONS, serving
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.server.api.schemas.reasoning_effort import FRACTIONS

MODEL = "demo"
ASK = [{"role": "user", "content": "Tell me of the mill by the river."}]
LIMIT = 60
LOW = int(FRACTIONS["low"] * LIMIT)
CLOSER = "</think>"


class Said(NamedTuple):
    """A response. `counted` is the number of reasoning tokens, None if the client does not show it."""

    thought: str
    text: str
    counted: int | None


class Clients:
    """Clients of one server. Chats are greedy."""

    def __init__(self, server: Any, stack: contextlib.ExitStack) -> None:
        self.engine = server.engine
        url = server.base_url
        options = {"api_key": "none", "max_retries": 0, "timeout": 60}
        self._openai = stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", **options))
        self._claude = stack.enter_context(anthropic.Anthropic(base_url=url, **options))
        self._ollama = ollama.Client(url, timeout=60)
        stack.callback(self._ollama._client.close)

    def chat(self, **fields: Any) -> Said:
        answer = self._openai.chat.completions.create(
            model=MODEL, messages=ASK, max_completion_tokens=LIMIT, temperature=0, **fields
        )
        message = answer.choices[0].message
        counted = answer.usage.completion_tokens_details.reasoning_tokens
        thought = getattr(message, "reasoning_content", None)  # not in the package's types
        return Said(thought or "", message.content or "", counted)

    def responses(self, **fields: Any) -> Said:
        answer = self._openai.responses.create(
            model=MODEL,
            input=ASK,
            max_output_tokens=LIMIT,
            temperature=0,
            store=False,
            **fields,
        )
        thought = "".join(
            part.text for item in answer.output if item.type == "reasoning" for part in item.content
        )
        counted = answer.usage.output_tokens_details.reasoning_tokens
        return Said(thought, answer.output_text, counted)

    def messages(self, **fields: Any) -> Said:
        answer = self._claude.messages.create(
            model=MODEL, messages=ASK, max_tokens=LIMIT, extra_body={"temperature": 0}, **fields
        )
        found = {"thinking": "", "text": ""}
        for block in answer.content:
            found[block.type] += block.thinking if block.type == "thinking" else block.text
        details = answer.usage.output_tokens_details
        return Said(found["thinking"], found["text"], details.thinking_tokens)

    def ollama_chat(self, **fields: Any) -> Said:
        options = {"temperature": 0, "num_predict": LIMIT}
        message = self._ollama.chat(MODEL, ASK, options=options, **fields).message
        return Said(message.thinking or "", message.content or "", None)

    def chat_stream(self, **fields: Any) -> Said:
        thought = text = ""
        usage = None
        for chunk in self._openai.chat.completions.create(
            model=MODEL,
            messages=ASK,
            max_completion_tokens=LIMIT,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **fields,
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                thought += getattr(choice.delta, "reasoning_content", None) or ""
                text += choice.delta.content or ""
        return Said(thought, text, usage.completion_tokens_details.reasoning_tokens)

    def messages_stream(self, **fields: Any) -> Said:
        found = {"thinking": "", "text": ""}
        counted = None
        with self._claude.messages.stream(
            model=MODEL, messages=ASK, max_tokens=LIMIT, extra_body={"temperature": 0}, **fields
        ) as stream:
            for event in stream:
                if event.type in found:
                    found[event.type] += getattr(event, event.type)
                elif event.type == "message_delta":
                    counted = event.usage.output_tokens_details.thinking_tokens
        return Said(found["thinking"], found["text"], counted)

    def ollama_chat_stream(self, **fields: Any) -> Said:
        options = {"temperature": 0, "num_predict": LIMIT}
        lines = list(self._ollama.chat(MODEL, ASK, options=options, stream=True, **fields))
        thought = "".join(line.message.thinking or "" for line in lines)
        return Said(thought, "".join(line.message.content or "" for line in lines), None)


@pytest.fixture(scope="module")
def clients(isolated_cache):
    """Clients of the bundled model with a template that opens the reasoning, which the model never
    closes.
    """
    with (
        CPUPagedEngine.from_pretrained("kvboost-edge/demo", **ENGINE_OPTIONS) as engine,
        contextlib.ExitStack() as stack,
    ):
        engine.tokenizer.replace_template(OPENED)
        server = stack.enter_context(serving(engine, model_name=MODEL))
        yield Clients(server, stack)


REASONING = [
    ("openai", "chat", {"reasoning_effort": "low"}, LOW),
    ("openai", "chat", {"reasoning_effort": "none"}, 0),
    ("openai", "chat", {"extra_body": {"reasoning_budget": 7}}, 7),
    ("openai", "responses", {"reasoning": {"effort": "low"}}, LOW),
    ("anthropic", "messages", {"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
    (
        "anthropic",
        "messages",
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
        LOW,
    ),
    ("openai", "chat_stream", {"reasoning_effort": "low"}, LOW),
    ("anthropic", "messages_stream", {"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
    ("ollama", "ollama_chat", {"think": "low"}, LOW),
    ("ollama", "ollama_chat_stream", {"think": "low"}, LOW),
]


def greedy(engine, **options):
    """Return the token ids that the engine generates for the question."""
    sampling = SamplingParams.from_options(temperature=0.0, max_new_tokens=LIMIT, **options)
    ids = engine.tokenizer.encode_chat(ASK)
    return engine.generate(ids, sampling=sampling).output_token_ids


@pytest.mark.parametrize(
    ("how", "fields", "budget"),
    [
        pytest.param(*row[1:], id=f"{row[0]}-{row[1]}-{'-'.join(row[2])}-{row[3]}")
        for row in REASONING
    ],
)
@pytest.mark.some(4)
def test_reasoning_is_cut_at_exactly_n_tokens(clients, how, fields, budget):
    engine = clients.engine
    free = greedy(engine)
    assert len(free) == LIMIT
    said = getattr(clients, how)(**fields)
    ids = greedy(engine, reasoning_budget=budget)
    thought, answer = list(ids[:budget]), engine.tokenizer.decode(ids[budget:])
    assert thought == list(free[:budget])
    end, _, answer = answer.partition(CLOSER)
    assert end.strip() == ""
    assert said.thought.strip() == engine.tokenizer.decode(thought).strip()
    assert said.text.strip() == answer.strip() != ""
    if said.counted is not None:
        assert said.counted == budget
