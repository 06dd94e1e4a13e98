"""Formats in which a model writes its reasoning and tool calls.

A message's calls are one text of these pieces (any but CALL may be empty):

    opening  before CALL after  separator  before CALL after  ...  closing

    kind          CALL
    "json"        {"name": NAME, "arguments": {...}}, with the keys in `members`
    "named_json"  NAME between {...}
    "tagged"      NAME between ARGUMENT ARGUMENT ...; an ARGUMENT is argument_before KEY
                  value_before VALUE argument_after. Strings are bare, other values JSON.
    "keyword"     NAME(KEY=VALUE, KEY=VALUE), with values in the syntax of Python or JSON
    "braced"      NAME{KEY:VALUE,KEY:VALUE}, with strings between two `quote` markers, all else
                  bare
    "channels"    {...}, the text of a message to "functions.NAME"; it has no pieces, see
                  `ChannelFormat`

Models vary the white space around the pieces, so it is never required.
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
"""Placeholder in a piece for the id that the model writes for a call."""


class ReasoningFormat(NamedTuple):
    """Markers around a model's reasoning, such as "<think>" and "</think>", without white space at
    their ends.
    """

    start: str
    end: str


@dataclass(frozen=True)
class CallFormat:
    """Format of a model's calls. The pieces are those of the diagram in the module.

    Attributes:
        trigger: marker that calls begin with; "" if only their place at the message's start shows
            them.
        parallel: a message may hold several calls.
        arguments_as_text: the chat template takes the arguments of past calls as JSON text, not as
            an object.
        result_opening: marker that a result begins with, if the template writes it even after calls
            without a result. The model ends its turn with it.
        members: kind "json": all keys of a call in order. A key that is not named below has a fixed
            value, in `constants`.
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
        """True if a call is a JSON object of name and arguments between its own markers, as in
        `<tool_call>{"name": NAME, "arguments": {...}}</tool_call>` (Hermes).
        """
        return (
            self.kind == "json"
            and bool(self.trigger)
            and not self.opening
            and self.members == (self.name_key, self.arguments_key)
        )


class ChannelFormat(NamedTuple):
    """Format of a turn of several messages, each with a header that names its recipient (gpt-oss).

        start [ to=RECIPIENT] channel NAME [ to=RECIPIENT] [constrain] [json] message TEXT end

    The first `start` is the end of the prompt. Messages of the channel `thoughts` are reasoning,
    those to "functions.NAME" are calls, others are the answer. A call ends with `called`, the turn
    with `done`.
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
        """Return the header of a message in a channel without recipient."""
        return f"{self.channel}{name}{self.message}"

    @property
    def ends(self) -> tuple[str, ...]:
        """Markers that end a message's text, in addition to `start`."""
        return self.end, self.called, self.done


CHANNELS = ChannelFormat()


class TurnFormat(NamedTuple):
    """Facts about the assistant's turns that a chat template shows.

    Attributes:
        calls: None if the format is unknown.
        reasoning: None without reasoning.
        shows_tools: the template lists the tools for the model.
        replays: the content of a past message directly follows the text of a generation prompt, so
            its original tokens can replace it.
        preserves: the variable preserve_thinking makes the template render the reasoning of past
            turns.
        channels: structure of a turn of several messages; None if the turn is one text.
        shows_calls: False: the template omits past calls, so they are written into the content;
            `calls` is then known from elsewhere.
        results_need_calls: the template renders results only after a message with calls.
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
        """Return whether a prompt ends inside a reasoning block, allows one, or excludes one."""
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
        parameters: JSON schema of its arguments; empty: any object.
    """

    name: str
    parameters: dict[str, Any]
