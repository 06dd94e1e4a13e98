"""Token ids of generated answers by their text, which keep the next turn of a chat cached.

A model may generate a text with different tokens than the tokenizer would produce. Encoding the
answer's text again then gives tokens that differ from the cached ones, and everything after them
misses the cache. The ids of answers are therefore kept in memory. They replace the ids of a message
whose text equals an answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvboost_edge.host.tenant_lru import TenantLRU

__all__ = ["AnswerStore", "KeptAnswers"]

_ENTRY_BYTES = 300  # estimated size of the Python objects for one text and its ids


class AnswerStore:
    """A thread-safe store of answers' token ids by root (tenant and salt) and text.

    `TenantLRU` limits its size. 1 MiB holds a few thousand answers of a root.
    """

    def __init__(self) -> None:
        self._kept: TenantLRU[array[int]] = TenantLRU()

    def keep(self, owner: bytes, root: bytes, text: str, token_ids: Sequence[int]) -> None:
        """Store the token ids of a text, replacing earlier ones.

        Args:
            owner: root of the tenant without a salt.
            root: root of the tenant and salt.
        """
        entry = array("I", token_ids)
        if text and entry:
            size = 4 * len(text) + entry.itemsize * len(entry) + _ENTRY_BYTES
            self._kept.keep(owner, root, text, entry, size)

    def find(self, root: bytes, text: str) -> list[int] | None:
        """Return the ids of an answer with exactly this text, or None."""
        found = self._kept.find(root, text)
        return None if found is None else found.tolist()

    def forget(self, *roots: bytes) -> None:
        """Remove all answers of these roots."""
        self._kept.forget(*roots)


class KeptAnswers(NamedTuple):
    """The answers of one root.

    Attributes:
        owner: root of the tenant without a salt.
        root: root of the tenant and salt.
    """

    store: AnswerStore
    owner: bytes
    root: bytes

    def find(self, text: str) -> list[int] | None:
        """Return the ids of an answer with exactly this text, or None."""
        return self.store.find(self.root, text)

    def keep(self, text: str, token_ids: Sequence[int]) -> None:
        """Store the ids of a partial output. Whole outputs are stored already."""
        self.store.keep(self.owner, self.root, text, token_ids)
