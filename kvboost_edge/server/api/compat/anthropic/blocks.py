"""Content blocks of Anthropic messages: text, thinking, tool calls and tool results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from kvboost_edge.server.api.bounds import COUNTS, counted
from kvboost_edge.server.api.schemas.shared import BoundedText, check_text
from kvboost_edge.server.api.schemas.strict import Strict, field_error
from kvboost_edge.server.api.schemas.unsupported_fields import (
    NO_IMAGES,
    UnsupportedField,
    refused_field,
)

__all__ = [
    "CacheControl",
    "CacheControlFields",
    "Message",
    "RedactedBlock",
    "TextBlock",
    "Texts",
    "ThinkingBlock",
    "ToolResultBlock",
    "ToolUseBlock",
    "Unsaid",
    "blocks_of",
    "texts_of",
]

_IGNORED = UnsupportedField("", ignored=True)
_SECONDS = {"5m": 300.0, "1h": 3600.0}

CallId = Annotated[str, AfterValidator(check_text), counted("tool_call_id")]


class CacheControl(Strict):
    """A `cache_control` object: the prefix up to here stays cached for 5 minutes or 1 hour."""

    unsupported = {"scope": _IGNORED}  # noqa: RUF012 - the API key decides the scope

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        return _SECONDS[self.ttl or "5m"]


class CacheControlFields(Strict):
    """Base of objects that may have `cache_control`."""

    cache_control: CacheControl | None = None


class TextBlock(CacheControlFields):
    """A text block."""

    unsupported = {"citations": _IGNORED}  # noqa: RUF012

    type: Literal["text"]
    text: BoundedText


class ThinkingBlock(Strict):
    """A thinking block. Any signature is accepted, because this server does not sign."""

    type: Literal["thinking"]
    thinking: BoundedText
    signature: BoundedText | None = None


class RedactedBlock(Strict):
    """An encrypted thinking block of another server. It is ignored."""

    type: Literal["redacted_thinking"]
    data: BoundedText


class ToolUseBlock(CacheControlFields):
    """A tool call by the model."""

    unsupported = {"caller": _IGNORED}  # noqa: RUF012

    type: Literal["tool_use"]
    id: CallId
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]+$"), counted("tool_name")]
    input: dict[str, Any]


def _tag(value: Any) -> str:
    """Return the discriminator tag of a message's content: "text" or "blocks"."""
    return "text" if isinstance(value, str) else "blocks"


def _refusing(*built: str) -> BeforeValidator:
    """Return a validator that rejects block types other than `built` and names them."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "image":
            raise field_error("not_built", NO_IMAGES)
        if isinstance(kind, str) and kind not in built:
            message = (
                f"blocks of type {kind[:64]!r} are not supported here; supported: "
                f"{', '.join(built)}"
            )
            raise field_error("not_built", message)
        return value

    return BeforeValidator(check)


class Unsaid:
    """Annotation that leaves a list's maximum length out of the OpenAPI document."""

    # Tools that generate requests from the document would otherwise send megabytes.
    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = handler(core)
        schema.pop("maxItems", None)
        return schema


# Empty lists are allowed, because clients send empty answers back.
_few = Field(fail_fast=True, max_length=int(COUNTS["parts"].high))
_as_given = Discriminator(_tag)

TextOnly = Annotated[TextBlock, _refusing("text")]
Texts = Annotated[
    Annotated[BoundedText, Tag("text")] | Annotated[list[TextOnly], _few, Unsaid(), Tag("blocks")],
    _as_given,
]


class ToolResultBlock(CacheControlFields):
    """The result of a tool call."""

    unsupported = {"toolset_name": _IGNORED}  # noqa: RUF012

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Texts | None = None
    is_error: bool | None = None

    @property
    def told(self) -> str:
        """Text of the result that the model sees."""
        # Chat templates have no field for `is_error`, so it is added to the text.
        text = texts_of(self.content)
        return f"Error: {text}" if self.is_error else text


_UserBlock = Annotated[
    Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")],
    _refusing("text", "tool_result"),
]
_AssistantBlock = Annotated[
    Annotated[
        TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock, Field(discriminator="type")
    ],
    _refusing("text", "thinking", "redacted_thinking", "tool_use"),
]
_UserContent = Annotated[
    Annotated[BoundedText, Tag("text")]
    | Annotated[list[_UserBlock], _few, Unsaid(), Tag("blocks")],
    _as_given,
]
_AssistantContent = Annotated[
    Annotated[BoundedText, Tag("text")]
    | Annotated[list[_AssistantBlock], _few, Unsaid(), Tag("blocks")],
    _as_given,
]


class UserMessage(Strict):
    """A user message: tool results first, then text."""

    role: Literal["user"]
    content: _UserContent

    @model_validator(mode="after")
    def _results_come_first(self) -> UserMessage:
        kinds = [block.type for block in blocks_of(self)]
        if kinds != sorted(kinds, reverse=True):  # "tool_result" > "text"
            raise refused_field("content", "has a tool_result after text; put tool results first")
        return self


class AssistantMessage(Strict):
    """An assistant message."""

    role: Literal["assistant"]
    content: _AssistantContent


class SystemMessage(Strict):
    """A system message within the conversation."""

    role: Literal["system"]
    content: Texts


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


def blocks_of(message: UserMessage | AssistantMessage | SystemMessage) -> list[Any]:
    """Return the content of a message as a list of blocks."""
    content: Any = message.content
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def texts_of(content: str | Sequence[TextBlock] | None) -> str:
    """Join the text blocks of a message with newlines."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())
