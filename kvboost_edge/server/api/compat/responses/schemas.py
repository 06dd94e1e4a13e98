"""Request body of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from kvboost_edge.server.api.bounds import bounded
from kvboost_edge.server.api.compat.responses.items import Items, size_of_items
from kvboost_edge.server.api.compat.responses.tools import ChoiceField, TextForm, ToolList
from kvboost_edge.server.api.schemas.cache_use import CacheUse
from kvboost_edge.server.api.schemas.chat import TemplateVariables
from kvboost_edge.server.api.schemas.reasoning_effort import Effort
from kvboost_edge.server.api.schemas.shared import (
    BoundedText,
    CacheSalt,
    Label,
    Metadata,
    ModelName,
    NotBuilt,
    OnlyFalse,
    PromptCacheOptions,
    ReasoningBudgetField,
    ReasoningMessage,
)
from kvboost_edge.server.api.schemas.strict import Strict, field_error
from kvboost_edge.server.api.schemas.unsupported_fields import UnsupportedField

__all__ = ["Reasoning", "ResponseRequest", "StreamOptions"]

_CONVERSATION = "conversations are not supported; use previous_response_id"
_UNSUPPORTED = {
    "client_metadata": UnsupportedField("", ignored=True),  # Codex sends its name there.
    "messages": UnsupportedField("send input, or messages to /v1/chat/completions"),
    "max_tokens": UnsupportedField("use max_output_tokens"),
    "max_completion_tokens": UnsupportedField("use max_output_tokens"),
    "response_format": UnsupportedField("use text.format"),
    "reasoning_effort": UnsupportedField("use reasoning.effort"),
    "conversation": UnsupportedField(_CONVERSATION),
    "prompt": UnsupportedField("there are no stored prompts; send instructions and input"),
    "max_tool_calls": UnsupportedField("the model calls only functions, which the client runs"),
    "n": UnsupportedField("a response has one answer; send another request", (1,)),
    "stop": UnsupportedField("responses have no stop strings; use /v1/chat/completions"),
    "logprobs": UnsupportedField("use /v1/chat/completions", (False,)),
    "top_logprobs": UnsupportedField("use /v1/chat/completions", (0,)),
    "context_management": UnsupportedField(
        "the context is never truncated; longer conversations are refused", ([],)
    ),
}


def _truncation(value: Any) -> str:
    if value != "disabled":
        raise field_error(
            "not_built",
            "only 'disabled' is supported; shorten the conversation instead",
        )
    return "disabled"


def _include(value: Any) -> list[str]:
    """Accept only values that need no extra output. Reasoning is always in the output items."""
    if not isinstance(value, list) or any(one != "reasoning.encrypted_content" for one in value):
        message = "may only hold 'reasoning.encrypted_content', which has no effect"
        raise field_error("not_built", message)
    return value


class Reasoning(Strict):
    """Reasoning options of a request.

    Effort "none" disables thinking. Other levels enable it. They are passed to templates that have
    levels, and otherwise are fractions of the answer's tokens. The answer contains the reasoning
    itself, never a summary. The chat template decides which earlier reasoning the model sees.
    """

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class StreamOptions(Strict):
    """Options of a stream."""

    include_obfuscation: OnlyFalse = None


class ResponseRequest(Strict):
    """Body of /v1/responses: a conversation to continue, with additional fields of this server.

    Without `max_output_tokens`, the answer may fill the context.
    """

    unsupported = _UNSUPPORTED

    input: Items
    model: ModelName | None = None
    instructions: BoundedText | None = None
    previous_response_id: Label | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: ToolList | None = None
    tool_choice: ChoiceField | None = None
    parallel_tool_calls: bool | None = None
    text: TextForm = Field(default_factory=lambda: {"format": {"type": "text"}})
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, bounded("max_completion_tokens")] | None = None
    temperature: Annotated[float, bounded("temperature")] | None = None
    top_p: Annotated[float, bounded("top_p")] | None = None
    truncation: (
        Annotated[str, PlainValidator(_truncation), WithJsonSchema({"const": "disabled"})] | None
    ) = None
    include: (
        Annotated[
            list[str],
            PlainValidator(_include),
            WithJsonSchema({"type": "array", "items": {"const": "reasoning.encrypted_content"}}),
        ]
        | None
    ) = None
    background: OnlyFalse = None
    moderation: NotBuilt = None

    # Accepted and ignored.
    metadata: Metadata | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    service_tier: Label | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    top_k: Annotated[int, bounded("top_k")] | None = None
    min_p: Annotated[float, bounded("min_p")] | None = None
    seed: Annotated[int, bounded("seed")] | None = None
    repetition_penalty: Annotated[float, bounded("repetition_penalty")] | None = None
    cache_salt: CacheSalt | None = None
    cache_prompt: bool | None = None
    priority: Annotated[int, bounded("priority")] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    kvboost: CacheUse | None = None
    reasoning_budget: ReasoningBudgetField = None
    reasoning_budget_message: ReasoningMessage = None

    @property
    def size(self) -> int:
        """Number of characters to tokenize."""
        return len(self.instructions or "") + size_of_items(self.input)
