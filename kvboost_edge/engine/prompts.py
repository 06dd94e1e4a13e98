"""From what a caller passes as a prompt to checked token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvboost_edge.engine.request import SamplingParams, as_int
from kvboost_edge.errors import KVBoostError, RequestError

if TYPE_CHECKING:
    from kvboost_edge.text.answers import FindAnswer
    from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["Prompt", "encode_prompt", "resolve_max_tokens"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text (the tokenizer's special tokens are added), token ids, or chat messages (the chat template is applied)."""


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer, vocab_size: int, find_answer: FindAnswer | None = None
) -> tuple[str, list[int]]:
    """The prompt as text and as token ids, all in [0, vocab_size); RequestError says what is wrong with it.

    find_answer   the ids that an assistant's message was generated with, see `encode_with_answers`
    """
    if isinstance(prompt, str):
        text, ids = prompt, _encode_text(prompt, tokenizer)
    else:
        items = _as_list(prompt)
        if items and isinstance(items[0], Mapping):
            text, ids = _encode_chat(items, tokenizer, find_answer)
        else:
            ids = [as_int(f"token {i} of the prompt", token_id) for i, token_id in enumerate(items)]
            text = ""
    if not ids:
        raise RequestError("the prompt is empty; give at least one token")
    for i, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"token {i} of the prompt is {token_id}; the model's vocabulary is 0..{vocab_size - 1}")
    return text, ids


def resolve_max_tokens(num_prompt_tokens: int, params: SamplingParams, max_context: int) -> int:
    """Longest the sequence may become; RequestError if the prompt or what is asked for goes over the context."""
    if num_prompt_tokens >= max_context:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens and leaves no room for a new one; the model's context is "
            f"{max_context} tokens; shorten the prompt"
        )
    if params.max_new_tokens is None:
        return max_context
    total = num_prompt_tokens + params.max_new_tokens
    if total > max_context:
        raise RequestError(
            f"{num_prompt_tokens} prompt tokens + max_new_tokens={params.max_new_tokens} make {total}; the model's "
            f"context is {max_context} tokens; lower max_new_tokens, or give None to fill the context"
        )
    return total


def _as_list(prompt: object) -> list[Any]:
    if hasattr(prompt, "tolist"):  # NumPy arrays and torch tensors
        prompt = prompt.tolist()
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        raise RequestError(
            f"a prompt must be a string, a list of token ids or a list of chat messages, not {type(prompt).__name__}"
        )
    return list(prompt)


def _encode_text(text: str, tokenizer: Tokenizer) -> list[int]:
    if not text:
        raise RequestError("the prompt is empty; give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt holds a lone surrogate at character {error.start}; it is no valid text"
        ) from None
    return tokenizer.encode(text)


def _encode_chat(messages: list[Any], tokenizer: Tokenizer, find_answer: FindAnswer | None) -> tuple[str, list[int]]:
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RequestError(f"chat message {i} is {message!r}; each must be a mapping with 'role' and 'content'")
    try:
        return tokenizer.chat_prompt(messages, find_answer)
    except KVBoostError:
        raise
    except Exception as error:  # a template is a program that came with the model: it may raise anything
        raise RequestError(f"the model's chat template refused the messages: {error}") from error
