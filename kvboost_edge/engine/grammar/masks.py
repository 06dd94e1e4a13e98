"""Token masks of structured output: tokens that would leave the grammar are never chosen.

Each sequence has a parser of its own (llguidance), which says after each token which ones may
follow. It advances with the tokens that the sequence keeps: draft tokens are masked and sampled row
by row like any other token, so nothing is ever taken back. Where only one text can follow, its
tokens are proposed as draft tokens.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.schedule.feature import Constraint
from kvboost_edge.errors import KVBoostError
from kvboost_edge.kernels.aot import compile_ahead
from kvboost_edge.kernels.bitmask import WORD_BITS, mask_logits, mask_logits_entry

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["GrammarConstraint", "first_line", "prepare_masks"]

Floats = npt.NDArray[np.float32]

# Tokens: a text that is forced and written otherwise is not cut into tokens a second time.
_LONG_TEXT = 256


@functools.cache
def prepare_masks() -> None:
    """Compile what applies a mask in a process beside this one, unless its machine code is on disk.
    BackendUnavailable with what the compiler said.
    """
    compile_ahead([mask_logits_entry], 1)


class GrammarConstraint(Constraint):
    """The grammar of one sequence: its parser, and the mask of tokens that may follow."""

    def __init__(self, matcher: LLMatcher, room: Floats) -> None:
        """room: [vocab_size], where `masked` writes; others of the engine write there too."""
        self._matcher = matcher
        self._room = room
        self._words = np.empty(-(-len(room) // WORD_BITS), np.int32)
        self._forced: list[int] = []
        self._asks = True
        self._find()

    def masked(self, logits: Floats) -> Floats:
        """The logits [vocab_size] with those of tokens that cannot follow at -inf; they stay until
        the next call.
        """
        if not self._is_found:
            self._find()
        mask_logits(self._words, logits, self._room)
        return self._room

    def constrain(self, logits: Floats, largest: int | None) -> tuple[Floats, int | None]:
        """Return the masked logits; the largest of them is not known."""
        return self.masked(logits), None

    def advance(self, token_id: int) -> bool:
        """Take the chosen token; return whether nothing can follow it but the end."""
        if not self._matcher.consume_token(token_id):
            self._check()
        self._is_found = False
        if self._forced and self._forced[0] != token_id:
            self._asks = len(self._forced) <= _LONG_TEXT
            self._forced = []
        self._forced = self._forced[1:]
        return self._matcher.is_stopped()

    def forced(self) -> list[int]:
        """Tokens that follow in any case; none where their text can be cut into tokens in several
        ways.
        """
        if not self._forced and self._asks and not self._matcher.is_stopped():
            self._forced = list(self._matcher.compute_ff_tokens())
        return self._forced

    def _find(self) -> None:
        """Which tokens may follow."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        self._is_found = True

    def _check(self) -> None:
        if self._matcher.is_error():
            raise KVBoostError(
                f"the answer cannot be kept to its grammar: {first_line(self._matcher.get_error())}"
            )


def first_line(text: str) -> str:
    """Return the first line of an error's text that says something, at most 500 characters."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[
        :500
    ]
