"""Encoding of a rendered chat that reuses the generated token ids of assistant messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["FindAnswer", "encode_with_answers"]

FindAnswer = Callable[[str], list[int] | None]
"""Function that returns the generated token ids of an answer with exactly this text.

It returns None if the ids are not stored.
"""


class Encoder(Protocol):
    """Tokenizer methods that this module needs."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def encode_with_answers(
    text: str, answers: Sequence[str], tokenizer: Encoder, find: FindAnswer
) -> list[int]:
    """Encode a rendered chat, with the stored ids of answers that occur exactly once.

    If the result would decode to another text than a plain encoding, the plain encoding is
    returned.

    Args:
        text: the rendered chat.
        answers: texts of the assistant's messages, in the order of the chat.
        tokenizer: encodes the text between the answers.
        find: returns the stored ids of an answer.
    """
    own = tokenizer.encode(text, add_special_tokens=False)
    ids: list[int] = []
    done = 0
    for answer in answers:
        kept = find(answer) if answer and text.count(answer) == 1 else None
        at = text.find(answer, done)
        if kept is None or at < 0 or tokenizer.decode(kept, skip_special_tokens=False) != answer:
            continue
        ids += tokenizer.encode(text[done:at], add_special_tokens=False) if at > done else []
        ids += kept
        done = at + len(answer)
    if not done:
        return own
    ids += tokenizer.encode(text[done:], add_special_tokens=False) if done < len(text) else []
    same = tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.decode(
        own, skip_special_tokens=False
    )
    return ids if same else own
