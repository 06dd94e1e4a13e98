"""The tokens of one sequence that one step computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["ScheduledTokens"]

S = TypeVar("S")


class ScheduledTokens(NamedTuple, Generic[S]):
    """Tokens of one sequence that one step computes: made by `Sequence.next_work`, given back to
    `Sequence.take`. Generic, because that class imports this one.

    Attributes:
        sequence: the sequence that they belong to.
        start: position of the first.
        token_ids: the tokens, at positions start, start + 1, ...
        num_rows: how many of the last ones have logits or states wanted; at least one: it samples
            or shows NaN.
        num_drafted: how many of the last ones are draft tokens.
    """

    sequence: S
    start: int
    token_ids: Sequence[int]
    num_rows: int
    num_drafted: int = 0

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.token_ids)

    @property
    def certain_stop(self) -> int:
        """The position after the last token that is not a draft token."""
        return self.start + len(self.token_ids) - self.num_drafted
