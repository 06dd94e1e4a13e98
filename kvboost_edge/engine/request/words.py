"""Words of a request as token ids of the model, for the samplers that need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["NO_WORDS", "Breakers", "RequestWords"]


class Breakers(NamedTuple):
    """DRY's sequence breakers in tokens.

    Attributes:
        alone: tokens whose text contains a breaker.
        begun: tokens whose text ends with the beginning of a breaker, each with the token runs that
            complete the breaker after it.
    """

    alone: frozenset[int] = frozenset()
    begun: Mapping[int, tuple[tuple[int, ...], ...]] = {}


class RequestWords(NamedTuple):
    """Bad words and sequence breakers of a request.

    Attributes:
        bad: token ids of each bad word, in the spellings that the tokenizer has for it.
        breakers: DRY's sequence breakers.
        texts: text of each token for the sampler infill, empty for special tokens; () without it.
    """

    bad: tuple[tuple[int, ...], ...] = ()
    breakers: Breakers = Breakers()
    texts: tuple[bytes, ...] = ()


NO_WORDS = RequestWords()
