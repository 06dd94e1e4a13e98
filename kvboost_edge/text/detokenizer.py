"""Incremental detokenizer: returns only text that later tokens cannot change."""

from __future__ import annotations

import codecs

from kvboost_edge.text.codec import StreamKind, TextCodec
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]


class IncrementalDetokenizer:
    """Text of a growing list of token ids.

    All returned text, joined, equals `tokenizer.decode(all ids)`. Text that a later token may still
    change, such as half a character, is held back. Work per token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._codec = tokenizer.codec
        self._skip = skip_special_tokens
        self._stream = _STREAMS[self._codec.stream_kind](self._codec)

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain, which is often empty."""
        token_id = int(token_id)
        return self._stream.push(token_id) if self._codec.has_text(token_id, self._skip) else ""

    def flush(self) -> str:
        """Return the text still held back, and reset the detokenizer."""
        return self._stream.flush()


class _ByteStream:
    """Byte-level tokens, read as UTF-8. The bytes of an incomplete character are held back."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._held = b""

    def push(self, token_id: int) -> str:
        data = self._held + self._codec.token_bytes(token_id)
        text, num_read = codecs.utf_8_decode(data, "replace", False)
        self._held = data[num_read:]
        return text

    def flush(self) -> str:
        held = self._held
        self._held = b""
        return held.decode(errors="replace")


class _PieceStream:
    """Tokens with a text each.

    The first tokens are decoded as a whole until they give text, because leading space is removed
    there. A run of byte tokens is decoded as a whole when it ends, because one invalid byte changes
    all of it.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._held: list[int] = []
        self._begun = False

    def push(self, token_id: int) -> str:
        if self._codec.joins_run(token_id):
            self._held.append(token_id)
            return ""
        if self._begun:
            run = self._held
            self._held = []
            before = self._codec.piece(run) if run else ""
            return before + self._codec.piece((token_id,))
        self._held.append(token_id)
        text = self._codec.decode(self._held, False)
        if text:
            self._held = []
            self._begun = True
        return text

    def flush(self) -> str:
        held = self._held
        begun = self._begun
        self._held = []
        self._begun = False
        if not held:
            return ""
        return self._codec.piece(held) if begun else self._codec.decode(held, False)


class _WholeText:
    """Text that is not certain before the end."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        return ""

    def flush(self) -> str:
        held = self._held
        self._held = []
        return self._codec.decode(held, False)


_STREAMS: dict[StreamKind, type[_ByteStream] | type[_PieceStream] | type[_WholeText]] = {
    StreamKind.BYTES: _ByteStream,
    StreamKind.PIECES: _PieceStream,
    StreamKind.WHOLE: _WholeText,
}
