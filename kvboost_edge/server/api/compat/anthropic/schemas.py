"""Request bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from kvboost_edge.server.api.bounds import COUNTS, bounded, counted
from kvboost_edge.server.api.compat.anthropic.blocks import (
    CacheControl,
    CacheControlFields,
    Message,
    Texts,
    Unsaid,
    blocks_of,
)
from kvboost_edge.server.api.schemas.shared import (
    BoundedText,
    Label,
    ModelName,
    check_text,
    or_null,
)
from kvboost_edge.server.api.schemas.strict import Strict, bad_field, field_error
from kvboost_edge.server.api.schemas.unsupported_fields import UnsupportedField

__all__ = ["CountTokensRequest", "MessagesPrompt", "MessagesRequest"]

_IGNORED = UnsupportedField("", ignored=True)
_SERVERS = "features of Anthropic's servers are not supported"
_UNSUPPORTED: dict[str, UnsupportedField] = {
    "container": UnsupportedField(_SERVERS),
    "mcp_servers": UnsupportedField(_SERVERS, ([],)),
    "fallbacks": UnsupportedField("fallback models are not supported", ([],)),
    "speed": UnsupportedField("only 'standard' is supported", ("standard",)),
    "output_format": UnsupportedField("use output_config.format"),
    "prompt": UnsupportedField("send messages"),
    "max_tokens_to_sample": UnsupportedField("use max_tokens"),
    "stop": UnsupportedField("use stop_sequences", ([],)),
    "n": UnsupportedField("an answer has one message", (1,)),
    "response_format": UnsupportedField("use output_config.format"),
    **dict.fromkeys(
        (
            "anthropic_beta",
            "anthropic_version",
            "betas",
            "diagnostics",
            "inference_geo",
            "user_profile_id",
        ),
        _IGNORED,
    ),
    "workspace_id": _IGNORED,
}
_NOT_IN_OUTPUT_CONFIG = {
    "task_budget": UnsupportedField(
        "the model is not shown a budget; limit an answer with max_tokens, or its reasoning with "
        "thinking.budget_tokens"
    ),
}


def _stop_sequences(value: list[str]) -> list[str]:
    length = COUNTS["stop_length"]
    for text in value:
        if not length.low <= len(text) <= length.high:
            raise field_error(
                "stop",
                f"each stop sequence must have {length.describe()} characters, not {len(text)}",
            )
        check_text(text)
    return value


def _own_tool(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "custom":
        message = (
            f"tools of type {kind[:64]!r} are Anthropic's own; give a tool with a name and an "
            "input_schema"
        )
        raise field_error("not_built", message)
    return value


def _unmanaged(value: Any) -> None:
    """Accept only context edits that remove nothing, because the client manages the context."""
    edits = (
        value.get("edits", []) if isinstance(value, dict) and value.keys() <= {"edits"} else None
    )
    if value is not None and edits not in ([], [_KEEP_ALL]):
        raise field_error(
            "not_built", f"edits other than {_KEEP_ALL} are not supported; leave them out"
        )


_KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
_EDITS = {"type": "array", "items": {"const": _KEEP_ALL}, "maxItems": 1}
_UNMANAGED = {"type": "object", "properties": {"edits": _EDITS}, "additionalProperties": False}


def _format(value: Any) -> dict[str, Any] | None:
    schema = (
        value.get("schema")
        if isinstance(value, dict) and value.keys() == {"type", "schema"}
        else None
    )
    if value is not None and (not isinstance(schema, dict) or value["type"] != "json_schema"):
        raise field_error("format", "must be {'type': 'json_schema', 'schema': {…}}")
    return schema


_FORMAT = {
    "type": "object",
    "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
    "required": ["type", "schema"],
    "additionalProperties": False,
}
Stops = Annotated[
    list[Annotated[str, counted("stop_length")]],
    AfterValidator(_stop_sequences),
    Field(max_length=int(COUNTS["stop"].high)),
]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]+$"), counted("tool_name")]


class Tool(CacheControlFields):
    """A tool that the client runs.

    Tool calls match the schema as described in docs/tools.md, with or without `strict`.
    """

    unsupported = {  # noqa: RUF012
        "allowed_callers": UnsupportedField(_SERVERS, (["direct"],)),
        "defer_loading": UnsupportedField("the model sees all tools", (False,)),
        "eager_input_streaming": _IGNORED,
        "input_examples": _IGNORED,
    }

    type: Literal["custom"] | None = None
    name: Name
    description: BoundedText | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class AnyChoice(Strict):
    """A tool choice that names no tool: "auto", "any" or "none"."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class OneChoice(Strict):
    """A tool choice that names one tool."""

    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """The thinking option of a request.

    `budget_tokens` limits the thinking of models whose thinking can be limited.
    """

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, bounded("budget_tokens")] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Strict):
    """Format of the answer, and the effort of thinking without `budget_tokens`."""

    unsupported = _NOT_IN_OUTPUT_CONFIG

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[dict[str, Any] | None, PlainValidator(_format), or_null(_FORMAT)] = None


class MetaData(Strict):
    """Metadata of the request. It is ignored."""

    user_id: Label | None = None


class MessagesPrompt(Strict):
    """Fields that make up the prompt."""

    unsupported = _UNSUPPORTED

    model: ModelName | None = None
    messages: Annotated[list[Message], Field(fail_fast=True), counted("messages"), Unsaid()]
    system: Texts | None = None
    tools: (
        Annotated[list[Annotated[Tool, BeforeValidator(_own_tool)]], counted("tools"), Unsaid()]
        | None
    ) = None
    tool_choice: Annotated[AnyChoice | OneChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = Field(
        None, description="Same as cache_control on the last block."
    )
    context_management: Annotated[None, PlainValidator(_unmanaged), or_null(_UNMANAGED)] = None

    def check_together(self) -> None:
        """Raise ApiError if `cache_control` is given too often."""
        most = COUNTS["cache_marks"].high
        count = sum(1 for _ in self._marks())
        if count > most:
            raise bad_field(
                "cache_control",
                f"cache_control is given {count} times; at most {most} are allowed",
            )

    @property
    def thinks(self) -> bool:
        """True if the request turns thinking on. As in Anthropic's API, it is off by default."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def thinking_budget(self) -> int | None:
        """Maximum number of thinking tokens, or None."""
        return self.thinking.budget_tokens if self.thinking is not None and self.thinks else None

    def _marks(self) -> Iterator[CacheControl]:
        blocks = [block for message in self.messages for block in blocks_of(message)]
        system = [] if self.system is None or isinstance(self.system, str) else self.system
        marks = [
            getattr(one, "cache_control", None)
            for one in (*(self.tools or ()), *system, *blocks, self)
        ]
        return (mark for mark in marks if mark is not None)


class CountTokensRequest(MessagesPrompt):
    """Body of /v1/messages/count_tokens: only the fields that make up the prompt."""


class MessagesRequest(MessagesPrompt):
    """Body of /v1/messages: a conversation to continue."""

    max_tokens: Annotated[int, bounded("max_tokens")]
    return_progress: bool | None = Field(
        None, description="Report the progress of the prompt in the pings of a stream."
    )
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: Annotated[float, bounded("anthropic_temperature")] | None = None
    top_p: Annotated[float, bounded("top_p")] | None = None
    top_k: Annotated[int, bounded("top_k")] | None = None

    # Accepted and ignored.
    metadata: MetaData | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
