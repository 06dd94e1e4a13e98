"""Bad words, sequence breakers and token texts of requests, from the model's vocabulary."""

from __future__ import annotations

import functools
import threading
from typing import Any

from kvboost_edge.engine.request.request import RequestFeature, RequestInputs
from kvboost_edge.engine.request.words import NO_WORDS, Breakers, RequestWords
from kvboost_edge.errors import RequestError
from kvboost_edge.text.codec import StreamKind
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["WordFields"]

_MAX_TAIL = 20  # tokens of a breaker after its first one, as in llama.cpp
_MOST_BREAKERS = 64  # kept, at most about a megabyte
_MOST_LISTS = 16


class WordFields(RequestFeature):
    """The request field with the token ids of bad words and breakers, and the texts of tokens.

    Safe to use from any thread.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._texts: list[bytes] | None = None
        self._reading = threading.Lock()
        self._breaker = functools.lru_cache(_MOST_BREAKERS)(self._find)
        self._breakers = functools.lru_cache(_MOST_LISTS)(self._merge)

    def prepare(self, inputs: RequestInputs) -> dict[str, Any]:
        """Return the request's words.

        Raises:
            RequestError: a bad word has no tokens.
        """
        params = inputs.params
        if not inputs.generates or not params.reads_vocabulary:
            return {"words": NO_WORDS}
        breakers = Breakers()
        if params.uses_dry:
            breakers = self._breakers(params.dry_sequence_breakers)
        texts = self._plain_texts if params.uses_infill else ()
        return {"words": RequestWords(self._bad(params.bad_words), breakers, texts)}

    def _bad(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return each word's tokens as vLLM does, at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = self._tokenizer.encode(word.lstrip(), False)
            spaced = self._tokenizer.encode(f" {word.lstrip()}", False)
            if not bare:
                raise RequestError(
                    f"bad_words holds {word!r}, for which the tokenizer has no tokens; remove it"
                )
            found[tuple(bare)] = None
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                found[tuple(spaced)] = None
        for ids in found:
            if max(ids) >= self._vocab_size:
                raise RequestError(
                    f"bad_words needs token id {max(ids)}, which the model does not produce; "
                    "remove words with special tokens"
                )
        return tuple(found)

    def _merge(self, texts: tuple[str, ...]) -> Breakers:
        parts = [self._breaker(text) for text in texts]
        begun: dict[int, tuple[tuple[int, ...], ...]] = {}
        for part in parts:
            for token, tails in part.begun.items():
                begun[token] = tuple(dict.fromkeys((*begun.get(token, ()), *tails)))
        return Breakers(frozenset().union(*(part.alone for part in parts)), begun)

    def _find(self, text: str) -> Breakers:
        """Find the tokens that contain a breaker or end with its beginning."""
        wanted = text.encode()
        first = wanted[:1]
        alone = set()
        begun: dict[int, tuple[tuple[int, ...], ...]] = {}
        for token, piece in enumerate(self._token_texts()):
            if wanted in piece:
                alone.add(token)
                continue
            if len(wanted) == 1 or first not in piece:
                continue
            tails: dict[tuple[int, ...], None] = {}
            for size in range(1, min(len(wanted), len(piece) + 1)):
                if piece.endswith(wanted[:size]):
                    rest = wanted[size:].decode(errors="ignore")
                    tails[tuple(self._tokenizer.encode(rest, False)[:_MAX_TAIL])] = None
            if () in tails:
                alone.add(token)
            elif tails:
                begun[token] = tuple(tails)
        return Breakers(frozenset(alone), begun)

    @functools.cached_property
    def _plain_texts(self) -> tuple[bytes, ...]:
        """The text of each token, empty for special tokens."""
        texts = list(self._token_texts())
        codec = self._tokenizer.codec
        for special in map(codec.token_id, codec.special_texts()[0]):
            if special is not None and special < len(texts):
                texts[special] = b""
        return tuple(texts)

    def _token_texts(self) -> list[bytes]:
        """Return the text of each token. Reading them takes a fraction of a second."""
        with self._reading:
            if self._texts is None:
                codec = self._tokenizer.codec
                size = min(codec.vocab_size, self._vocab_size)
                if codec.stream_kind is StreamKind.BYTES:
                    self._texts = [codec.token_bytes(token) for token in range(size)]
                else:
                    self._texts = [codec.piece((token,)).encode() for token in range(size)]
            return self._texts
