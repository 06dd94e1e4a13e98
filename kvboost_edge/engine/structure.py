"""Answers that fit: tokens that would leave a JSON schema, a regular expression or a grammar are never chosen.

The parser is llguidance (extra [structured]), which says after each token which ones may follow. Each sequence has its
own, moved on by the tokens it keeps: what is guessed ahead is masked and sampled row by row like any other token, so
nothing is ever taken back. Where only one text can follow, its tokens are proposed as drafts.
"""

from __future__ import annotations

import importlib.util
import threading
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.grammars import Grammar
from kvboost_edge.errors import BackendUnavailable, KVBoostError, RequestError
from kvboost_edge.text.codec import FastCodec
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.lark import JSON_SPACE

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

__all__ = ["Structure", "Structures"]

Floats = npt.NDArray[np.float32]

_WORD = 32
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": JSON_SPACE}
_NOT_INSTALLED = "needs the package llguidance: pip install 'kvboost-edge[structured]'"


class Structure:
    """The parser of one sequence."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = np.empty(-(-vocab_size // _WORD), np.int32)

    def masked(self, logits: Floats) -> Floats:
        """The logits [vocab_size] with those of tokens that cannot follow at -inf, a copy."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little", count=len(logits))
        return np.where(bits.view(np.bool_), logits, np.float32(-np.inf))

    def advance(self, token_id: int) -> bool:
        """A token was chosen; whether nothing can follow it but the end."""
        if not self._matcher.consume_token(token_id):
            self._check()
        return self._matcher.is_stopped()

    def forced(self) -> list[int]:
        """Tokens that follow in any case; none where their text can be cut into tokens in several ways."""
        return [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise KVBoostError(f"the answer cannot be kept to its grammar: {_first_line(self._matcher.get_error())}")


class Structures:
    """Makes the parsers of an engine's sequences. Safe to use from any thread.

    The vocabulary is read once, when it is first needed: a second for one of 150,000 tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._known: LLTokenizer | None = None

    def make(self, grammar: Grammar) -> Structure:
        """A parser at its beginning. RequestError where the grammar is not sound, uses what is not supported or is too
        large; BackendUnavailable without the package."""
        if importlib.util.find_spec("llguidance") is None:
            raise BackendUnavailable(f"{grammar.kind}= {_NOT_INSTALLED}")
        from llguidance import LLMatcher, grammar_from

        tokenizer = self._vocabulary()
        try:
            if grammar.kind == "json_schema":
                text = LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON_OPTIONS)
            else:
                text = grammar_from(grammar.kind, grammar.text)  # type: ignore[arg-type]
        except ValueError as error:
            raise RequestError(f"{grammar.kind} is not understood: {_first_line(str(error))}") from None
        matcher = LLMatcher(tokenizer, text, log_level=0)
        if matcher.is_error():
            raise RequestError(f"{grammar.kind} is not supported: {_first_line(matcher.get_error())}")
        return Structure(matcher, self._vocab_size)

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._known is None:
                self._known = self._read()
            return self._known

    def _read(self) -> LLTokenizer:
        codec = self._tokenizer.codec
        if not isinstance(codec, FastCodec):
            raise RequestError(
                "answers that fit a grammar need the bytes of all tokens, which this tokenizer does not tell; use a "
                "model with a tokenizer.json"
            )
        known = [token_id for token_id in self._eos if token_id < codec.vocab_size]
        if not known:
            raise RequestError(
                "answers that fit a grammar need an end-of-sequence token, and the model names none that its tokenizer "
                "has"
            )
        from llguidance import LLTokenizer

        return LLTokenizer(codec.to_json(), n_vocab=self._vocab_size, eos_token=known)


def _first_line(text: str) -> str:
    """What people need of an error's text."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[:500]
