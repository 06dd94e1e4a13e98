"""The number of draft tokens of each sequence with the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.spec_decode.pass_costs import PassCosts

__all__ = ["LEAST_GAIN", "DraftProposal", "StepCosts", "choose_lengths"]

Floats = npt.NDArray[np.float64]

LEAST_GAIN = 1.02  # minimum ratio of tokens per second with and without draft tokens


class DraftProposal(NamedTuple):
    """Proposed draft tokens for a sequence.

    Attributes:
        token_ids: token ids proposed after the sequence's last token, at least one.
        chances: float64 [num_tokens], the estimated probability that a token is accepted if all
            tokens before it are.
        source: where the tokens come from: "lookup", "grammar" or "draft_model".
    """

    token_ids: list[int]
    chances: Floats
    source: str = "lookup"


class StepCosts(NamedTuple):
    """The costs of adding draft tokens to a step.

    Attributes:
        num_rows: rows of the step's pass without draft tokens. Each of them makes a token.
        depth: sum of the positions of these rows. Draft tokens count as their average.
        passes: times of the engine's passes.
        drafter: times of the draft model's passes, or None without one.
    """

    num_rows: int
    depth: float
    passes: PassCosts
    drafter: PassCosts | None = None

    @property
    def mean_depth(self) -> float:
        """Average position of the rows."""
        return self.depth / self.num_rows

    def rates(self, draft: DraftProposal) -> Floats:
        """Return the expected tokens per second of the step by length of one sequence's draft.

        Returns:
            Rates [number of tokens + 1]. The first one is that without the draft.
        """
        places = np.arange(len(draft.token_ids))
        chances = np.cumprod(draft.chances, dtype=np.float64)
        return self.rates_of([draft] * len(places), places, chances)

    def rates_of(
        self, owners: Sequence[DraftProposal], places: npt.NDArray[np.int_], probabilities: Floats
    ) -> Floats:
        """Return the expected tokens per second of the step with 0 and more draft tokens.

        Args:
            owners: the draft of each token.
            places: places of the tokens in their drafts.
            probabilities: probabilities that the tokens are accepted.
        """
        made = self.num_rows + np.concatenate(((0.0,), np.cumsum(probabilities)))
        added = np.arange(len(made), dtype=np.float64)
        depths = self.depth + added * self.mean_depth
        seconds = self.passes.seconds_of(self.num_rows + added, depths)
        if self.drafter is not None and any(one.source == "draft_model" for one in owners):
            seconds[1:] += np.cumsum(self._drafting_seconds(self.drafter, owners, places.tolist()))
        rates: Floats = made / seconds
        return rates

    def _drafting_seconds(
        self, drafter: PassCosts, owners: Sequence[DraftProposal], places: list[int]
    ) -> Floats:
        """Return the seconds that making each token adds to those before it.

        A pass of the draft model makes the tokens of one place for all sequences.
        """
        rows = np.arange(1.0, len(owners) + 1)
        added = np.diff(drafter.seconds_of(rows, rows * self.mean_depth), prepend=0.0)
        seconds = np.zeros(len(owners))
        num_rows: dict[int, int] = {}
        for index, (owner, place) in enumerate(zip(owners, places, strict=True)):
            if owner.source == "draft_model":
                seconds[index] = added[num_rows.get(place, 0)]
                num_rows[place] = num_rows.get(place, 0) + 1
        return seconds


def choose_lengths(drafts: Sequence[DraftProposal], costs: StepCosts) -> list[int]:
    """Return how many tokens of each draft to verify, for the most expected tokens per second.

    Tokens are added in order of their probability to be accepted, for all sequences together. A
    token is never more likely than the one before it, so each draft is cut at some length.

    Args:
        drafts: drafts of sequences that compute one token each, at least one.
        costs: costs of the step.
    """
    lengths = [len(draft.token_ids) for draft in drafts]
    probabilities = np.concatenate([np.cumprod(draft.chances) for draft in drafts])
    numbers = np.repeat(np.arange(len(drafts)), lengths)
    places = np.concatenate([np.arange(length) for length in lengths])
    # Of equal probabilities, earlier places come first, so that all sequences get their share.
    order = np.lexsort((places, -probabilities))
    owners = [drafts[number] for number in numbers[order].tolist()]
    rates = costs.rates_of(owners, places[order], probabilities[order])
    best = int(rates.argmax())
    if rates[best] <= LEAST_GAIN * rates[0]:
        return [0] * len(drafts)
    counts: list[int] = np.bincount(numbers[order[:best]], minlength=len(drafts)).tolist()
    return counts
