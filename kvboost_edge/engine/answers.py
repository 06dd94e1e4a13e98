"""The token ids of answers, beside their text: a chat's next turn then finds its last one in the cache.

A model need not write a text with the tokens that the tokenizer makes of it. Encoded anew, such an answer differs from
what was computed, and all behind it misses the cache. So the ids are kept, in memory only, and take the place of the
message's own where its text is the answer's, to the character.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["AnswerStore", "KeptAnswers"]

_MAX_BYTES = 1 << 20  # of one root: some thousand answers
_MAX_ROOTS = 64
_ENTRY_BYTES = 300  # about what Python's objects take around a text and its ids


class _Answers:
    """Of one root, the least recently used first."""

    def __init__(self) -> None:
        self.by_text: OrderedDict[str, array[int]] = OrderedDict()
        self.num_bytes = 0


class AnswerStore:
    """One store per root (tenant and salt), each bounded in bytes, the number of roots bounded too. What one root keeps
    no other can find. Safe to use from any thread."""

    def __init__(self, max_bytes: int = _MAX_BYTES, max_roots: int = _MAX_ROOTS) -> None:
        self._max_bytes, self._max_roots = max_bytes, max_roots
        self._roots: OrderedDict[bytes, _Answers] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, root: bytes, text: str, token_ids: Sequence[int]) -> None:
        """Remember what a text was written with; the latest counts."""
        entry = array("I", token_ids)
        size = _size(text, entry)
        if not text or not entry or size > self._max_bytes:
            return
        with self._lock:
            answers = self._roots.setdefault(root, _Answers())
            self._roots.move_to_end(root)
            if len(self._roots) > self._max_roots:
                self._roots.popitem(last=False)
            old = answers.by_text.pop(text, None)
            answers.num_bytes += size - (0 if old is None else _size(text, old))
            answers.by_text[text] = entry
            while answers.num_bytes > self._max_bytes:
                answers.num_bytes -= _size(*answers.by_text.popitem(last=False))

    def find(self, root: bytes, text: str) -> list[int] | None:
        """The ids of an answer of exactly this text, or None."""
        with self._lock:
            answers = self._roots.get(root)
            entry = None if answers is None else answers.by_text.get(text)
            if answers is None or entry is None:
                return None
            self._roots.move_to_end(root)
            answers.by_text.move_to_end(text)
            return entry.tolist()

    def forget(self, *roots: bytes) -> None:
        """Forget all answers of these roots."""
        with self._lock:
            for root in roots:
                self._roots.pop(root, None)


class KeptAnswers(NamedTuple):
    """The part of a store that belongs to one root."""

    store: AnswerStore
    root: bytes

    def find(self, text: str) -> list[int] | None:
        """The ids an answer of exactly this text was generated with, or None."""
        return self.store.find(self.root, text)

    def keep(self, text: str, token_ids: Sequence[int]) -> None:
        """Remember what a text was written with, where it is not the whole of an output: those are kept already."""
        self.store.keep(self.root, text, token_ids)


def _size(text: str, token_ids: array[int]) -> int:
    return 4 * len(text) + token_ids.itemsize * len(token_ids) + _ENTRY_BYTES
