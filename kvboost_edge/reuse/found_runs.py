"""Runs of a prompt that were found at other positions."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

__all__ = ["Run", "RunBlock"]


class RunBlock(NamedTuple):
    """Part of a run in one block, which covers slots [valid_from, valid_to).

    The bounds satisfy 0 <= valid_from < valid_to <= block_size.
    """

    block_id: int
    valid_from: int
    valid_to: int


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Consecutive prompt tokens whose KV is in the pool, all moved by the same distance.

    Attributes:
        prompt_start: position of the run's first token in the prompt.
        length: number of tokens.
        pieces: parts of the run in consecutive blocks. The first may start inside its block, and
            the last may end inside its block. All others cover whole blocks.
        delta: prompt_start - context. 0 means that only the preceding text differs.
        context: position at which the run's first token was computed, which is also the number of
            tokens before it there.
    """

    prompt_start: int
    length: int
    pieces: tuple[RunBlock, ...]
    delta: int
    context: int

    @property
    def prompt_stop(self) -> int:
        """Position in the prompt after the run's last token."""
        return self.prompt_start + self.length
