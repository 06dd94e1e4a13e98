"""What Anthropic's messages are made of: blocks of text, thinking, calls and their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from kvboost_edge.server.api.bounds import COUNTS, counted
from kvboost_edge.server.api.schemas.foreign import NO_IMAGES, Foreign, refused_field
from kvboost_edge.server.api.schemas.shared import check_text
from kvboost_edge.server.api.schemas.strict import Strict, field_error

__all__ = [
    "CacheControl",
    "Marked",
    "Message",
    "RedactedBlock",
    "Text",
    "TextBlock",
    "Texts",
    "ThinkingBlock",
    "ToolResultBlock",
    "ToolUseBlock",
    "Unsaid",
    "blocks_of",
    "texts_of",
]

_IGNORED = Foreign("", ignored=True)
_SECONDS = {"5m": 300.0, "1h": 3600.0}

Text = Annotated[str, AfterValidator(check_text), counted("text")]
CallId = Annotated[str, AfterValidator(check_text), counted("tool_call_id")]


class CacheControl(Strict):
    """The prompt up to here is kept for 5 minutes, or an hour."""

    foreign = {"scope": _IGNORED}  # noqa: RUF012 - whose it is, is the key's

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        return _SECONDS[self.ttl or "5m"]


class Marked(Strict):
    """What `cache_control` may stand on."""

    cache_control: CacheControl | None = None


class TextBlock(Marked):
    foreign = {"citations": _IGNORED}  # noqa: RUF012

    type: Literal["text"]
    text: Text


class ThinkingBlock(Strict):
    """What the model thought. Nothing is signed here, so any signature is taken."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedBlock(Strict):
    """What another server thought, enciphered: it is left out, as nobody here can read it."""

    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(Marked):
    foreign = {"caller": _IGNORED}  # noqa: RUF012

    type: Literal["tool_use"]
    id: CallId
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]+$"), counted("tool_name")]
    input: dict[str, Any]


def _tag(value: Any) -> str:
    """How a content is given: as a text, or as blocks."""
    return "text" if isinstance(value, str) else "blocks"


def _refusing(*built: str) -> BeforeValidator:
    """Refuses blocks of other types by name."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "image":
            raise field_error("not_built", NO_IMAGES)
        if isinstance(kind, str) and kind not in built:
            message = (
                f"blocks of type {kind[:64]!r} are not built here in this place; known: "
                f"{', '.join(built)}"
            )
            raise field_error("not_built", message)
        return value

    return BeforeValidator(check)


class Unsaid:
    """A list's bound that the document leaves out: who tries it from the document sends
    megabytes.
    """

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = handler(core)
        schema.pop("maxItems", None)
        return schema


_few = Field(
    fail_fast=True, max_length=int(COUNTS["parts"].high)
)  # none at all: an empty answer that is sent back
_as_given = Discriminator(_tag)

TextOnly = Annotated[TextBlock, _refusing("text")]
Texts = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[TextOnly], _few, Unsaid(), Tag("blocks")],
    _as_given,
]


class ToolResultBlock(Marked):
    foreign = {"toolset_name": _IGNORED}  # noqa: RUF012

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Texts | None = None
    is_error: bool | None = None

    @property
    def told(self) -> str:
        """What the model is told of it. Templates have no place for `is_error`, so it is said in
        words.
        """
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
    Annotated[Text, Tag("text")] | Annotated[list[_UserBlock], _few, Unsaid(), Tag("blocks")],
    _as_given,
]
_AssistantContent = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[_AssistantBlock], _few, Unsaid(), Tag("blocks")],
    _as_given,
]


class UserMessage(Strict):
    role: Literal["user"]
    content: _UserContent

    @model_validator(mode="after")
    def _results_come_first(self) -> UserMessage:
        kinds = [block.type for block in blocks_of(self)]
        if kinds != sorted(kinds, reverse=True):  # "tool_result" before "text"
            raise refused_field("content", "has a tool_result behind text; results come first")
        return self


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: _AssistantContent


class SystemMessage(Strict):
    role: Literal["system"]
    content: Texts


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


def blocks_of(message: UserMessage | AssistantMessage | SystemMessage) -> list[Any]:
    """The content of a message as blocks."""
    content: Any = message.content
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def texts_of(content: str | Sequence[TextBlock] | None) -> str:
    """A content of text, in one."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())
