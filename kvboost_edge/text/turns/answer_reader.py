"""Reader that parses one generated answer, token by token."""

from __future__ import annotations

import dataclasses
import json
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvboost_edge.text.detokenizer import IncrementalDetokenizer
from kvboost_edge.text.stop_strings import StopChecker
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.bare_call import Accepts
from kvboost_edge.text.turns.formats import Tool, TurnFormat
from kvboost_edge.text.turns.parser import (
    CallArguments,
    CallStart,
    ContentDelta,
    Part,
    ReasoningDelta,
    TurnParser,
)
from kvboost_edge.text.turns.replay import call_keys, thought_key

__all__ = ["Turn", "TurnMessage", "TurnReader"]

Keep = Callable[[str, Sequence[int]], None]

# Mistral's templates only accept ids of nine letters and digits.
_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


class Turn(NamedTuple):
    """Settings for parsing the answers of one request.

    Attributes:
        format: turn format of the model.
        tools: tools that may be called.
        reasoning: "opened" if the prompt ends inside a reasoning block, "possible" if the answer
            may begin with one, or "closed" if it may not.
        calls: whether tools may be called.
        fits: constraint on the whole turn, as keyword arguments for SamplingParams.
        accepts: checks the arguments of a message that may be a call without markers. If None, such
            a message is content.
    """

    format: TurnFormat
    tools: tuple[Tool, ...]
    reasoning: str
    calls: bool
    fits: Mapping[str, Any]
    accepts: Accepts | None = None


class TurnReader:
    """Parser of one answer, token by token."""

    def __init__(
        self,
        turn: Turn,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        keep: Keep,
        *,
        min_tokens: int = 0,
        stop_included: bool = False,
    ) -> None:
        """Start an answer.

        Args:
            turn: settings of the request.
            tokenizer: tokenizer of the model.
            stop: stop strings.
            keep: stores the generated ids of a text, which the client may send back in its next
                request.
            min_tokens: number of first tokens in which stop strings do not count.
            stop_included: whether the answer includes the stop string.
        """
        self._keep = keep
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._codec = tokenizer.codec
        self._has_channels = turn.format.channels is not None
        # Special tokens are hidden, except for markers of this turn format.
        self._markers = tokenizer.special_ids_in(_literals(turn.format))
        # This marker ends a turn with calls and begins the result in the next prompt. Some
        # tokenizer files list it as a normal token.
        opening = "" if turn.format.calls is None else turn.format.calls.result_opening
        self._ending = tokenizer.codec.token_id(opening) if opening else None
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        self._stops = StopChecker(tuple(stop), included=stop_included)
        self._stopped = False
        self._parser = TurnParser(
            turn.format,
            turn.tools,
            reasoning=turn.reasoning,
            calls=turn.calls,
            accepts=turn.accepts,
        )
        self._ids: list[int] = []
        # Index of the first id after the reasoning. None if the answer begins inside a token.
        self._answer_at: int | None = 0
        # Ids of an answer in a channel. None if the answer begins or ends inside a token.
        self._answer_ids: list[int] | None = []
        self.num_reasoning_tokens = 0
        self.message = TurnMessage()

    def push(self, token_id: int) -> list[Part]:
        """Add the next token, and return the parts that are now final.

        The parts are also added to `message`.
        """
        self._num_tokens += 1
        if (
            self._stopped
            or token_id == self._ending
            or not (self._codec.has_text(token_id, True) or token_id in self._markers)
        ):
            return []
        self._ids.append(token_id)
        text, self._stopped = self._stops.push(
            self._detokenizer.push(token_id), counts=self._num_tokens > self._min_tokens
        )
        thoughts = self._parser.num_thoughts
        answers = self._parser.in_answer
        parts = self._parser.push(text)
        self._note_answer(token_id, parts, begun=answers)
        if self._parser.num_thoughts > thoughts:
            self.num_reasoning_tokens = len(self._ids)
            self._answer_at = (
                None
                if any(not isinstance(part, ReasoningDelta) for part in parts)
                else len(self._ids)
            )
        elif (
            self._answer_at == len(self._ids) - 1 and self.num_reasoning_tokens and not text.strip()
        ):
            self._answer_at += 1  # whitespace between the reasoning and the answer
        self.message.add(parts)
        return parts

    def _note_answer(self, token_id: int, parts: Sequence[Part], *, begun: bool) -> None:
        """Record the ids of an answer in a channel, if its markers are separate tokens."""
        shows = any(isinstance(part, ContentDelta) for part in parts)
        if not begun and self._parser.in_answer:
            self._answer_ids = None if shows else []
        elif begun and not self._parser.in_answer:
            self._answer_ids = None if shows else self._answer_ids
        elif begun and self._answer_ids is not None:
            self._answer_ids.append(token_id)

    def close(self) -> list[Part]:
        """End the answer and return the parts held back.

        The generated ids are stored under the text that clients will send back.
        """
        text = ""
        rest = ""
        if not self._stopped:
            text, self._stopped = self._stops.push(
                self._detokenizer.flush(), counts=self._num_tokens > self._min_tokens
            )
            rest = "" if self._stopped else self._stops.flush()
        parts = [*self._parser.push(text + rest), *self._parser.close()]
        if self._parser.in_reasoning:
            self.num_reasoning_tokens = len(self._ids)
        self.message.add(parts)
        # The engine itself stores whole outputs. Clients receive only the calls, or the text after
        # the reasoning.
        if self._has_channels:
            if self._answer_ids and not self.message.calls:
                self._keep(self.message.content, self._answer_ids)
        elif self._answer_at is not None and (self.num_reasoning_tokens or self.message.calls):
            for key in call_keys(self.message.as_sent()) or [self.message.content]:
                self._keep(key, self._ids[self._answer_at :])
        if self.num_reasoning_tokens and not self._parser.in_reasoning and not self._has_channels:
            self._keep(thought_key(self.message.as_sent()), self._ids)
        return parts

    def reason(self, finish_reason: str) -> str:
        """Return the finish reason for clients.

        The engine's "stop" becomes "tool_calls" after complete calls. A call truncated by a stop
        string does not count.

        Args:
            finish_reason: finish reason of the engine.
        """
        called = (
            finish_reason == "stop"
            and bool(self.message.calls)
            and _is_json(self.message.calls[-1])
        )
        return "tool_calls" if called else finish_reason


class TurnMessage:
    """An assistant's message under construction."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []

    @property
    def content(self) -> str:
        return "".join(self._content)

    def add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case ContentDelta(text):
                    self._content.append(text)
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case CallStart(_, name):
                    function = {"name": name, "arguments": ""}
                    self.calls.append({"id": _new_id(), "type": "function", "function": function})
                case CallArguments(index, text):
                    self.calls[index]["function"]["arguments"] += text

    def as_sent(self) -> dict[str, Any]:
        """Return the message as clients receive it and send it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": self.calls}
        return message

    def delta(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return added parts as the delta of a streamed chunk."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            match part:
                case ContentDelta(text):
                    delta["content"] = delta.get("content", "") + text
                case ReasoningDelta(text):
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case CallStart(index, name):
                    function = {"name": name, "arguments": ""}
                    calls[index] = {
                        "index": index,
                        "id": self.calls[index]["id"],
                        "type": "function",
                        "function": function,
                    }
                case CallArguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        return {**delta, "tool_calls": list(calls.values())} if calls else delta


def _is_json(call: Mapping[str, Any]) -> bool:
    """Return whether the arguments of a call are complete JSON."""
    try:
        json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return False
    return True


def _new_id() -> str:
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


def _literals(format: TurnFormat) -> str:
    """Return the text of all markers in a turn format."""
    calls = () if format.calls is None else dataclasses.astuple(format.calls)
    return "\n".join(
        [
            *(format.reasoning or ()),
            *(format.channels or ()),
            *(one for one in calls if isinstance(one, str)),
        ]
    )
