"""Incremental detokenizer that returns only text which later tokens cannot change."""

from __future__ import annotations

import codecs

from kvboost_edge.text.codec import StreamKind, TextCodec
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]


class IncrementalDetokenizer:
    """Detokenizer for a growing list of token ids.

    The returned texts, concatenated, equal `tokenizer.decode(all ids)`. Text that a later token may
    still change, such as half a character, is held back. The work per token is independent of the
    text's length.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._codec = tokenizer.codec
        self._skip = skip_special_tokens
        self._stream = _STREAMS[self._codec.stream_kind](self._codec)

    def push(self, token_id: int) -> str:
        """Add the next token and return the text that is now final, often an empty string."""
        token_id = int(token_id)
        return self._stream.push(token_id) if self._codec.has_text(token_id, self._skip) else ""

    def flush(self) -> str:
        """Return the text that is still held back, and reset the detokenizer."""
        return self._stream.flush()


class _ByteStream:
    """Stream of byte-level tokens, decoded as UTF-8. Incomplete characters are held back."""

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
    """Stream of tokens that each have a fixed text.

    The first tokens are decoded together until they give text, because their leading space is
    removed. A run of byte tokens is decoded together when it ends, because one invalid byte changes
    the whole run.
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
    """Stream whose text is only known at the end."""

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
