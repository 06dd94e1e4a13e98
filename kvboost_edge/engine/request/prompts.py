"""Prompts as text, token ids or chat messages, and their conversion to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvboost_edge.engine.request.request import RequestFeature, RequestInputs, SamplingParams
from kvboost_edge.errors import KVBoostError, RequestError
from kvboost_edge.options import as_int
from kvboost_edge.text.message_boundaries import user_starts

if TYPE_CHECKING:
    from kvboost_edge.text.rendered_chat import FindAnswer
    from kvboost_edge.text.tokenizer import Tokenizer

__all__ = [
    "LIMIT_ADVICE",
    "Document",
    "Prompt",
    "SnapshotFields",
    "check_text",
    "encode_document",
    "encode_prompt",
    "resolve_max_tokens",
]

LIMIT_ADVICE = "lower max_new_tokens, or give None to fill the context (on the command line -n max)"

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text (the tokenizer's special tokens are added), token ids, or chat messages (the chat template
is applied).
"""

Document = str | Sequence[int]
"""Text that occurs somewhere in a prompt (no special tokens are added), or its token ids."""


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer, vocab_size: int, find_answer: FindAnswer | None = None
) -> tuple[str, list[int]]:
    """Return a prompt as text and as token ids in [0, vocab_size).

    The text is "" for a prompt of token ids.

    Args:
        find_answer: function that returns the token ids a message was generated with, see
            `encode_with_answers`.

    Raises:
        RequestError: the prompt is invalid.
    """
    if isinstance(prompt, str):
        text = prompt
        ids = _encode_text("the prompt", prompt, tokenizer)
    else:
        items = _as_list(prompt)
        if items and isinstance(items[0], Mapping):
            text, ids = _encode_chat(items, tokenizer, find_answer)
        elif items and isinstance(items[0], str):
            raise RequestError(
                "the prompt is a list of strings; give a string, a list of token ids or a list "
                "of chat messages, or use generate_batch for several prompts"
            )
        else:
            text = ""
            ids = _as_ids("the prompt", items)
    _check_ids("the prompt", ids, vocab_size)
    return text, ids


def encode_document(
    name: str, document: Document, tokenizer: Tokenizer, vocab_size: int
) -> list[int]:
    """Return the token ids of a document, all in [0, vocab_size).

    Raises:
        RequestError: the document is invalid. The message begins with `name`.
    """
    if isinstance(document, str):
        ids = _encode_text(name, document, tokenizer, add_special_tokens=False)
    else:
        ids = _as_ids(name, _as_list(document, name, "a string or a list of token ids"))
    _check_ids(name, ids, vocab_size)
    return ids


def _as_ids(name: str, items: list[Any]) -> list[int]:
    if set(map(type, items)) == {int}:  # fast path, which saves 1 ms per 2,000 tokens
        return items
    return [as_int(f"token {i} of {name}", token_id) for i, token_id in enumerate(items)]


def _check_ids(name: str, ids: list[int], vocab_size: int) -> None:
    if not ids:
        raise RequestError(f"{name} is empty; give at least one token")
    if 0 <= min(ids) <= max(ids) < vocab_size:
        return
    i = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
    raise RequestError(
        f"token {i} of {name} is {ids[i]}; the model's vocabulary is 0..{vocab_size - 1}"
    )


def resolve_max_tokens(num_prompt_tokens: int, params: SamplingParams, max_context: int) -> int:
    """Return the maximum length of a sequence including its prompt, in tokens.

    Raises:
        RequestError: the prompt or the requested length exceeds the context.
    """
    if num_prompt_tokens >= max_context:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens, which leaves no room for an answer in "
            f"the model's context of {max_context} tokens; shorten the prompt"
        )
    if params.max_new_tokens is None:
        return max_context
    total = num_prompt_tokens + params.max_new_tokens
    if total > max_context:
        raise RequestError(
            f"{num_prompt_tokens} prompt tokens + max_new_tokens={params.max_new_tokens} make "
            f"{total} tokens, more than the model's context of {max_context} tokens; "
            f"{LIMIT_ADVICE}"
        )
    return total


_KINDS = "a string, a list of token ids or a list of chat messages"


def _as_list(prompt: object, name: str = "a prompt", kinds: str = _KINDS) -> list[Any]:
    if hasattr(prompt, "tolist"):  # a NumPy array or torch tensor
        prompt = prompt.tolist()
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        raise RequestError(f"{name} must be {kinds}, not {type(prompt).__name__}")
    return list(prompt)


def check_text(name: str, text: str) -> None:
    """Check that a text is not empty and can be encoded as UTF-8.

    Raises:
        RequestError: the text is empty or contains a lone surrogate.
    """
    if not text:
        raise RequestError(f"{name} is empty; give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} contains a lone surrogate at character {error.start}, which is not valid "
            "Unicode; remove it"
        ) from None


def _encode_text(
    name: str, text: str, tokenizer: Tokenizer, add_special_tokens: bool = True
) -> list[int]:
    check_text(name, text)
    return tokenizer.encode(text, add_special_tokens)


def _encode_chat(
    messages: list[Any], tokenizer: Tokenizer, find_answer: FindAnswer | None
) -> tuple[str, list[int]]:
    for i, message in enumerate(messages):
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or "content" not in message
        ):
            raise RequestError(
                f"chat message {i} is {message!r}; each must be a mapping with 'role' and 'content'"
            )
    try:
        return tokenizer.chat_prompt(messages, find_answer)
    except KVBoostError:
        raise
    except (
        Exception
        # A template is code that comes with the model, so it can raise anything.
    ) as error:
        raise RequestError(f"the model's chat template refused the messages: {error}") from error


class SnapshotFields(RequestFeature):
    """The prompt positions at which snapshots of recurrent state are kept."""

    def __init__(self, tokenizer: Tokenizer, *, is_recurrent: bool) -> None:
        self._tokenizer = tokenizer
        self._is_recurrent = is_recurrent

    def prepare(self, inputs: RequestInputs) -> dict[str, Any]:
        """Return the caller's positions, or by default the starts of the user's messages."""
        if not self._is_recurrent:
            return {}
        hints = inputs.terms.snapshot_hints or user_starts(self._tokenizer, inputs.token_ids)
        return {"snapshot_hints": hints}
