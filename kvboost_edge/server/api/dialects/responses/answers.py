"""What the answers of /v1/responses look like, for the OpenAPI document: they are written by
hand.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvboost_edge.server.api.answers import (
    CompletionTokensDetails,
    Costs,
    PromptTokensDetails,
    Timings,
)

__all__ = ["DeletedResponse", "ItemList", "ResponseAnswer"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ResponseUsage(_Answer):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseError(_Answer):
    code: str
    message: str


class IncompleteDetails(_Answer):
    reason: Literal["max_output_tokens"]


class ReasoningUsed(_Answer):
    effort: str | None
    summary: None


class ResponseAnswer(_Answer):
    """`output`: items of type reasoning, message and function_call, in this order."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    completed_at: int
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningUsed
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None
    metadata: dict[str, str]
    timings: Timings
    kvboost: Costs


class DeletedResponse(_Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(_Answer):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
