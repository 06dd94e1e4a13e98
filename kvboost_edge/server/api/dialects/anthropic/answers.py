"""What Anthropic's answers look like, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvboost_edge.server.api.answers import Costs, Timings

__all__ = ["ERRORS", "ErrorAnswer", "MessageAnswer", "TokenCount"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TextContent(_Answer):
    type: Literal["text"]
    text: str


class ThinkingContent(_Answer):
    """Nothing is signed; the signature is there as clients want one."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(_Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class CacheCreation(_Answer):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class OutputTokensDetails(_Answer):
    thinking_tokens: int


class MessageUsage(_Answer):
    """The three counts of the input add up to the prompt: found in the cache, computed and kept by
    `cache_control`, computed besides.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    service_tier: Literal["standard"]


class MessageCosts(Costs):
    """`pinned_tokens`: those that are pinned now by `cache_control`."""

    pinned_tokens: int


class MessageAnswer(_Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage
    timings: Timings
    kvboost: MessageCosts


class TokenCount(_Answer):
    input_tokens: int


class ErrorDetail(_Answer):
    type: str
    message: str


class ErrorAnswer(_Answer):
    """Every error of these routes."""

    type: Literal["error"]
    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer},
    "5XX": {"model": ErrorAnswer},
}
