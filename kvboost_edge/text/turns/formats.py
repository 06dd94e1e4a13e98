"""How a model writes what is more than an answer: its reasoning and its tool calls.

A message's calls are one text, of these pieces (any but the call itself may be empty):

    opening  before CALL after  separator  before CALL after  ...  closing

    kind          CALL
    "json"        {"name": NAME, "arguments": {...}}, the keys as `members` has them
    "named_json"  NAME between {...}
    "tagged"      NAME between ARGUMENT ARGUMENT ...; an ARGUMENT is argument_before KEY
                  value_before VALUE argument_after, strings as they are, other values as JSON
    "keyword"     NAME(KEY=VALUE, KEY=VALUE), values as Python or JSON writes them
    "braced"      NAME{KEY:VALUE,KEY:VALUE}, strings between two of the marker `quote` as they are,
                  all else bare
    "channels"    {...}, the text of a message to "functions.NAME"; it has no pieces, see
                  `ChannelFormat`

Models are free with white space around the pieces, so nobody asks for what the template writes
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

__all__ = [
    "CHANNELS",
    "ID_SLOT",
    "CallFormat",
    "ChannelFormat",
    "ReasoningFormat",
    "Tool",
    "TurnFormat",
]

ID_SLOT = "\0"
"""Stands in a piece where the model writes an id of its own for the call."""


class ReasoningFormat(NamedTuple):
    """The markers around a model's reasoning, without white space at their ends: "<think>",
    "</think>".
    """

    start: str
    end: str


@dataclass(frozen=True)
class CallFormat:
    """How a model writes its calls; the pieces are those of the drawing above.

    Attributes:
        trigger: the marker that calls begin with; "" where they are known only by standing at the
            message's start.
        parallel: whether a message may hold several.
        arguments_as_text: whether the chat template takes the arguments of past calls as JSON text,
            not as an object.
        result_opening: the marker that a result begins with, where the template writes it even
            behind calls without one: the model ends its turn with it.
        members: kind "json": all keys of a call in order; a key that is none of those named below
            has a fixed value, in `constants`.
    """

    kind: Literal["json", "named_json", "tagged", "keyword", "braced", "channels"]
    trigger: str
    opening: str = ""
    before: str = ""
    after: str = ""
    separator: str = ""
    closing: str = ""
    parallel: bool = False
    arguments_as_text: bool = False
    result_opening: str = ""
    members: tuple[str, ...] = ()
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    constants: Mapping[str, Any] = field(default_factory=dict)
    between: str = ""
    argument_before: str = ""
    value_before: str = ""
    argument_after: str = ""
    quote: str = ""

    @property
    def wraps_objects(self) -> bool:
        """True if a call is a JSON object of name and arguments between markers of its own, as in
        `<tool_call>{"name": NAME, "arguments": {...}}</tool_call>` (Hermes).
        """
        return (
            self.kind == "json"
            and bool(self.trigger)
            and not self.opening
            and self.members == (self.name_key, self.arguments_key)
        )


class ChannelFormat(NamedTuple):
    """A turn of several messages, each with a header that says for whom it is (the format of
    gpt-oss):

        start [ to=RECIPIENT] channel NAME [ to=RECIPIENT] [constrain] [json] message TEXT end

    `start` of the first is the end of the prompt. Messages of the channel `thoughts` are reasoning,
    those to "functions.NAME" calls, others the answer. A call ends with `called`, the turn with
    `done`.
    """

    start: str = "<|start|>assistant"
    channel: str = "<|channel|>"
    message: str = "<|message|>"
    constrain: str = "<|constrain|>"
    end: str = "<|end|>"
    called: str = "<|call|>"
    done: str = "<|return|>"
    thoughts: str = "analysis"
    calls: str = "commentary"
    answer: str = "final"
    functions: str = "functions."

    def header(self, name: str) -> str:
        """What stands in front of the text of a message to nobody in a channel."""
        return f"{self.channel}{name}{self.message}"

    @property
    def ends(self) -> tuple[str, ...]:
        """What ends a message's text, besides `start`."""
        return self.end, self.called, self.done


CHANNELS = ChannelFormat()


class TurnFormat(NamedTuple):
    """What a chat template tells about the assistant's turns.

    Attributes:
        calls: None where they are written in a way that is not known.
        reasoning: None where there is none.
        shows_tools: whether the template tells the model which tools there are.
        replays: whether the content of a past message stands right behind what a generation prompt
            is, so that its own tokens can take its place.
        preserves: whether the variable preserve_thinking makes the template show the reasoning of
            past turns.
        channels: how a turn is made of messages; None where it is one text.
        shows_calls: False: the template leaves past calls out, so they go into the content; `calls`
            is known otherwise.
        results_need_calls: whether the template shows results only behind a message that has calls.
    """

    calls: CallFormat | None
    reasoning: ReasoningFormat | None
    shows_tools: bool
    replays: bool
    preserves: bool = False
    channels: ChannelFormat | None = None
    shows_calls: bool = True
    results_need_calls: bool = False

    def reasoning_after(self, prompt: str) -> Literal["opened", "possible", "closed"]:
        """Whether a prompt ends inside a reasoning block, or one may come first, or none."""
        text = prompt.rstrip()
        if self.channels is not None:
            states: dict[str, Literal["opened", "closed"]] = {
                "thoughts": "opened",
                "calls": "closed",
                "answer": "closed",
            }
            found = (
                name
                for name in states
                if text.endswith(self.channels.header(getattr(self.channels, name)))
            )
            return next((states[name] for name in found), "possible")
        if self.reasoning is None or text.endswith(self.reasoning.end):
            return "closed"
        return "opened" if text.endswith(self.reasoning.start) else "possible"


class Tool(NamedTuple):
    """A tool the model may call. parameters: the JSON schema of its arguments; empty: any
    object.
    """

    name: str
    parameters: dict[str, Any]
