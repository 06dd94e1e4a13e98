"""Texts and log probabilities of tokens, as OpenAI's API writes them."""

from __future__ import annotations

import functools

from kvboost_edge.text.codec import StreamKind
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["TokenTexts", "finite_logprob"]

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


def finite_logprob(logprob: float) -> float:
    """Return the value that JSON output has for a log probability, which may be minus infinity."""
    return max(logprob, _LOWEST)
