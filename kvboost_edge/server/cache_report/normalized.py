"""Normalization of the tools, arguments and messages of a chat request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.server.cache_report.diagnosis import tool_field
from kvboost_edge.server.cache_report.normalization import Normaliser
from kvboost_edge.server.cache_report.recent_requests import PromptField, PromptInputs
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.replay import with_thoughts

__all__ = ["Normal", "normal"]

Json = dict[str, Any]
_PRESERVE = "preserve_thinking"


class Normal(NamedTuple):
    """A normalized request.

    Attributes:
        messages: messages in the format of chat templates.
        tools: tools in the format of chat templates.
        variables: variables of the chat template.
        described: inputs for cache-miss reports.
    """

    messages: list[Json]
    tools: list[Json] | None
    variables: Json
    described: PromptInputs


def normal(
    normaliser: Normaliser,
    tokenizer: Tokenizer,
    answers: KeptAnswers,
    messages: Sequence[Json],
    tools: list[Json] | None,
    variables: Mapping[str, Any] | None,
) -> Normal:
    """Normalize a chat request.

    Args:
        normaliser: store of the first versions of tools and arguments.
        tokenizer: tokenizer of the model.
        answers: earlier answers to requests of the same tenant and salt.
        messages: messages in the format of chat templates.
        tools: tools in the format of chat templates.
        variables: variables of the chat template, as sent by the client.
    """
    same_tools, reordered = normaliser.tools(answers, tools)
    plain, changed = normaliser.messages(answers, messages)
    given = dict(variables or {})
    settings = json.dumps(given, sort_keys=True)
    if "thinking" in normaliser.kinds:
        plain, given, thought = _with_thoughts(tokenizer, answers, plain, given)
        changed += ["thinking"] * thought
    names = tuple(tool["function"]["name"] for tool in same_tools or ())
    fields = [tool_field(number, name) for number, name in enumerate(names)]
    fields += [_field(number, message) for number, message in enumerate(plain)]
    done = (*(["tools"] if reordered else []), *changed)
    return Normal(plain, same_tools, given, PromptInputs(tuple(fields), names, settings, done))


def _with_thoughts(
    tokenizer: Tokenizer, answers: KeptAnswers, messages: list[Json], given: Json
) -> tuple[list[Json], Json, bool]:
    """Return the messages with the reasoning of the model's turns, and variables that show it.

    Nothing changes if the template cannot show reasoning, or if the client set the variable to
    false.
    """
    if not any(message["role"] == "assistant" for message in messages):
        return messages, given, False
    format = tokenizer.turn_format
    if format.reasoning is None or not format.preserves or not given.get(_PRESERVE, True):
        return messages, given, False
    found, kept = with_thoughts(
        messages, format.reasoning, lambda ids: tokenizer.decode(ids, False), answers.find
    )
    if not kept or (given.get(_PRESERVE) and found == messages):
        return messages, given, False
    return found, {**given, _PRESERVE: True}, True


def _field(number: int, message: Json) -> PromptField:
    name = f"message {number} ({message['role']})"
    text = message["content"] or "".join(
        call["function"]["name"] for call in message.get("tool_calls") or ()[:1]
    )
    return PromptField(name, text)
