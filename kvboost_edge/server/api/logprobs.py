"""Log probabilities in OpenAI's formats: parallel lists for completions, objects for chat."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from kvboost_edge.engine.request.results import TokenLogprobs
from kvboost_edge.server.response_types import (
    ChatLogprobs,
    ChatToken,
    ChatTokenAndOthers,
    CompletionLogprobs,
)
from kvboost_edge.text.codec import StreamKind
from kvboost_edge.text.detokenizer import IncrementalDetokenizer
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = [
    "OffsetCounter",
    "TokenTexts",
    "chat_logprobs",
    "completion_logprobs",
    "finite_logprob",
]

# JSON has no minus infinity. OpenAI's API returns this value for probability 0.
_LOWEST = -9999.0


class TokenTexts:
    """Cache of token texts in OpenAI's format, for one request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes | None] = {}

    def raw(self, token_id: int) -> bytes | None:
        """Return the token's bytes; None if they depend on neighbouring tokens."""
        if token_id not in self._bytes:
            codec = self._tokenizer.codec
            if codec.stream_kind is StreamKind.BYTES:
                self._bytes[token_id] = codec.token_bytes(token_id)
            else:
                self._bytes[token_id] = (
                    None if codec.joins_run(token_id) else codec.piece((token_id,)).encode()
                )
        return self._bytes[token_id]

    def piece(self, token_id: int) -> str | list[int]:
        """Return the token's text, or its bytes if it has only part of a character."""
        raw = self.raw(token_id)
        if raw is None:
            byte = self._fallback_bytes.get(token_id)
            raw = self.text(token_id).encode() if byte is None else bytes([byte])
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return list(raw)

    @functools.cached_property
    def _fallback_bytes(self) -> dict[int | None, int]:
        """Bytes of the tokens for single bytes, by token id."""
        return {self._tokenizer.codec.token_id(f"<0x{byte:02X}>"): byte for byte in range(256)}

    def text(self, token_id: int) -> str:
        """Return the token's text, with U+FFFD in place of incomplete characters."""
        raw = self.raw(token_id)
        if raw is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        return raw.decode("utf-8", "replace")

    def key(self, token_id: int) -> str:
        r"""Return the token's text as a unique key.

        Tokens with incomplete characters have keys such as `bytes:\xe2\x80`.
        """
        raw = self.raw(token_id)
        if raw is None:
            return self.text(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


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


def finite_logprob(logprob: float) -> float:
    """Return the value that JSON output has for a log probability, which may be minus infinity."""
    return max(logprob, _LOWEST)
