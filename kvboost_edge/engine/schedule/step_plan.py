"""The tokens of one sequence that a step computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["ScheduledTokens"]

S = TypeVar("S")


class ScheduledTokens(NamedTuple, Generic[S]):
    """Tokens of one sequence that a step computes.

    `Sequence.next_work` creates them and `Sequence.take` processes the results. The class is
    generic to avoid a circular import of `Sequence`.

    Attributes:
        sequence: the sequence of the tokens.
        start: position of the first token.
        token_ids: ids of the tokens at consecutive positions from start.
        num_rows: number of last tokens whose logits or hidden states are wanted, at least 1. The
            last row is sampled, or checked for NaN.
        num_drafted: number of last tokens that are draft tokens.
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

    def with_drafts(self, token_ids: Sequence[int]) -> ScheduledTokens[S]:
        """Return the same tokens with other draft tokens, whose logits are wanted as well."""
        num_certain = len(self.token_ids) - self.num_drafted
        return self._replace(
            token_ids=[*self.token_ids[:num_certain], *token_ids],
            num_rows=self.num_rows - self.num_drafted + len(token_ids),
            num_drafted=len(token_ids),
        )
