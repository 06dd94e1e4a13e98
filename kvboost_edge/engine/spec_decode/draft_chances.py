"""Probabilities that a draft model's tokens are accepted, by their position in the draft.

Counts of a sequence are mixed with those of all sequences, so that a new sequence starts with what
the engine has learned. Until a position is tried, its tokens count as likely as those before it.
Otherwise drafts that began short would never grow.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["AcceptanceCounts", "DraftChances"]

Floats = npt.NDArray[np.float64]

_PRIOR_CHANCE = 0.75
_PRIOR = 4.0  # weight of _PRIOR_CHANCE in the counts of the engine, in drafts
_MEMORY_OF_ALL = 0.99  # decay of the engine's counts with each draft
_WEIGHT_OF_ALL = 3.0  # weight of the engine's counts for a sequence, in drafts
_MEMORY = 0.85  # decay of a sequence's counts with each draft
_FADING = 0.97  # the same after a step without a draft, so that a failed model is tried again


class AcceptanceCounts:
    """Decaying counts of tried and accepted draft tokens by position.

    Attributes:
        tried: drafts that reached each position with all tokens before it accepted.
        accepted: those whose token at the position was accepted, too.
    """

    def __init__(self, most: int) -> None:
        self.tried = np.zeros(most)
        self.accepted = np.zeros(most)

    def fade(self, rate: float) -> None:
        """Multiply all counts by `rate`."""
        self.tried *= rate
        self.accepted *= rate

    def add(self, num_tried: int, num_accepted: int) -> None:
        """Add the outcome of one draft."""
        self.tried[:num_tried] += 1.0
        self.accepted[:num_accepted] += 1.0


class DraftChances:
    """The probabilities of one sequence's draft tokens.

    Args:
        most: largest number of draft tokens.
        of_all: counts of all sequences that choose their tokens in the same way.
    """

    def __init__(self, most: int, of_all: AcceptanceCounts) -> None:
        self._counts = AcceptanceCounts(most)
        self._of_all = of_all

    @property
    def values(self) -> Floats:
        """Probabilities [most] that a token is accepted if all tokens before it are."""
        shared = _PRIOR_CHANCE
        ahead = 0.0  # how much more likely the sequence's tokens are than those of others
        found = []
        for all_tried, all_accepted, tried, accepted in zip(
            self._of_all.tried.tolist(),
            self._of_all.accepted.tolist(),
            self._counts.tried.tolist(),
            self._counts.accepted.tolist(),
            strict=True,
        ):
            shared = (all_accepted + _PRIOR * shared) / (all_tried + _PRIOR)
            expected = min(max(shared + ahead / 2, 0.0), 1.0)
            chance = (accepted + _WEIGHT_OF_ALL * expected) / (tried + _WEIGHT_OF_ALL)
            ahead = chance - shared
            found.append(chance)
        return np.array(found)

    def learn(self, num_tried: int, num_accepted: int) -> None:
        """Record the outcome of a draft. Both numbers are 0 for a step without a draft.

        Args:
            num_tried: number of accepted tokens, and one more if the next one was rejected.
            num_accepted: number of accepted tokens.
        """
        if not num_tried:
            self._counts.fade(_FADING)
            return
        for counts, memory in ((self._counts, _MEMORY), (self._of_all, _MEMORY_OF_ALL)):
            counts.fade(memory)
            counts.add(num_tried, num_accepted)
