"""Message boundaries: positions where user messages begin, and the prefix that chats share.

Other prompts may share the text before a boundary.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import MutableMapping, Sequence

import numpy as np

from kvboost_edge.errors import RequestError
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["system_prefix", "user_starts"]

# Message contents that occur in no template.
_FIRST = "aqxj"
_SECOND = "bqxj"
_ANSWER = "cqxj"
# Weak references, because a server loads and unloads models.
_HEADERS: MutableMapping[Tokenizer, tuple[str | None, tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)


def user_starts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the positions where the chat template begins user messages, in ascending order.

    User messages follow the system message with its tools, or an answer. The result is empty if the
    model has no template or user messages do not begin with a special token.
    """
    header = _user_header(tokenizer)
    if not header or len(token_ids) < len(header):
        return ()
    ids = np.asarray(token_ids, np.int64)
    found = np.ones(len(ids) - len(header) + 1, bool)
    for offset, token_id in enumerate(header):
        found &= ids[offset : offset + len(found)] == token_id
    return tuple(np.flatnonzero(found).tolist())


def system_prefix(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids that all chats with the system message `text` begin with.

    Chats with tools may begin differently.

    Raises:
        RequestError: the model has no chat template, or it refuses system messages.
    """
    first, second = (
        tokenizer.encode_chat(
            [{"role": "system", "content": text}, {"role": "user", "content": user}]
        )
        for user in (_FIRST, _SECOND)
    )
    pairs = zip(first, second, strict=False)
    return [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _user_header(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the result of `_read_header`, cached per tokenizer and chat template."""
    template = tokenizer.chat_template
    found = _HEADERS.get(tokenizer)
    if found is None or found[0] != template:
        found = _HEADERS[tokenizer] = template, _read_header(tokenizer)
    return found[1]


def _read_header(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that begin each user message, from a special token on.

    Trailing whitespace is omitted, because the tokenizer may merge it with the text that follows.
    """
    messages = [
        {"role": "user", "content": _FIRST},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _SECOND},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, False)
    except RequestError:  # no template, or it rejects these messages
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
