"""Formats in which models write reasoning and tool calls.

The calls of a message are one text made of these pieces. Any piece except CALL may be empty:

    opening  before CALL after  separator  before CALL after  ...  closing

    kind          CALL
    "json"        {"name": NAME, "arguments": {...}}, with the keys in `members`
    "named_json"  NAME between {...}
    "tagged"      NAME between ARGUMENT ARGUMENT ..., where ARGUMENT is
                  argument_before KEY value_before VALUE argument_after.
                  Strings are bare, other values are JSON.
    "keyword"     NAME(KEY=VALUE, KEY=VALUE), with values in the syntax of Python or JSON
    "braced"      NAME{KEY:VALUE,KEY:VALUE}, with strings between two `quote` markers and
                  other values bare
    "channels"    {...}, the text of a message to "functions.NAME". It has no pieces. See
                  `ChannelFormat`.

Models vary the whitespace around the pieces, so it is never required.
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
"""Placeholder in a piece for the call id that the model generates."""


class ReasoningFormat(NamedTuple):
    """Markers around a model's reasoning, such as "<think>" and "</think>", without outer white
    space.
    """

    start: str
    end: str


@dataclass(frozen=True)
class CallFormat:
    """Format of a model's tool calls. The module docstring shows how the pieces fit together.

    Attributes:
        trigger: marker that calls begin with, or "" if calls are only recognized at the start of a
            message.
        parallel: whether a message may contain several calls.
        arguments_as_text: whether the chat template expects the arguments of past calls as JSON
            text instead of an object.
        result_opening: marker that begins a result, if the template writes it after each call even
            without a result. The model then ends its turn with this marker.
        members: keys of a "json" call in order. Keys other than the name, arguments and id keys
            have fixed values, listed in `constants`.
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
        """Whether a call is a JSON object of name and arguments between its own markers.

        Hermes calls are an example: `<tool_call>{"name": NAME, "arguments": {...}}</tool_call>`.
        """
        return (
            self.kind == "json"
            and bool(self.trigger)
            and not self.opening
            and self.members == (self.name_key, self.arguments_key)
        )


class ChannelFormat(NamedTuple):
    """Format of a turn with several messages (gpt-oss).

    Each message has a header:

        start [ to=RECIPIENT] channel NAME [ to=RECIPIENT] [constrain] [json] message TEXT end

    The prompt ends with the first `start`. Messages in the channel `thoughts` are reasoning,
    messages to "functions.NAME" are calls, and all others are the answer. A call ends with
    `called`, the turn with `done`.
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
        """Return the header of a message without recipient in a channel."""
        return f"{self.channel}{name}{self.message}"

    @property
    def ends(self) -> tuple[str, ...]:
        """Markers that end a message's text, besides `start`."""
        return self.end, self.called, self.done


CHANNELS = ChannelFormat()


class TurnFormat(NamedTuple):
    """Facts about assistant turns, detected from a chat template.

    Attributes:
        calls: format of tool calls, or None if it is unknown.
        reasoning: markers around reasoning, or None if there is no reasoning.
        shows_tools: whether the template lists the tools for the model.
        replays: whether past answers directly follow the text of a generation prompt, so that their
            original tokens can replace them.
        preserves: whether the variable preserve_thinking makes the template render past reasoning.
        channels: structure of a turn with several messages, or None if the turn is one text.
        shows_calls: whether the template renders past calls. If not, they are written into the
            content, and `calls` is known from the tool list.
        results_need_calls: whether the template renders results only after a message with calls.
        has_levels: whether the variable reasoning_effort changes the prompt.
        closing: closing marker of reasoning with the white space that the template writes around
            it.
    """

    calls: CallFormat | None
    reasoning: ReasoningFormat | None
    shows_tools: bool
    replays: bool
    preserves: bool = False
    channels: ChannelFormat | None = None
    shows_calls: bool = True
    results_need_calls: bool = False
    has_levels: bool = False
    closing: str = ""

    def reasoning_after(self, prompt: str) -> Literal["opened", "possible", "closed"]:
        """Return whether a prompt ends inside a reasoning block, or one may follow.

        Returns:
            "opened" if the prompt ends inside a block, "possible" if the answer may begin with one,
                or "closed" if it may not.
        """
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
    """A tool that the model may call.

    Attributes:
        parameters: JSON schema of the arguments. An empty schema allows any object.
    """

    name: str
    parameters: dict[str, Any]
