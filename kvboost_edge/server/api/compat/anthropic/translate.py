"""Translation of Anthropic's messages to a chat request, and of `cache_control` to breakpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvboost_edge.server.api.compat.anthropic.blocks import (
    CacheControl,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    blocks_of,
    texts_of,
)
from kvboost_edge.server.api.compat.anthropic.schemas import (
    MessagesPrompt,
    MessagesRequest,
    OneChoice,
)
from kvboost_edge.server.api.compat.translated import chat_request
from kvboost_edge.server.api.schemas.chat import ChatMessage, ChatRequest

__all__ = ["Breakpoint", "breakpoints", "translated"]

Json = dict[str, Any]

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NOT_SAID = "x"  # a user message, if the template needs one


class Breakpoint(NamedTuple):
    """End of a prefix to keep cached.

    Attributes:
        seconds: time to keep it.
        messages: the conversation up to there, its last message possibly cut short; None for the
            whole prompt.
    """

    seconds: float
    messages: list[ChatMessage] | None


def translated(body: MessagesPrompt) -> ChatRequest:
    """Return the chat request of a body.

    Raises:
        ApiError: the body cannot be translated (400).
    """
    body.check_together()
    fields: Json = {"chat_template_kwargs": {"enable_thinking": body.thinks}, **_tools(body)}
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences or None,
            "stream": body.stream,
            "return_progress": body.return_progress,
        }
        if body.thinks and body.output_config is not None:
            fields["reasoning_effort"] = body.output_config.effort
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    system = None if body.system is None else texts_of(body.system)
    return chat_request(model=body.model, messages=_messages(system, _turns(body)), **fields)


def breakpoints(body: MessagesPrompt) -> list[Breakpoint]:
    """Return the breakpoints that matter: the last one, and the last one for an hour."""
    # A prefix kept up to a later breakpoint is kept up to the earlier ones too. Templates write
    # tools before or after the system text, so a mark on tools covers both.
    system = _system_blocks(body)
    marks = [(-1, to, mark.seconds) for to, mark in _marked(system)]
    marks += [
        (-1, len(system), tool.cache_control.seconds)
        for tool in body.tools or ()
        if tool.cache_control
    ]
    for at, message in enumerate(body.messages):
        marks += [(at, to, mark.seconds) for to, mark in _marked(blocks_of(message))]
    if body.cache_control is not None:
        marks.append((len(body.messages), 0, body.cache_control.seconds))
    if not marks:
        return []
    longest = max(seconds for _, _, seconds in marks)
    lasting = max(mark for mark in marks if mark[2] == longest)
    last = max(marks)
    chosen = [lasting] if last[:2] == lasting[:2] else [last, lasting]
    return [Breakpoint(seconds, _up_to(body, at, to)) for at, to, seconds in chosen]


def _marked(blocks: Sequence[Any]) -> list[tuple[int, CacheControl]]:
    """Return (number of blocks up to the mark, mark) for each `cache_control` mark."""
    marks = [
        (number, getattr(block, "cache_control", None)) for number, block in enumerate(blocks, 1)
    ]
    return [(number, mark) for number, mark in marks if mark is not None]


def _up_to(body: MessagesPrompt, at: int, to: int) -> list[ChatMessage] | None:
    """Return the messages up to block `to` of message `at`; `at` = -1 is the system message.

    Returns None for the whole conversation.
    """
    if at >= len(body.messages) - 1 and (
        at >= len(body.messages) or to == len(blocks_of(body.messages[at]))
    ):
        return None
    if at < 0:
        system = "\n".join(block.text for block in _system_blocks(body)[:to]) or None
        messages = _messages(system, [])
    else:
        turns = _turns(body)[: at + 1]
        turns[at] = (turns[at][0], turns[at][1][:to])
        messages = _messages(None if body.system is None else texts_of(body.system), turns)
    if not any(message["role"] == "user" for message in messages):
        messages.append({"role": "user", "content": _NOT_SAID})
    return [ChatMessage.model_validate(message) for message in messages]


def _system_blocks(body: MessagesPrompt) -> list[TextBlock]:
    system = body.system
    if system is None:
        return []
    return [TextBlock(type="text", text=system)] if isinstance(system, str) else system


def _turns(body: MessagesPrompt) -> list[tuple[str, list[Any]]]:
    """Return the role and the blocks of each message."""
    return [(message.role, blocks_of(message)) for message in body.messages]


def _messages(system: str | None, turns: Sequence[tuple[str, list[Any]]]) -> list[Json]:
    """Convert the system text and the turns to chat messages.

    As in Anthropic's API, consecutive messages of the same role are merged. A later system message
    is sent as user text, because most templates reject system messages there.
    """
    messages: list[Json] = [] if system is None else [{"role": "system", "content": system}]
    for role, blocks in turns:
        if role == "assistant":
            _add_assistant(messages, blocks)
            continue
        results = [block for block in blocks if isinstance(block, ToolResultBlock)]
        messages += [
            {"role": "tool", "tool_call_id": one.tool_use_id, "content": one.told}
            for one in results
        ]
        text = texts_of([block for block in blocks if isinstance(block, TextBlock)])
        if role == "system":
            text = f"<system>\n{text}\n</system>"
        if messages and messages[-1]["role"] == "user" and not results:
            messages[-1]["content"] += f"\n{text}"
        elif text or not results:
            messages.append({"role": "user", "content": text})
    return messages


def _add_assistant(messages: list[Json], blocks: Sequence[Any]) -> None:
    """Append an assistant message. Its text blocks are joined without separators."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    message = messages[-1]
    for block in blocks:
        if isinstance(block, TextBlock):
            message["content"] += block.text
        elif isinstance(block, ThinkingBlock):
            if block.thinking:
                message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            message.setdefault("tool_calls", []).append(
                {"id": block.id, "type": "function", "function": function}
            )


def _tools(body: MessagesPrompt) -> Json:
    fields: Json = {}
    if body.tools is not None:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in body.tools
        ]
    if (choice := body.tool_choice) is not None:
        named = (
            {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, OneChoice)
            else None
        )
        fields["tool_choice"] = named or _CHOICES[choice.type]
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields
