"""Codecs: adapters for the two kinds of tokenizer that `Tokenizer` wraps.

A codec's `decode` is the reference for its text. `stream_kind` states how the same text can be
produced token by token:

    BYTES   Each token is a run of bytes, and the text is the concatenated bytes read as UTF-8
            (byte-level BPE). See `token_bytes`.
    PIECES  Each token except the first has a fixed text, independent of its neighbours
            (sentencepiece, wordpiece). See `piece`. Byte tokens such as `<0xE4>` have text only
            as a complete run. See `joins_run`.
    WHOLE   No text is final until all tokens are known.
"""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Sequence
from typing import Any, Protocol

import tokenizers

from kvboost_edge.errors import ConfigError, RequestError

__all__ = ["FastCodec", "SimpleCodec", "StreamKind", "TextCodec"]

_MAX_ID = 1 << 32
_LONGEST_ANCHOR = 32  # characters; every vocabulary contains shorter tokens
_LONG_TEXT = 4096  # characters or tokens; shorter input takes only a few milliseconds


class StreamKind(enum.Enum):
    """Method of decoding token by token, described in the module docstring."""

    BYTES = "bytes"
    PIECES = "pieces"
    WHOLE = "whole"


class TextCodec(Protocol):
    """Interface of a tokenizer, used by `Tokenizer` and the incremental detokenizer."""

    vocab_size: int
    stream_kind: StreamKind

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def encode_apart(self, texts: Sequence[str]) -> list[int]:
        """Encode consecutive texts separately, without special tokens.

        Returns:
            The concatenated ids. No token spans two texts.
        """
        ...

    def special_texts(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the texts that `encode` turns into special tokens.

        Returns:
            The texts matched exactly, and the texts matched case-insensitively.
        """
        ...

    def added_texts(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the texts of non-special added tokens, in the same form as `special_texts`."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of the ids. Unknown ids are ignored."""
        ...

    def token_id(self, text: str) -> int | None: ...

    def marker_id(self, text: str) -> int | None:
        """Return the id of the token with exactly this text if grammars treat it as special."""
        ...

    def has_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Return whether `decode` writes text for the token.

        Unknown tokens and skipped special tokens have no text.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def joins_run(self, token_id: int) -> bool:
        """Return whether the token has text only together with its neighbours."""
        ...

    def piece(self, ids: Sequence[int]) -> str:
        """Return the text that these ids add when they follow other text."""
        ...


class FastCodec:
    """Codec for a `tokenizers.Tokenizer`. It disables the tokenizer's truncation and padding."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab_size = int(tokenizer.get_vocab_size(with_added_tokens=True))
        special = {
            i: token for i, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._special = set(special)
        added = tokenizer.get_added_tokens_decoder().items()
        # llguidance treats all added tokens in angle brackets as special, whatever the tokenizer's
        # file says.
        self._markers = {
            token.content: i for i, token in added if token.special or _is_tag(token.content)
        }
        self._separator = next(
            (token.content for token in special.values() if _stands_alone(token)), None
        )
        self._pieces: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}  # cached by token id
        chain = _decoder_chain(tokenizer)
        self._byte_fallback = any(step["type"] == "ByteFallback" for step in chain)
        self._anchor: list[int] = []
        self._anchor_chars = 0
        self.stream_kind = _stream_kind(chain)
        if self.stream_kind is StreamKind.PIECES and not self._find_anchor():
            self.stream_kind = StreamKind.WHOLE

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            if len(text) > _LONG_TEXT:
                # Only the batch API releases the GIL, which keeps a server's event loop responsive.
                encoding = self._tokenizer.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )[0]
            else:
                encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"text is not valid Unicode: {error}") from error
        # Not copied, because copying millions of ids would block other threads.
        ids: list[int] = encoding.ids
        return ids

    def encode_apart(self, texts: Sequence[str]) -> list[int]:
        # Joined with special tokens, which are removed afterwards. Some tokenizers add a space at
        # the beginning of a text, so separate calls would give other ids.
        between = self._separator
        if between is None:
            return [token_id for text in texts for token_id in self.encode(text, False)]
        text = between.join(texts)
        try:
            encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"text is not valid Unicode: {error}") from error
        borders: set[int] = set()
        end = 0
        for part in texts[:-1]:
            borders.add(end + len(part))
            end += len(part) + len(between)
        separator = self.token_id(between)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [
            token_id
            for token_id, (start, _) in pairs
            if not (token_id == separator and start in borders)
        ]

    def special_texts(self) -> tuple[frozenset[str], frozenset[str]]:
        return self._added_texts(special=True)

    def added_texts(self) -> tuple[frozenset[str], frozenset[str]]:
        return self._added_texts(special=False)

    def _added_texts(self, *, special: bool) -> tuple[frozenset[str], frozenset[str]]:
        found = [
            token
            for token in self._tokenizer.get_added_tokens_decoder().values()
            if token.special is special
        ]
        exact = frozenset(token.content for token in found)
        return exact, frozenset(token.content for token in found if token.normalized)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [int(i) for i in ids if 0 <= i < _MAX_ID]
        if len(known) > _LONG_TEXT:
            return str(
                self._tokenizer.decode_batch([known], skip_special_tokens=skip_special_tokens)[0]
            )
        return str(self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens))

    def to_json(self) -> str:
        """Return the whole tokenizer in the format of tokenizer.json."""
        return str(self._tokenizer.to_str())

    def token_id(self, text: str) -> int | None:
        found = self._tokenizer.token_to_id(text)
        return None if found is None else int(found)

    def marker_id(self, text: str) -> int | None:
        return self._markers.get(text)

    def has_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        if skip_special_tokens and token_id in self._special:
            return False
        return token_id in self._bytes or self._token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            token = self._token(token_id)
            if token is None:
                return b""
            known = self._bytes[token_id] = _byte_level_bytes(token)
        return known

    def joins_run(self, token_id: int) -> bool:
        if not self._byte_fallback:
            return False
        token = self._token(token_id) or ""
        return len(token) == 6 and token.startswith("<0x") and token.endswith(">")

    def piece(self, ids: Sequence[int]) -> str:
        if len(ids) != 1:
            return self._behind_anchor(ids)
        known = self._pieces.get(ids[0])
        if known is None:
            known = self._pieces[ids[0]] = self._behind_anchor(ids)
        return known

    def _token(self, token_id: int) -> str | None:
        if not 0 <= token_id < _MAX_ID:
            return None
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def _behind_anchor(self, ids: Sequence[int]) -> str:
        return self.decode([*self._anchor, *ids], False)[self._anchor_chars :]

    def _find_anchor(self) -> bool:
        """Find a token of plain letters to decode other tokens after; return whether one exists.

        The anchor is needed because the first token of a text is decoded differently.
        """
        for token_id in range(min(self.vocab_size, 100_000)):
            token = self._token(token_id)
            if (
                token
                and len(token) <= _LONGEST_ANCHOR
                and token.isascii()
                and token.isalpha()
                and token_id not in self._special
            ):
                text = self.decode([token_id], False)
                if text.isalpha() and self.decode([token_id, token_id], False).startswith(text):
                    self._anchor = [token_id]
                    self._anchor_chars = len(text)
                    return True
        return False


class SimpleCodec:
    """Codec for any object with `encode(text)` and `decode(ids)` that decodes token by token.

    A sample of token pairs is decoded first.

    Raises:
        ConfigError: a method is missing, or a pair does not decode to the texts of its tokens.
    """

    stream_kind = StreamKind.PIECES

    def __init__(self, tokenizer: Any) -> None:
        name = type(tokenizer).__name__
        if not callable(getattr(tokenizer, "encode", None)) or not callable(
            getattr(tokenizer, "decode", None)
        ):
            raise ConfigError(f"tokenizer of type {name} has no encode and decode methods")
        size = getattr(tokenizer, "vocab_size", None)
        self.vocab_size = int(size if isinstance(size, int) else len(tokenizer))
        self._tokenizer = tokenizer
        self._check_pairs(name)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TypeError:
            ids = self._tokenizer.encode(text)
        return [int(i) for i in ids]

    def encode_apart(self, texts: Sequence[str]) -> list[int]:
        return [token_id for text in texts for token_id in self.encode(text, False)]

    def special_texts(self) -> tuple[frozenset[str], frozenset[str]]:
        texts = getattr(self._tokenizer, "all_special_tokens", ())
        return frozenset(text for text in texts if isinstance(text, str)), frozenset()

    def added_texts(self) -> tuple[frozenset[str], frozenset[str]]:
        return frozenset(), frozenset()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [int(i) for i in ids if 0 <= i < self.vocab_size]
        try:
            return str(self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens))
        except TypeError:
            return str(self._tokenizer.decode(known))

    def token_id(self, text: str) -> int | None:
        convert = getattr(self._tokenizer, "convert_tokens_to_ids", None)
        found = convert(text) if callable(convert) else None
        return int(found) if isinstance(found, int) else None

    def marker_id(self, text: str) -> int | None:
        return None  # Grammars need a FastCodec.

    def has_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        return 0 <= token_id < self.vocab_size and bool(
            self.decode([token_id], skip_special_tokens)
        )

    def token_bytes(self, token_id: int) -> bytes:
        return self.piece([token_id]).encode()

    def joins_run(self, token_id: int) -> bool:
        return False

    def piece(self, ids: Sequence[int]) -> str:
        return self.decode(ids, False)

    def _check_pairs(self, name: str) -> None:
        step = max(1, self.vocab_size // 24)
        sample = range(0, self.vocab_size, step)
        texts = {i: self.decode([i], False) for i in sample}
        for i in sample:
            for j in sample:
                if "\ufffd" in texts[i] or self.decode([i, j], False) != texts[i] + texts[j]:
                    raise ConfigError(
                        f"tokenizer of type {name} cannot be streamed: tokens {i} and {j} do not "
                        "decode independently; use a fast tokenizer (AutoTokenizer with the "
                        "tokenizers library)"
                    )


def _is_tag(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")


def _stands_alone(token: tokenizers.AddedToken) -> bool:
    """Return whether an added token matches in any text without affecting its neighbours."""
    return not (token.lstrip or token.rstrip or token.single_word or token.normalized)


def _decoder_chain(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the decoder's steps in order, or an empty list without a decoder."""
    if tokenizer.decoder is None:
        return []
    return _flatten(json.loads(tokenizer.decoder.__getstate__()))


def _flatten(spec: dict[str, Any]) -> list[dict[str, Any]]:
    if spec["type"] == "Sequence":
        return [step for inner in spec["decoders"] for step in _flatten(inner)]
    return [spec]


def _stream_kind(chain: list[dict[str, Any]]) -> StreamKind:
    kinds = [step["type"] for step in chain]
    if kinds == ["ByteLevel"]:
        return StreamKind.BYTES
    if not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}:
        return StreamKind.WHOLE
    # After Fuse all tokens are one string. Only stripping its start leaves later tokens unchanged.
    behind_fuse = kinds[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []
    if any(kind not in ("Strip", "Fuse") for kind in behind_fuse):
        return StreamKind.WHOLE
    if any(step["type"] == "Strip" and step["stop"] for step in chain):
        return StreamKind.WHOLE
    return StreamKind.PIECES


def _byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token.

    A token with a character outside the byte alphabet stands for its own text.
    """
    table = _byte_alphabet()
    try:
        return bytes(table[char] for char in token)
    except KeyError:
        return token.encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's mapping from characters to bytes.

    Printable Latin-1 characters map to themselves. The characters from 256 on map to all other
    bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table
