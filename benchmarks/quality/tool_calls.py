"""Quality of a real model's tool calls over the server's API.

12 requests with known correct calls have four tools available. A call is valid if it names one of
them and matches its schema. It is right if the tool and the arguments are correct, ignoring case.
tool_choice `required` forces a call, and `auto` lets the model decide whether to call. 12 further
questions need no tool. With `auto`, fewer calls are better there.

    python benchmarks/quality/tool_calls.py MODEL...
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs

sys.path.append(str(Path(__file__).parents[2]))

from kvboost_edge import CPUPagedEngine
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

__all__ = ["NEEDLESS", "REQUESTS", "TOOLS", "is_right", "is_valid_call", "tool_rows"]

_WORD = {"type": "string", "maxLength": 40}
_NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


TOOLS = [
    _tool("get_weather", "The weather in a city", city=_WORD),
    _tool("set_timer", "Starts a timer of some minutes", minutes=_NUMBER),
    _tool(
        "send_message",
        "Sends a text to a person",
        person=_WORD,
        text={"type": "string", "maxLength": 80},
    ),
    _tool("play_music", "Plays the music of an artist", artist=_WORD),
]
REQUESTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
    ("Will it rain in London today?", "get_weather", {"city": "London"}),
    ("How warm is it in Madrid?", "get_weather", {"city": "Madrid"}),
    ("Set a timer for 10 minutes.", "set_timer", {"minutes": 10}),
    ("Start a timer of 25 minutes, please.", "set_timer", {"minutes": 25}),
    ("Wake me up in 5 minutes with a timer.", "set_timer", {"minutes": 5}),
    ("Send the message 'hello' to Anna.", "send_message", {"person": "Anna", "text": "hello"}),
    ("Text Peter: I am late", "send_message", {"person": "Peter", "text": "I am late"}),
    (
        "Tell Maria by message: dinner is ready",
        "send_message",
        {"person": "Maria", "text": "dinner is ready"},
    ),
    ("Play music by Mozart.", "play_music", {"artist": "Mozart"}),
    ("I want to hear songs of the Beatles.", "play_music", {"artist": "the Beatles"}),
    ("Play something by Bach.", "play_music", {"artist": "Bach"}),
)
NEEDLESS = (
    "What is the capital of France?",
    "How many minutes are in two hours?",
    "Who composed The Magic Flute?",
    "Translate 'good morning' into Spanish.",
    "What is 17 plus 25?",
    "Why is the sky blue?",
    "Write a haiku about autumn.",
    "Name three animals that live in the sea.",
    "What does the word 'melancholy' mean?",
    "Write a Python function that adds two numbers.",
    "Give an example of a JSON object that describes a person.",
    "Thank you, that was helpful!",
)
"""Questions that none of the tools helps with."""


def tool_rows(engine: CPUPagedEngine) -> list[dict[str, Any]]:
    """Return a row for each tool_choice, and one for the questions that need no tool."""
    return [
        *(asyncio.run(_row(engine, choice)) for choice in ("required", "auto")),
        asyncio.run(_needless_row(engine)),
    ]


async def _row(engine: CPUPagedEngine, choice: str) -> dict[str, Any]:
    answers = await _answers(engine, [question for question, _, _ in REQUESTS], choice)
    called = [_first_call(answer) for answer in answers]
    ended = [
        call
        for call, one in zip(called, answers, strict=True)
        if call and one["finish_reason"] == "tool_calls"
    ]
    right = sum(is_right(call, *wanted[1:]) for call, wanted in zip(called, REQUESTS, strict=True))
    tool = sum(
        bool(call) and call["function"]["name"] == name
        for call, (_, name, _) in zip(called, REQUESTS, strict=True)
    )
    valid = sum(map(is_valid_call, ended))
    row = {
        "tool_choice": choice,
        "asked": len(REQUESTS),
        "called": sum(map(bool, called)),
        "ended": len(ended),
    }
    row |= {"valid %": 100 * valid / len(ended) if ended else None}
    row |= {"right tool %": 100 * tool / len(REQUESTS), "right %": 100 * right / len(REQUESTS)}
    print(json.dumps(row), flush=True)
    return row


async def _needless_row(engine: CPUPagedEngine) -> dict[str, Any]:
    answers = await _answers(engine, NEEDLESS, "auto")
    row = {
        "tool_choice": "auto, no tool needed",
        "asked": len(NEEDLESS),
        "called": sum(map(bool, map(_first_call, answers))),
    }
    print(json.dumps(row), flush=True)
    return row


async def _answers(
    engine: CPUPagedEngine, questions: Sequence[str], choice: str
) -> list[dict[str, Any]]:
    transport = httpx.ASGITransport(app=create_app(engine, ServerSettings()))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=600
    ) as client:
        return [await _asked(client, question, choice) for question in questions]


def _first_call(answer: dict[str, Any]) -> Any:
    """Return the first call, or None if there is none."""
    return answer["message"].get("tool_calls", [None])[0]


async def _asked(client: httpx.AsyncClient, question: str, choice: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    body = {
        "messages": messages,
        "tools": TOOLS,
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 96,
    }
    answer = await client.post("/v1/chat/completions", json={**body, "parallel_tool_calls": False})
    answer.raise_for_status()
    first: dict[str, Any] = answer.json()["choices"][0]
    return first


def is_valid_call(call: dict[str, Any]) -> bool:
    """Return whether a call names one of the tools and matches its schema."""
    known = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return False
    return function["name"] in known and jsonschema_rs.is_valid(known[function["name"]], arguments)


def is_right(call: dict[str, Any] | None, name: str, arguments: dict[str, Any]) -> bool:
    """Return whether a call is the correct one for the request."""
    if call is None or not is_valid_call(call) or call["function"]["name"] != name:
        return False
    given = json.loads(call["function"]["arguments"])
    return all(_plain(given[key]) == _plain(value) for key, value in arguments.items())


def _plain(value: Any) -> str:
    return str(value).strip().strip(".!").lower().removeprefix("the ")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("models", nargs="+", help="GGUF files or model directories")
    given = options.parse_args()
    for model in given.models:
        print(model, flush=True)
        with CPUPagedEngine.from_pretrained(model, num_blocks=256) as engine:
            tool_rows(engine)


if __name__ == "__main__":
    main()
