"""Tokenization of texts and of messages in the chat template, and estimates of their size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.errors import RequestError
from kvboost_edge.server.api.schemas.cache import PromptPrefix
from kvboost_edge.server.api.schemas.chat import ChatMessage, ChatRequest
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.api.schemas.tools import size_of_tools
from kvboost_edge.server.api.turns import template_inputs
from kvboost_edge.server.cache_report.normalization import NormalizedRequest, normalize_request
from kvboost_edge.server.cache_report.recent_requests import PromptInputs
from kvboost_edge.server.state import ModelState
from kvboost_edge.text.rendered_chat import FindAnswer
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = [
    "encode_asked",
    "encode_plain",
    "encode_prefix",
    "encode_prompt",
    "encode_text",
    "estimate_messages",
    "estimate_prefix",
    "estimate_tokens",
    "prefix_size",
    "prompt_only",
    "render_prompt",
    "size_of",
    "with_defaults",
]

_CHARACTERS_PER_TOKEN = 4
_TEMPLATE_TOKENS = 3  # added per message by the chat template
_TEMPLATE_CHARACTERS = 16


def estimate_tokens(text: str) -> int:
    """Estimate the number of tokens of a text; at least 1."""
    return len(text) // _CHARACTERS_PER_TOKEN + 1


def estimate_messages(
    messages: Sequence[ChatMessage], tools: list[dict[str, Any]] | None = None
) -> int:
    """Estimate the number of tokens of messages and tools."""
    sizes = [message.size // _CHARACTERS_PER_TOKEN + 1 + _TEMPLATE_TOKENS for message in messages]
    return size_of_tools(tools) // _CHARACTERS_PER_TOKEN + sum(sizes)


def size_of(messages: Sequence[ChatMessage], tools: list[dict[str, Any]] | None = None) -> int:
    """Return the number of characters to tokenize, including those added by the chat template."""
    return size_of_tools(tools) + sum(message.size + _TEMPLATE_CHARACTERS for message in messages)


def encode_text(
    tokenizer: Tokenizer,
    text: str,
    add_special_tokens: bool,
    field: str,
    *,
    parse_special: bool = True,
) -> list[int]:
    """Tokenize a text. Takes long for long texts.

    Args:
        tokenizer: tokenizer of the model.
        text: the text.
        add_special_tokens: whether to add the tokenizer's special tokens, such as BOS.
        field: field of the text, for errors.
        parse_special: whether special tokens may be written in the text. If false, they are plain
            text, and `add_special_tokens` has no effect.

    Raises:
        ApiError: the text yields no tokens (400). The error names `field`.
    """
    try:
        ids = (
            tokenizer.encode(text, add_special_tokens)
            if parse_special
            else tokenizer.encode_framed("", text, "")
        )
    except RequestError as error:
        raise bad_field(field, str(error)) from error
    if not ids:
        raise bad_field(field, "the tokenizer returns no tokens for this text")
    return ids


def encode_plain(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    variables: dict[str, Any] | None,
    add_generation_prompt: bool = True,
    *,
    tools: list[dict[str, Any]] | None = None,
    continue_final: bool = False,
    find_answer: FindAnswer | None = None,
) -> list[int]:
    """Render messages with the chat template and tokenize them. Takes long for long messages.

    Raises:
        ApiError: the template rejects the messages (400).
    """
    plain, described = template_inputs(tokenizer, messages, tools, find_answer)
    try:
        ids = tokenizer.encode_chat(
            plain,
            add_generation_prompt,
            variables,
            tools=described,
            continue_final=continue_final,
            find_answer=find_answer,
        )
    except RequestError as error:
        raise bad_field("messages", str(error)) from error
    if not ids:
        raise bad_field(
            "messages", "the model's chat template returns no tokens for these messages"
        )
    return ids


def with_defaults(state: ModelState, body: ChatRequest) -> ChatRequest:
    """Return the request with the model's system message and parameters, where it has none."""
    defaults = state.defaults
    missing = defaults.missing_in(body)
    if defaults.system and not any(one.role in ("system", "developer") for one in body.messages):
        system = ChatMessage(role="system", content=defaults.system)
        missing["messages"] = [system, *body.messages]
    return body.model_copy(update=missing) if missing else body


def encode_asked(
    state: ModelState,
    answers: KeptAnswers,
    messages: Sequence[ChatMessage],
    body: ChatRequest,
    add_generation_prompt: bool,
    *,
    continues: bool = False,
) -> tuple[list[int], PromptInputs]:
    """Normalize a request's messages, tools and template variables, and tokenize them.

    Takes long for long messages, so run it in a worker thread.

    Returns:
        The token ids, and a description of the normalized inputs for cache-miss reports.
    """
    asked = _normalized(state, answers, messages, body)
    ids = encode_plain(
        state.engine.tokenizer,
        asked.messages,
        asked.variables,
        add_generation_prompt,
        tools=asked.tools,
        continue_final=continues,
        find_answer=answers.find,
    )
    return ids, asked.described


def _normalized(
    state: ModelState, answers: KeptAnswers, messages: Sequence[ChatMessage], body: ChatRequest
) -> NormalizedRequest:
    plain = [message.for_template() for message in messages]
    return normalize_request(
        state.normalizer,
        state.engine.tokenizer,
        answers,
        plain,
        body.tools,
        body.template_variables,
    )


class PromptFields(Protocol):
    """Fields of a body whose messages are only tokenized or rendered."""

    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def prompt_only(messages: list[ChatMessage], fields: PromptFields) -> ChatRequest:
    """Return the chat request with these messages and fields, to encode or render its prompt.

    An assistant's message with tool calls may be the last one. It is not continued.

    Raises:
        ApiError: continue_final_message is true, but the last message cannot be continued (400).
    """
    continues = fields.continue_final_message
    if continues is None and messages[-1].tool_calls:
        continues = False
    chat = ChatRequest.model_construct(
        messages=messages,
        tools=fields.tools,
        chat_template_kwargs=fields.chat_template_kwargs,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=continues,
    )
    chat.check_together()
    return chat


def encode_prompt(state: ModelState, body: ChatRequest, answers: KeptAnswers) -> list[int]:
    """Return the token ids of a chat request's prompt. Takes long for long prompts."""
    body = with_defaults(state, body)
    generates = body.add_generation_prompt is not False
    ids, _ = encode_asked(state, answers, body.messages, body, generates, continues=body.continues)
    return ids


def render_prompt(state: ModelState, body: ChatRequest, answers: KeptAnswers) -> str:
    """Return the text of a chat request's prompt.

    Raises:
        ApiError: the template rejects the messages (400).
    """
    body = with_defaults(state, body)
    asked = _normalized(state, answers, body.messages, body)
    tokenizer = state.engine.tokenizer
    messages, tools = template_inputs(tokenizer, asked.messages, asked.tools, answers.find)
    try:
        return tokenizer.apply_chat_template(
            messages,
            body.add_generation_prompt is not False,
            asked.variables,
            tools,
            continue_final=body.continues,
        )
    except RequestError as error:
        raise bad_field("messages", str(error)) from error


def encode_prefix(state: ModelState, body: PromptPrefix, answers: KeptAnswers) -> list[int]:
    """Return the first token ids of prompts that begin with this text or these messages."""
    if body.messages is None:
        return encode_text(state.engine.tokenizer, body.text or "", True, "text")
    return encode_prompt(state, _chat_of(state, body.messages, body), answers)


def estimate_prefix(state: ModelState, body: PromptPrefix) -> int:
    """Estimate the number of tokens that `encode_prefix` returns."""
    if body.messages is None:
        return estimate_tokens(body.text or "")
    return estimate_messages(_chat_of(state, body.messages, body).messages, body.tools)


def prefix_size(state: ModelState, body: PromptPrefix) -> int:
    """Return the number of characters that `encode_prefix` tokenizes."""
    if body.messages is None:
        return len(body.text or "")
    return size_of(_chat_of(state, body.messages, body).messages, body.tools)


def _chat_of(state: ModelState, messages: Sequence[ChatMessage], body: PromptPrefix) -> ChatRequest:
    """Return a chat request with these messages, after the model's system message if it has one."""
    chat = ChatRequest.model_construct(
        messages=messages,
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=bool(body.add_generation_prompt),
    )
    return with_defaults(state, chat)
