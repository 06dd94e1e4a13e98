"""Request normalization, which undoes client changes that would break the prefix.

The model sees the same tools, arguments and text as without normalization. Only lines meant for
another service are removed.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.host.tenant_lru import TenantLRU
from kvboost_edge.server.cache_report.diagnosis import tool_field
from kvboost_edge.server.cache_report.recent_requests import PromptField, PromptInputs
from kvboost_edge.server.settings import NORMALIZERS
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.replay import with_thoughts

__all__ = ["NormalizedRequest", "Normalizer", "normalize_request", "without_billing"]

_BILLING = ("x-anthropic-billing-header:",)
_PRESERVE = "preserve_thinking"  # variable of the chat template
_OBJECT_BYTES = 500  # approximate bytes that Python objects add to an entry

Json = dict[str, Any]


class Normalizer:
    """Store of the first version of tools and arguments, for each root (tenant and salt).

    The store is bounded as in `TenantLRU`. Safe to use from any thread. The kinds of normalization
    are:

    - "tools": tools in another order, or with keys in another order, are replaced by the version
      that was sent first.
    - "arguments": arguments of earlier tool calls are treated in the same way.
    - "billing": lines of system messages that begin with one of `_BILLING` are removed, because
      they change with each request.
    - "thinking": the reasoning in the model's earlier turns is kept, if the template can show it
      with preserve_thinking.

    Attributes:
        kinds: enabled kinds of normalization.
    """

    def __init__(self, kinds: Collection[str] = NORMALIZERS) -> None:
        self.kinds = frozenset(kinds)
        self._first: TenantLRU[Any] = TenantLRU()
        self._lock = threading.Lock()

    def tools(
        self, answers: KeptAnswers, tools: list[Json] | None
    ) -> tuple[list[Json] | None, bool]:
        """Return the version of the tools that was sent first, and whether it differs."""
        if not tools or "tools" not in self.kinds:
            return tools, False
        parts = sorted(_canonical(tool) for tool in tools)
        return self._as_first(answers, b"tools" + "\0".join(parts).encode(), tools)

    def messages(
        self, answers: KeptAnswers, messages: Sequence[Json]
    ) -> tuple[list[Json], list[str]]:
        """Return normalized messages, and the kinds of normalization that changed them.

        Arguments of tool calls are replaced by the version that was sent first. Billing lines are
        removed.
        """
        done: list[str] = []
        found = []
        for message in messages:
            if message["role"] == "system" and "billing" in self.kinds:
                content = without_billing(message["content"])
                if content != message["content"]:
                    message = {**message, "content": content}
                    done.append("billing")
            if message.get("tool_calls") and "arguments" in self.kinds:
                calls = [self._call(answers, call) for call in message["tool_calls"]]
                message = {**message, "tool_calls": [call for call, _ in calls]}
                done += ["arguments"] * any(changed for _, changed in calls)
            found.append(message)
        return found, list(dict.fromkeys(done))

    def _call(self, answers: KeptAnswers, call: Mapping[str, Any]) -> tuple[Json, bool]:
        function = call["function"]
        arguments, changed = self._as_first(
            answers, b"call" + _canonical(function).encode(), function["arguments"]
        )
        return {**call, "function": {**function, "arguments": arguments}}, changed

    def _as_first(self, whose: KeptAnswers, what: bytes, value: Any) -> tuple[Any, bool]:
        """Return the stored value that equals this one, and whether its JSON text differs."""
        key = hashlib.sha256(what).digest()
        size = 2 * len(what) + _OBJECT_BYTES
        with self._lock:  # of two concurrent requests, one is first
            known = self._first.find(whose.root, key)
            if known is None:
                self._first.keep(whose.owner, whose.root, key, value, size)
                return value, False
        return known, json.dumps(known) != json.dumps(value)


def without_billing(text: str) -> str:
    """Return a system message without its billing lines.

    Clients write these lines for another service and change them with each request.
    """
    if not any(mark in text for mark in _BILLING):
        return text
    return "".join(
        line for line in text.splitlines(keepends=True) if not line.lstrip().startswith(_BILLING)
    )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


class NormalizedRequest(NamedTuple):
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


def normalize_request(
    normalizer: Normalizer,
    tokenizer: Tokenizer,
    answers: KeptAnswers,
    messages: Sequence[Json],
    tools: list[Json] | None,
    variables: Mapping[str, Any] | None,
) -> NormalizedRequest:
    """Normalize a chat request.

    Args:
        normalizer: store of the first versions of tools and arguments.
        tokenizer: tokenizer of the model.
        answers: earlier answers to requests of the same tenant and salt.
        messages: messages in the format of chat templates.
        tools: tools in the format of chat templates.
        variables: variables of the chat template, as sent by the client.
    """
    same_tools, reordered = normalizer.tools(answers, tools)
    plain, changed = normalizer.messages(answers, messages)
    given = dict(variables or {})
    settings = json.dumps(given, sort_keys=True)
    if "thinking" in normalizer.kinds:
        plain, given, thought = _with_thoughts(tokenizer, answers, plain, given)
        changed += ["thinking"] * thought
    names = tuple(tool["function"]["name"] for tool in same_tools or ())
    fields = [tool_field(number, name) for number, name in enumerate(names)]
    fields += [_field(number, message) for number, message in enumerate(plain)]
    done = (*(["tools"] if reordered else []), *changed)
    return NormalizedRequest(
        plain, same_tools, given, PromptInputs(tuple(fields), names, settings, done)
    )


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
