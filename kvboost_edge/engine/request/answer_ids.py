"""Token ids of generated answers by their text, so that a chat's next turn finds them in the cache.

A model need not write a text with the tokens that the tokenizer makes of it. Encoded anew, such an
answer differs from what was computed, and all behind it misses the cache. So the ids are kept, in
memory only, and take the place of the message's own where its text is the answer's, to the
character.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvboost_edge.host.tenant_lru import TenantLRU

__all__ = ["AnswerStore", "KeptAnswers"]

_ENTRY_BYTES = 300  # about what Python's objects take around a text and its ids


class AnswerStore:
    """The ids of answers by root (tenant and salt) and text, bounded as `TenantLRU`: 1 MiB of a
    root are some thousand answers. Safe to use from any thread.
    """

    def __init__(self) -> None:
        self._kept: TenantLRU[array[int]] = TenantLRU()

    def keep(self, owner: bytes, root: bytes, text: str, token_ids: Sequence[int]) -> None:
        """Remember what a text was written with; the latest counts. owner: the tenant's root,
        without a salt.
        """
        entry = array("I", token_ids)
        if text and entry:
            size = 4 * len(text) + entry.itemsize * len(entry) + _ENTRY_BYTES
            self._kept.keep(owner, root, text, entry, size)

    def find(self, root: bytes, text: str) -> list[int] | None:
        """The ids of an answer of exactly this text, or None."""
        found = self._kept.find(root, text)
        return None if found is None else found.tolist()

    def forget(self, *roots: bytes) -> None:
        """Forget all answers of these roots."""
        self._kept.forget(*roots)


class KeptAnswers(NamedTuple):
    """The part of a store that belongs to one root; owner: that of its tenant without a salt."""

    store: AnswerStore
    owner: bytes
    root: bytes

    def find(self, text: str) -> list[int] | None:
        """The ids an answer of exactly this text was generated with, or None."""
        return self.store.find(self.root, text)

    def keep(self, text: str, token_ids: Sequence[int]) -> None:
        """Remember what a text was written with, where it is not the whole of an output: those are
        kept already.
        """
        self.store.keep(self.owner, self.root, text, token_ids)
