"""Request body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from kvboost_edge.server.api.bounds import BOUNDS, COUNTS, bounded, counted
from kvboost_edge.server.api.schemas.reasoning_effort import Effort, effort_variables
from kvboost_edge.server.api.schemas.shared import (
    BoundedText,
    NotBuilt,
    OnlyEmpty,
    OnlyMedium,
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
from kvboost_edge.server.api.schemas.tools import ToolCalls, ToolChoice, ToolChoiceField, Tools
from kvboost_edge.server.api.schemas.unsupported_fields import (
    NO_IMAGES,
    UnsupportedField,
    refused_field,
)
from kvboost_edge.text.chat_template import is_reserved

__all__ = ["ChatMessage", "ChatRequest", "Messages"]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_BREAKPOINT = "prompt_cache_breakpoint"  # has no effect, see PromptCacheOptions


def _role(value: Any) -> str:
    if value == "function":
        raise field_error("not_built", "role 'function' is not supported; use 'tool'")
    if not isinstance(value, str) or value not in _ROLES:
        raise field_error("role", f"must be one of {', '.join(_ROLES)}")
    return value


def _content(value: Any) -> str:
    """Return the content of a message as one text. Text parts are joined with newlines."""
    count = COUNTS["parts"]
    if isinstance(value, list) and count.low <= len(value) <= count.high:
        value = "\n".join(_part(part) for part in value)
    if not is_text(value):
        raise field_error("content", f"must be a string or a list of {count.describe()} text parts")
    if len(value) > COUNTS["text"].high:
        raise field_error(
            "content", f"has {len(value)} characters; at most {COUNTS['text'].high} are allowed"
        )
    return str(value)


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("image_url", "image", "input_image"):
        raise field_error("not_built", NO_IMAGES)
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        raise field_error(
            "not_built", f"content parts of type {kind[:64]!r} are not supported; use type 'text'"
        )
    if (
        not isinstance(kind, str)
        or part.keys() - {_BREAKPOINT} != {"type", kind}
        or not is_text(part[kind])
    ):
        raise field_error("content", "each content part must be {'type': 'text', 'text': string}")
    return str(part[kind])


def _template_variables(value: Any) -> dict[str, Any]:
    length = COUNTS["template_name"]
    if not isinstance(value, dict):
        raise field_error("chat_template_kwargs", "must map names to strings, numbers or booleans")
    check_count("chat_template_kwargs", "template_variables", value)
    for name, item in value.items():
        if len(name) > length.high or is_reserved(name):
            raise field_error(
                "chat_template_kwargs",
                f"the variable name {name[:64]!r} is reserved or longer than {length.high} "
                "characters; rename it",
            )
        _check_template_value(item)
    return value


def _check_template_value(item: Any) -> None:
    number = BOUNDS["template_number"]
    length = COUNTS["template_text"]
    if isinstance(item, str):
        if not is_text(item):
            raise field_error(
                "chat_template_kwargs", "contains a lone surrogate, which is not valid Unicode"
            )
        if len(item) > length.high:
            raise field_error(
                "chat_template_kwargs",
                f"each string must have {length.describe()} characters, not {len(item)}",
            )
    elif isinstance(item, (int, float)):  # a bool is an int too
        if not number.low <= item <= number.high:
            raise field_error(
                "chat_template_kwargs",
                f"each number must be in {number.describe()}, not {str(item)[:40]}",
            )
    else:
        raise field_error("chat_template_kwargs", "must map names to strings, numbers or booleans")


def _modalities(value: Any) -> None:
    if value is not None and value != ["text"]:
        raise field_error("not_built", "only ['text'] is supported; leave it out")


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


_TEXT_SCHEMA = {"type": "string", "maxLength": COUNTS["text"].high}
_PARTS_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "maxItems": COUNTS["parts"].high,
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"type": {"const": kind}, kind: {"type": "string"}, **hints},
                "required": ["type", kind],
                "additionalProperties": False,
            }
            for kind, hints in (("text", {_BREAKPOINT: {"type": "object"}}), ("refusal", {}))
        ]
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


Content = Annotated[
    str, PlainValidator(_content), WithJsonSchema({"anyOf": [_TEXT_SCHEMA, _PARTS_SCHEMA]})
]


def _by_role(schema: dict[str, Any]) -> None:
    """Add the rules of `_belongs_to_its_role` to the OpenAPI document."""
    null = {"type": "null"}
    given = {"not": {"type": "null"}}
    schema["oneOf"] = [
        {
            "properties": {
                "role": {"const": "tool"},
                "tool_call_id": given,
                "content": given,
                "tool_calls": null,
            }
        },
        {"properties": {"role": {"const": "assistant"}, "tool_call_id": null, "content": given}},
        {
            "properties": {"role": {"enum": ["system", "developer", "user"]}}
            | {"tool_call_id": null, "content": given, "tool_calls": null}
        },
    ]
    for one, needed in zip(
        schema["oneOf"], (["content", "tool_call_id"], ["content"], ["content"]), strict=True
    ):
        one["required"] = needed


class ChatMessage(Strict):
    """A message of a conversation."""

    # OpenAI's client sends it with a message that it parsed.
    unsupported: ClassVar = {"parsed": UnsupportedField("", ignored=True)}

    model_config = ConfigDict(json_schema_extra=_by_role)
    role: Annotated[str, PlainValidator(_role), WithJsonSchema({"enum": list(_ROLES)})]
    content: Content | None = None
    name: Annotated[str, AfterValidator(check_text), counted("name")] | None = None
    refusal: NotBuilt = None
    annotations: OnlyEmpty = None
    audio: NotBuilt = None
    tool_calls: ToolCalls | None = None
    tool_call_id: Annotated[str, AfterValidator(check_text), counted("tool_call_id")] | None = None
    reasoning_content: BoundedText | None = None
    reasoning: BoundedText | None = None
    function_call: NotBuilt = None

    @model_validator(mode="after")
    def _belongs_to_its_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise refused_field("tool_calls", "is only allowed in a message of role 'assistant'")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise refused_field("tool_call_id", "must be given with role 'tool', and only there")
        if self.content is None and not self.tool_calls:
            raise refused_field(
                "content", "is missing; only a message with tool_calls may leave it out"
            )
        return self

    def for_template(self) -> dict[str, Any]:
        """Convert the message to the format of chat templates."""
        # "developer" is a newer name of the system role, which chat templates do not know.
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if thought := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thought
        return message

    @property
    def text(self) -> str:
        """The content, or "" if it is missing."""
        return self.content or ""

    @property
    def size(self) -> int:
        """Number of characters in all texts of the message."""
        calls = sum(len(call.name) + len(call.arguments) for call in self.tool_calls or ())
        return len(self.text) + len(self.reasoning_content or self.reasoning or "") + calls


Messages = Annotated[list[ChatMessage], Field(fail_fast=True), counted("messages")]
GenerationPrompt = Annotated[
    bool | None,
    Field(
        description=(
            "If false, the prompt ends with the messages, without the template's generation prompt."
        )
    ),
]
ContinueFinal = Annotated[
    bool | None,
    Field(
        description=(
            "The answer continues the last message; true by default if that is the assistant's."
        )
    ),
]


class ChatRequest(SamplingFields):
    """Body of /v1/chat/completions: a conversation to continue.

    Without `max_tokens` or `max_completion_tokens`, the answer may fill the context. If log
    probabilities are requested, their number also limits the answer.
    """

    messages: Messages
    max_tokens: Annotated[int, bounded("max_tokens")] | None = Field(
        None,
        description=(
            "Maximum number of tokens to generate. Default: what the context leaves. 0 computes "
            "the prompt into the prefix cache, and the answer is empty."
        ),
    )
    max_completion_tokens: Annotated[int, bounded("max_completion_tokens")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, bounded("top_logprobs")] | None = None
    modalities: Modalities = None
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description="Variables of the chat template."
    )
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: ContinueFinal = None

    audio: NotBuilt = None
    best_of: OnlyOne = None
    function_call: OnlyNone = None
    functions: OnlyEmpty = None
    moderation: NotBuilt = None
    parallel_tool_calls: bool | None = None
    prediction: NotBuilt = None
    reasoning_effort: Effort | None = Field(
        None,
        description=(
            "Effort of the reasoning: a level of the chat template, or else a fraction of the "
            "answer's tokens. none turns reasoning off."
        ),
    )
    tool_choice: ToolChoiceField | None = None
    tools: Tools | None = None
    verbosity: OnlyMedium = None
    web_search_options: NotBuilt = None

    def check_together(self) -> None:
        super().check_together()
        given = (self.max_tokens, self.max_completion_tokens)
        if None not in given and given[0] != given[1]:
            raise bad_field(
                "max_tokens", "max_tokens and max_completion_tokens differ; give one of them"
            )
        if self.continue_final_message and (
            self.messages[-1].role != "assistant" or self.add_generation_prompt
        ):
            wrong = "requires a last message with role 'assistant', without add_generation_prompt"
            raise bad_field("continue_final_message", f"continue_final_message {wrong}")
        if self.continues and self.messages[-1].tool_calls:
            raise bad_field(
                "messages",
                "the last message has tool_calls; add a tool message with the result of each call",
            )
        self._check_tools()
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "top_logprobs is only allowed when logprobs is true")

    def _check_tools(self) -> None:
        names = [tool["function"]["name"] for tool in self.tools or ()]
        choice = self.called
        if not names and choice.mode != "none":
            raise bad_field("tool_choice", f"tool_choice {choice.mode!r} needs tools")
        unknown = next((name for name in choice.names or () if name not in names), None)
        if unknown is not None:
            raise bad_field(
                "tool_choice", f"tool_choice names {unknown!r}; the tools are {_shown(names)}"
            )
        if names and self.answer_format and "json_schema" not in self.answer_format:
            raise bad_field(
                "tools",
                "tools can be combined with a JSON schema, not with a regex, a grammar or a choice",
            )

    @property
    def called(self) -> ToolChoice:
        """Tools that the model may call. As in OpenAI's API, these are all tools by default."""
        return self.tool_choice or ToolChoice("auto" if self.tools else "none")

    @property
    def template_variables(self) -> dict[str, Any] | None:
        """Variables of the chat template, or None if the request sets none."""
        given = self.chat_template_kwargs or {}
        return {**effort_variables(self.reasoning_effort), **given} or None

    @property
    def context_overflow(self) -> str | None:
        """Handling of chats that exceed the context; None for the server's default."""
        return None if self.kvboost is None else self.kvboost.context_overflow

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def continues(self) -> bool:
        """True if the answer continues the last message."""
        if self.continue_final_message is not None:
            return self.continue_final_message
        return self.messages[-1].role == "assistant" and self.add_generation_prompt is None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
