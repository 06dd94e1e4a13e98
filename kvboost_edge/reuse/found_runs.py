"""Runs of a prompt that were found at other positions, as plain data. Does not import Numba."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

__all__ = ["Run", "RunBlock"]


class RunBlock(NamedTuple):
    """Part of a run in one block: slots [valid_from, valid_to).

    The bounds satisfy 0 <= valid_from < valid_to <= block_size.
    """

    block_id: int
    valid_from: int
    valid_to: int


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of a prompt whose KV is in the pool, all moved by the same distance.

    Attributes:
        prompt_start: position of its first token in the prompt.
        length: number of tokens.
        pieces: consecutive parts in blocks. The first may begin inside its block and the last may
            end inside; all others are whole.
        delta: prompt_start - context. 0 means that only the text before it differs.
        context: position at which its first token was computed, and so the number of its context
            tokens there.
    """

    prompt_start: int
    length: int
    pieces: tuple[RunBlock, ...]
    delta: int
    context: int

    @property
    def prompt_stop(self) -> int:
        """Position after its last token in the prompt."""
        return self.prompt_start + self.length
