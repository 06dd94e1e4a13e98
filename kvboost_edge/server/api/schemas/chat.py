"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from kvboost_edge.server.api.bounds import BOUNDS, COUNTS, bounded, counted
from kvboost_edge.server.api.schemas.shared import (
    NotBuilt,
    OnlyEmpty,
    OnlyFalse,
    OnlyNone,
    OnlyOne,
    SamplingFields,
    check_count,
    check_text,
    is_text,
    map_schema,
    number_schema,
    or_null,
)
from kvboost_edge.server.api.schemas.strict import Strict, bad_field, field_error
from kvboost_edge.text.chat_template import is_reserved

__all__ = ["ChatMessage", "ChatRequest", "Messages"]

_ROLES = ("system", "developer", "user", "assistant")
_LATER_ROLES = ("tool", "function")


def _role(value: Any) -> str:
    if isinstance(value, str) and value in _LATER_ROLES:
        raise field_error("not_built", f"role {value!r} is not built in this server: there are no tool calls yet")
    if not isinstance(value, str) or value not in _ROLES:
        raise field_error("role", f"must be one of {', '.join(_ROLES)}")
    return value


def _content(value: Any) -> str:
    """Text, or text parts joined by line ends."""
    count = COUNTS["parts"]
    if isinstance(value, list) and count.low <= len(value) <= count.high:
        value = "\n".join(_part(part) for part in value)
    if not is_text(value):
        raise field_error("content", f"must be a string or a list of {count.describe()} text parts")
    if len(value) > COUNTS["text"].high:
        raise field_error("content", f"has {len(value)} characters; at most {COUNTS['text'].high} are allowed")
    return str(value)


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise field_error("not_built", "content parts other than type 'text' are not built in this server")
    if kind != "text" or set(part) != {"type", "text"} or not is_text(part["text"]):
        raise field_error("content", "each content part must be {'type': 'text', 'text': string}")
    return str(part["text"])


def _template_variables(value: Any) -> dict[str, Any]:
    length = COUNTS["template_name"]
    if not isinstance(value, dict):
        raise field_error("chat_template_kwargs", "must map names to strings, numbers or booleans")
    check_count("chat_template_kwargs", "template_variables", value)
    for name, item in value.items():
        if len(name) > length.high or is_reserved(name):
            raise field_error("chat_template_kwargs", "holds a name that a template variable may not have")
        _check_template_value(item)
    return value


def _check_template_value(item: Any) -> None:
    number, length = BOUNDS["template_number"], COUNTS["template_text"]
    if isinstance(item, str):
        if not is_text(item):
            raise field_error("chat_template_kwargs", "holds a lone surrogate; it is no valid text")
        if len(item) > length.high:
            raise field_error("chat_template_kwargs", f"each text must have {length.describe()} characters")
    elif isinstance(item, (int, float)):  # true and false are among the integers
        if not number.low <= item <= number.high:
            raise field_error("chat_template_kwargs", f"each number must be in {number.describe()}")
    else:
        raise field_error("chat_template_kwargs", "must map names to strings, numbers or booleans")


def _modalities(value: Any) -> None:
    if value is not None and value != ["text"]:
        raise field_error("not_built", "anything but ['text'] is not built in this server")


_TEXT_SCHEMA = {"type": "string", "maxLength": COUNTS["text"].high}
_PARTS_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "maxItems": COUNTS["parts"].high,
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    },
}


Modalities = Annotated[None, PlainValidator(_modalities), or_null({"const": ["text"]})]
TemplateVariables = Annotated[
    dict[str, Any],
    PlainValidator(_template_variables),
    map_schema(
        "template_variables",
        {"pattern": "^[A-Za-z][A-Za-z0-9_]*$", "maxLength": COUNTS["template_name"].high},
        {
            "anyOf": [
                {"type": "string", "maxLength": COUNTS["template_text"].high},
                number_schema("template_number"),
                {"type": "boolean"},
            ]
        },
    ),
]


class ChatMessage(Strict):
    """One message. `content` is plain text after validation."""

    role: Annotated[str, PlainValidator(_role), WithJsonSchema({"enum": list(_ROLES)})]
    content: Annotated[str, PlainValidator(_content), WithJsonSchema({"anyOf": [_TEXT_SCHEMA, _PARTS_SCHEMA]})]
    name: Annotated[str, AfterValidator(check_text), counted("name")] | None = None
    refusal: NotBuilt = None
    annotations: OnlyEmpty = None
    audio: NotBuilt = None
    tool_calls: OnlyEmpty = None
    tool_call_id: NotBuilt = None
    function_call: NotBuilt = None

    def for_template(self) -> dict[str, str]:
        """As templates know messages: a developer's message is the system's under its older name."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


Messages = Annotated[list[ChatMessage], Field(fail_fast=True), counted("messages")]


class ChatRequest(SamplingFields):
    """Without `max_tokens` or `max_completion_tokens` the answer may fill the context, or, with log probabilities, hold
    as many of them as an answer may."""

    messages: Messages
    max_tokens: Annotated[int, bounded("max_tokens")] | None = None
    max_completion_tokens: Annotated[int, bounded("max_completion_tokens")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, bounded("top_logprobs")] | None = None
    modalities: Modalities = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = Field(None, description="false: the model continues the messages as they are")
    continue_final_message: bool | None = Field(
        None, description="the answer goes on with the last message; true unless given where that is the assistant's"
    )

    audio: NotBuilt = None
    best_of: OnlyOne = None
    function_call: OnlyNone = None
    functions: OnlyEmpty = None
    parallel_tool_calls: OnlyFalse = None
    prediction: NotBuilt = None
    reasoning_effort: NotBuilt = None
    tool_choice: OnlyNone = None
    tools: OnlyEmpty = None
    verbosity: NotBuilt = None
    web_search_options: NotBuilt = None

    def check_together(self) -> None:
        super().check_together()
        if self.max_tokens == 0:
            raise bad_field("max_tokens", "max_tokens=0 is only allowed with echo, in /v1/completions")
        given = (self.max_tokens, self.max_completion_tokens)
        if None not in given and given[0] != given[1]:
            raise bad_field("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
        if self.continue_final_message and (self.messages[-1].role != "assistant" or self.add_generation_prompt):
            wrong = "needs a last message of role assistant, and no add_generation_prompt"
            raise bad_field("continue_final_message", f"continue_final_message {wrong}")
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "top_logprobs is only allowed when logprobs is true")

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def continues(self) -> bool:
        """The answer goes on with the last message."""
        if self.continue_final_message is not None:
            return self.continue_final_message
        return self.messages[-1].role == "assistant" and self.add_generation_prompt is None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
