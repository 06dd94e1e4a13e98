"""Log probabilities in OpenAI's formats: parallel lists for completions, objects for chat."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost_edge.engine.request.results import TokenLogprobs
from kvboost_edge.server.response_types import (
    ChatLogprobs,
    ChatToken,
    ChatTokenAndOthers,
    CompletionLogprobs,
)
from kvboost_edge.text.detokenizer import IncrementalDetokenizer
from kvboost_edge.text.token_texts import TokenTexts, finite_logprob
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = [
    "OffsetCounter",
    "chat_logprobs",
    "completion_logprobs",
]


class OffsetCounter:
    """Counter of token offsets in a text, in characters."""

    def __init__(self, tokenizer: Tokenizer, start: int, *, skip_special: bool = True) -> None:
        """Create a counter.

        Args:
            tokenizer: tokenizer of the model.
            start: offset of the first token.
            skip_special: whether special tokens count as empty text.
        """
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special)
        self._position = start

    def add(self, token_id: int) -> int:
        """Return the offset of the next token."""
        # The characters of a token count once they are complete.
        position = self._position
        self._position += len(self._detokenizer.push(token_id))
        return position


def chat_logprobs(texts: TokenTexts, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Return the `logprobs` member of a chat choice."""
    content: list[ChatTokenAndOthers] = []
    for token in tokens:
        top = [_chat_token(texts, token_id, logprob) for token_id, logprob in token.top]
        content.append({**_chat_token(texts, token.token_id, token.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    texts: TokenTexts,
    ids: Sequence[int],
    tokens: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
) -> CompletionLogprobs:
    """Return the `logprobs` member of a completion choice.

    The entry of a prompt's first token is None.
    """
    return {
        "tokens": [texts.key(token_id) for token_id in ids],
        "token_logprobs": [
            None if token is None else finite_logprob(token.logprob) for token in tokens
        ],
        "top_logprobs": [None if token is None else _top(texts, token) for token in tokens],
        "text_offset": list(offsets),
    }


def _chat_token(texts: TokenTexts, token_id: int, logprob: float) -> ChatToken:
    raw = texts.raw(token_id)
    return {
        "token": texts.text(token_id),
        "logprob": finite_logprob(logprob),
        "bytes": None if raw is None else list(raw),
    }


def _top(texts: TokenTexts, token: TokenLogprobs) -> dict[str, float]:
    """Return the log probabilities of the most likely tokens and of the sampled one."""
    pairs = {
        texts.key(token_id): finite_logprob(logprob) for token_id, logprob in reversed(token.top)
    }
    shown = dict(reversed(pairs.items()))
    shown.setdefault(texts.key(token.token_id), finite_logprob(token.logprob))
    return shown
