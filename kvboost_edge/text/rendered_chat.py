"""Token ids of a rendered chat that reuse the generated ids of assistant messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["FindAnswer", "encode_with_answers"]

FindAnswer = Callable[[str], list[int] | None]
"""Function that returns the token ids that an answer of this exact text was generated with, or None
if they are not kept.
"""


class Encoder(Protocol):
    """Interface of the tokenizer that this module uses."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def encode_with_answers(
    text: str, answers: Sequence[str], tokenizer: Encoder, find: FindAnswer
) -> list[int]:
    """Return the token ids of a rendered chat, with stored ids for answers that occur exactly once.

    The result decodes to the same text as the tokenizer's own ids. If it would not, the tokenizer's
    own ids are returned.

    Args:
        answers: texts of the assistant's messages, in the order of the chat.
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
