"""Where the user's messages begin in a prompt: what stands before may be the beginning of other
prompts too.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import MutableMapping, Sequence

import numpy as np

from kvboost_edge.errors import RequestError
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["user_starts"]

# contents that no template writes by itself
_FIRST = "aqxj"
_SECOND = "bqxj"
_ANSWER = "cqxj"
# Weakly: a server's models come and go.
_HEADERS: MutableMapping[Tokenizer, tuple[int, ...]] = weakref.WeakKeyDictionary()


def user_starts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Positions at which the chat template begins messages of the user, ascending: behind system
    message and tools, and behind each answer. None for a model without a template, or one that
    begins them with no special token.
    """
    header = _user_header(tokenizer)
    if not header or len(token_ids) < len(header):
        return ()
    ids = np.asarray(token_ids, np.int64)
    found = np.ones(len(ids) - len(header) + 1, bool)
    for offset, token_id in enumerate(header):
        found &= ids[offset : offset + len(found)] == token_id
    return tuple(np.flatnonzero(found).tolist())


def _user_header(tokenizer: Tokenizer) -> tuple[int, ...]:
    """As `_read_header`, once for each tokenizer."""
    found = _HEADERS.get(tokenizer)
    if found is None:
        found = _HEADERS[tokenizer] = _read_header(tokenizer)
    return found


def _read_header(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens with which each message of the user begins, from a special one on; without white
    space at the end, as that may be one token with what follows.
    """
    messages = [
        {"role": "user", "content": _FIRST},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _SECOND},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, False)
    except RequestError:  # there is no template, or it wants other messages
        return ()
    before, _, rest = text.partition(_FIRST)
    _, found, behind = rest.partition(_ANSWER)
    between = behind.partition(_SECOND)[0]
    if not found or _SECOND not in behind:
        return ()
    pairs = zip(reversed(before), reversed(between), strict=False)
    length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    common = between[len(between) - length :].rstrip()
    specials = [
        place
        for special in tokenizer.codec.special_texts()[0]
        if (place := common.find(special)) >= 0
    ]
    return tuple(tokenizer.encode(common[min(specials) :], False)) if specials else ()
