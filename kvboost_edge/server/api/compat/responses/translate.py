"""Translation of a /v1/responses body to a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvboost_edge.server.api.compat.responses.items import text_of
from kvboost_edge.server.api.compat.responses.schemas import ResponseRequest
from kvboost_edge.server.api.compat.responses.tools import (
    as_chosen,
    as_format,
    as_tool,
    full_name,
)
from kvboost_edge.server.api.compat.translated import chat_request
from kvboost_edge.server.api.schemas.chat import ChatRequest
from kvboost_edge.server.api.schemas.strict import bad_field

__all__ = ["FIELDS", "messages_of", "to_chat"]

Json = dict[str, Any]

FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
}
"""The Responses API's names of chat API fields."""

_SAME = (
    *(
        "model",
        "parallel_tool_calls",
        "temperature",
        "top_p",
        "prompt_cache_key",
        "prompt_cache_retention",
        "stream",
    ),
    *(
        "top_k",
        "min_p",
        "seed",
        "repetition_penalty",
        "cache_salt",
        "cache_prompt",
        "priority",
        "kvboost",
        "reasoning_budget",
        "reasoning_budget_message",
    ),
)


def to_chat(body: ResponseRequest, items: Sequence[Json]) -> ChatRequest:
    """Convert a body to a chat request.

    Args:
        body: the request body.
        items: items of the whole conversation, without references.

    Raises:
        ApiError: a field is invalid (400).
    """
    return chat_request(
        **{name: getattr(body, name) for name in _SAME},
        messages=messages_of(body.instructions, items),
        max_completion_tokens=body.max_output_tokens,
        tools=[as_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=_choice(body),
        response_format=as_format(body.text),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=True,  # The answer is always a new message.
    )


def messages_of(instructions: str | None, items: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Convert items to chat messages.

    Consecutive reasoning, text and tool calls of the assistant, in this order, form one message.

    Raises:
        ApiError: a tool result has no call before it (400).
    """
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    open_turn: Json | None = None  # assistant message that the next item may extend
    called: set[str] = set()
    for item in items:
        if item["type"] == "function_call_output":
            if item["call_id"] not in called:
                raise bad_field(
                    "input",
                    f"input has an output of {item['call_id']!r} without a call before it",
                )
            messages.append(
                {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            )
            open_turn = None
        elif item["type"] == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": text_of(item["content"])})
            open_turn = None
        else:
            if open_turn is None or not _goes_on(open_turn, item):
                open_turn = {"role": "assistant"}
                messages.append(open_turn)
            _extend(open_turn, item, called)
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            message.setdefault("content", "")
    return messages


def _goes_on(turn: Json, item: Mapping[str, Any]) -> bool:
    """Return whether the item extends the assistant message."""
    if item["type"] == "function_call":
        return True
    return "tool_calls" not in turn and "content" not in turn


def _extend(turn: Json, item: Mapping[str, Any], called: set[str]) -> None:
    if item["type"] == "function_call":
        called.add(item["call_id"])
        function = {
            "name": full_name(item.get("namespace"), item["name"]),
            "arguments": item["arguments"],
        }
        turn.setdefault("tool_calls", []).append(
            {"id": item["call_id"], "type": "function", "function": function}
        )
    elif item["type"] == "reasoning":
        if thought := text_of(item["content"] or item["summary"]):
            turn["reasoning_content"] = "\n".join(
                filter(None, (turn.get("reasoning_content"), thought))
            )
    else:
        turn["content"] = text_of(item["content"])


def _choice(body: ResponseRequest) -> Any:
    """Convert the tool choice to the chat API's format. Without tools it is None."""
    nothing = body.tool_choice is None or (not body.tools and body.tool_choice in ("auto", "none"))
    return None if nothing else as_chosen(body.tool_choice)
