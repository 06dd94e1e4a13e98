"""What was found of a prompt at other positions, as plain numbers. Importing this imports no
compiler.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

__all__ = ["Run", "RunBlock"]


class RunBlock(NamedTuple):
    """What one block holds of a run: slots [valid_from, valid_to), 0 <= valid_from < valid_to <=
    block_size.
    """

    block_id: int
    valid_from: int
    valid_to: int


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Tokens of a prompt that stand in the pool one after another, all at one distance from where
    they were computed.

    Attributes:
        prompt_start: position in the prompt of its first token.
        length: tokens.
        pieces: where they are, without a gap: the first may begin inside its block, the last may
            end inside, those between are whole.
        delta: prompt_start - context; 0 is possible, and says that only what stands before differs.
        context: position of its first token where it was computed: so many tokens were its context
            there.
    """

    prompt_start: int
    length: int
    pieces: tuple[RunBlock, ...]
    delta: int
    context: int

    @property
    def prompt_stop(self) -> int:
        """Position in the prompt behind its last token."""
        return self.prompt_start + self.length
