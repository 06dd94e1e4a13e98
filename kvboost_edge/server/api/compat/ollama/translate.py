"""Translation of Ollama request bodies to chat and completion requests."""

from __future__ import annotations

import json
import logging
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvboost_edge.server.api.compat.ollama.schemas import (
    OllamaChat,
    OllamaGenerate,
    OllamaMessage,
    Options,
)
from kvboost_edge.server.api.compat.translated import (
    SAMPLING_FIELDS,
    chat_request,
    completion_request,
)
from kvboost_edge.server.api.schemas.chat import ChatRequest
from kvboost_edge.server.api.schemas.completions import CompletionRequest
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.engines import Engine
from kvboost_edge.server.logs import log_facts

__all__ = [
    "CHAT_FIELDS",
    "GENERATE_FIELDS",
    "chat_of",
    "generation_of",
    "log_reduced_context",
    "prompt_of",
]

Json = dict[str, Any]

_OPTIONS = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "json_schema": "format",
    "response_format": "format",
    "reasoning_budget": "think",
    "reasoning_effort": "think",
}
_SAMPLERS = ("typical_p", "mirostat", "mirostat_tau", "mirostat_eta", "repeat_last_n")
CHAT_FIELDS = _OPTIONS
GENERATE_FIELDS = {**_OPTIONS, "messages": "prompt"}
"""Ollama's names of OpenAI fields."""

# Engines that have logged a num_ctx above their context.
_TOLD: weakref.WeakSet[Engine] = weakref.WeakSet()
_ID = "call{:05d}"  # Some templates require ids of nine letters and digits.


def chat_of(body: OllamaChat) -> ChatRequest:
    """Convert an /api/chat body to a chat request.

    Raises:
        ApiError: a field is invalid (400).
    """
    return chat_request(
        messages=_messages(body.messages or ()),
        tools=[_tool(one) for one in body.tools or ()] or None,
        **_shared(body),
    )


def generation_of(body: OllamaGenerate) -> ChatRequest:
    """Convert an /api/generate body to a chat of one message."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    return chat_request(
        messages=[*system, {"role": "user", "content": body.prompt}], **_shared(body)
    )


def prompt_of(body: OllamaGenerate) -> CompletionRequest:
    """Convert a raw /api/generate body to a completion request.

    Raises:
        ApiError: a field needs the chat template (400).
    """
    thinks = body.think is not None and body.think is not False
    for name, given in (("system", body.system), ("think", thinks)):
        if given:
            raise bad_field(
                name, f"{name} needs the model's chat template; leave out {name}, or raw"
            )
    shared = _shared(body)
    for name in ("chat_template_kwargs", "reasoning_effort", "reasoning_budget", "kvboost"):
        del shared[name]
    return completion_request(prompt=body.prompt, **shared)


def log_reduced_context(options: Options, engine: Engine) -> None:
    """Log once per engine that a request sets a num_ctx above the model's context."""
    context = engine.runner_info.max_context
    if options.num_ctx is None or options.num_ctx <= context or engine in _TOLD:
        return
    _TOLD.add(engine)
    log_facts(
        logging.WARNING,
        "num_ctx exceeds the model's context and is reduced to it (logged once)",
        num_ctx=options.num_ctx,
        context=context,
    )


def _shared(body: OllamaChat | OllamaGenerate) -> Json:
    options = body.chosen
    limit = body.chosen.num_predict
    return {
        **{name: getattr(options, name) for name in (*SAMPLING_FIELDS, *_SAMPLERS)},
        "stop": list(options.stop) if options.stop else None,
        "repetition_penalty": options.repeat_penalty,
        "max_tokens": None if limit is None or limit <= 0 else limit,
        "json_schema": body.format,
        "stream": body.streams,
        "kvboost": None
        if body.truncate is None
        else {"context_overflow": "drop_oldest" if body.truncate else "error"},
        **_thinking(body.think),
    }


def _thinking(think: bool | str | int | None) -> Json:
    """Return the fields for `think`, which is a switch, an effort or a number of tokens."""
    switch = think if think is None or isinstance(think, bool) else True
    return {
        "chat_template_kwargs": None if switch is None else {"enable_thinking": switch},
        "reasoning_effort": think if isinstance(think, str) else None,
        "reasoning_budget": think
        if isinstance(think, int) and not isinstance(think, bool)
        else None,
    }


def _tool(tool: Json) -> Json:
    """Return a tool. Properties that are null, as the Go client sends for none, are left out."""
    function = tool["function"]
    parameters = function["parameters"]
    if parameters.get("properties", {}) is not None:
        return tool
    kept = {name: value for name, value in parameters.items() if name != "properties"}
    return {**tool, "function": {**function, "parameters": kept}}


def _messages(messages: Sequence[OllamaMessage]) -> list[Json]:
    """Convert chat messages, and add ids to tool calls.

    Ollama's tool calls need no ids. A tool result is matched to an earlier call by the tool's name,
    else by order.
    """
    waiting: deque[tuple[str, str]] = deque()  # (id, name) of calls that have no result yet
    number = 0
    found = []
    for at, message in enumerate(messages):
        plain: Json = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                number += 1
                name = call.function.name
                call_id = call.id or _ID.format(number)
                waiting.append((call_id, name))
                arguments = _written(call.function.arguments, at)
                calls.append(
                    {
                        "id": call_id,
                        "type": "function",
                        "function": {"name": name, "arguments": arguments},
                    }
                )
            plain["tool_calls"] = calls
        if message.role == "tool":
            plain["tool_call_id"] = message.tool_call_id or _answered(
                waiting, message.tool_name, at
            )
        found.append(plain)
    return found


def _answered(waiting: deque[tuple[str, str]], name: str | None, at: int) -> str:
    """Return the id of the call that a tool result belongs to.

    Raises:
        ApiError: no call without a result is left (400).
    """
    chosen = next((call for call in waiting if name in (None, call[1])), None)
    if chosen is None:
        raise bad_field("messages", f"messages.{at} is a tool result without a call before it")
    waiting.remove(chosen)
    return chosen[0]


def _written(arguments: Json, at: int) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except RecursionError:
        raise bad_field(
            "messages", f"messages.{at}: the arguments of a call are nested too deeply"
        ) from None
