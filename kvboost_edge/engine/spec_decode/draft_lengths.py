"""The number of draft tokens of each sequence that is expected to make decoding fastest.

The speed of a step is the geometric mean of its sequences' tokens per second. Doubling the speed of
one sequence therefore weighs as much as halving that of another. With the sum instead, one sequence
with many draft tokens would slow down all others.

`DraftCredit` bounds what rejected draft tokens may cost, because estimates can be wrong for a long
time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.spec_decode.pass_costs import PassCosts

__all__ = [
    "LEAST_GAIN",
    "DraftCredit",
    "DraftProposal",
    "StepCosts",
    "choose_lengths",
    "least_chances",
    "observe_pass",
]

Floats = npt.NDArray[np.float64]

LEAST_GAIN = 1.02  # minimum ratio of the speeds with and without draft tokens
# The same for steps of several sequences. Drafts gain little there, less than the errors of
# measured times.
_LEAST_GAIN_OF_MANY = 1.06

_NEXT_CHANCE = 0.85  # typical chance of a token after one that is accepted
# If every step has draft tokens, the time without them is not known. A step without them measures
# it after so many others, unless the gain is large.
_PLAIN_EVERY = 16
_SURE_GAIN = 1.3
_MOST_ADDED = 128  # draft tokens of a step; passes of so many rows are compute-bound

# Cost of rejected draft tokens, in passes without draft tokens. Chosen with
# benchmarks/simulators/speculation.py.
_FIRST_CREDIT = 2.0
_STEP_CREDIT = 0.01  # for each step, so that a losing workload is at most this much slower
_MOST_CREDIT = 8.0


class DraftProposal(NamedTuple):
    """Proposed draft tokens for a sequence.

    Attributes:
        token_ids: token ids proposed after the sequence's last token, at least one.
        chances: float64 [num_tokens], the estimated probability that a token is accepted if all
            tokens before it are.
        source: where the tokens come from: "lookup", "grammar", "draft_model" or "mtp".
        ends_early: True if the draft ends by itself before an unlikely token, see `least_chances`.
        least_tokens: minimum number of tokens to verify, unless none are.
    """

    token_ids: list[int]
    chances: Floats
    source: str = "lookup"
    ends_early: bool = False
    least_tokens: int = 1

    @property
    def is_modeled(self) -> bool:
        """True if passes of a draft model or an MTP head make the tokens."""
        return self.source in ("draft_model", "mtp")


class DraftCredit:
    """The time that draft tokens may still cost, relative to a pass without them.

    Draft tokens spend the time that they add to a pass. Accepted ones earn the time that they save,
    and each step adds a little.

    Attributes:
        balance: the time that is left.
        num_drafting: number of passes with draft tokens since the last measured pass without them.
    """

    def __init__(self) -> None:
        self.balance = _FIRST_CREDIT
        self.num_drafting = 0

    def spend(self, cost: float) -> None:
        """Take the cost of a step's draft tokens."""
        self.balance -= cost

    def settle(self, accepted: Iterable[int], num_rows: int) -> None:
        """Add what a step earned, which is the geometric mean of what its sequences earned.

        Args:
            accepted: numbers of accepted draft tokens by sequence. Those with none may be left out.
            num_rows: rows of the step's pass without draft tokens.
        """
        earned = math.expm1(sum(map(math.log1p, accepted)) / num_rows)
        self.balance = min(self.balance + _STEP_CREDIT + earned, _MOST_CREDIT)


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """The costs of adding draft tokens to a step, by the times that were measured before it.

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
    # Relative times of the step with one draft, by its length and whether a draft model makes it.
    # They are the same for all sequences.
    _times: dict[tuple[int, bool], Floats] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @functools.cached_property
    def _speed(self) -> float:
        """Tokens per second of the step without draft tokens."""
        return self.num_rows / self.passes.seconds(self.num_rows, self.depth)

    @property
    def mean_depth(self) -> float:
        """Average position of the rows."""
        return self.depth / self.num_rows

    def rates(self, draft: DraftProposal) -> Floats:
        """Return the expected tokens per second of the step by length of one sequence's draft.

        Returns:
            Rates [number of tokens + 1]. The first one is that without the draft.
        """
        count = len(draft.token_ids)
        key = count, draft.is_modeled
        if key not in self._times:
            self._times[key] = self._relative_times(count, [draft] * count, list(range(count)))
        rates: Floats = self._gains(_log_gains([draft])[0], self._times[key]) * self._speed
        return rates

    def gains_and_costs(
        self, log_gains: Floats, owners: Sequence[DraftProposal], places: list[int]
    ) -> tuple[Floats, Floats]:
        """Return the expected speed of the step with 0 and more draft tokens, and what they cost.

        Args:
            log_gains: logarithms of the ratio by which each token increases the expected number of
                tokens of its sequence.
            owners: the draft of each token. May be empty without a draft model.
            places: places of the tokens in their drafts, likewise.

        Returns:
            Speeds and added times, both relative to the step without draft tokens.
        """
        times = self._relative_times(len(log_gains), owners, places)
        return self._gains(log_gains, times), times - 1

    def _relative_times(
        self, count: int, owners: Sequence[DraftProposal], places: list[int]
    ) -> Floats:
        """Return the times of the step with 0 to `count` draft tokens, relative to none."""
        added = np.arange(count + 1, dtype=np.float64)
        depths = self.depth + added * self.mean_depth
        seconds = self.passes.seconds_of(self.num_rows + added, depths)
        if self.drafter is not None and any(one.is_modeled for one in owners):
            seconds[1:] += np.cumsum(self._drafting_seconds(self.drafter, owners, places))
        times: Floats = seconds / seconds[0]
        return times

    def _gains(self, log_gains: Floats, times: Floats) -> Floats:
        """Return the speeds of the step with 0 and more draft tokens, relative to none."""
        made = np.zeros(len(log_gains) + 1)
        np.cumsum(log_gains, out=made[1:])
        gains: Floats = np.exp(made / self.num_rows) / times
        return gains

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
            if owner.is_modeled:
                seconds[index] = added[num_rows.get(place, 0)]
                num_rows[place] = num_rows.get(place, 0) + 1
        return seconds


def choose_lengths(
    drafts: Sequence[DraftProposal], costs: StepCosts, credit: DraftCredit
) -> list[int]:
    """Return how many tokens of each draft to verify, and spend their cost.

    Tokens are added in order of their gain, for all sequences together. A token never gains more
    than the one before it, so each draft is cut at some length. The first tokens of a draft, up to
    its minimum, are added together. The draft of a single sequence that ends early is verified or
    not, but never cut, because it knows how likely its own tokens are.

    Args:
        drafts: drafts of sequences that compute one token each, at least one.
        costs: costs of the step.
        credit: limit of the costs.
    """
    log_gains, ranks = _grouped_gains(drafts)
    flat = log_gains.T.ravel()
    order = np.lexsort((ranks.T.ravel(), -flat))[: np.count_nonzero(flat)][:_MOST_ADDED]
    places, numbers = np.divmod(order, len(drafts))
    owners: list[DraftProposal] = []
    if costs.drafter is not None:
        owners = [drafts[number] for number in numbers.tolist()]
    gains, added = costs.gains_and_costs(flat[order], owners, places.tolist())
    is_possible = added <= max(0.0, credit.balance)
    last_places = np.array([draft.least_tokens - 1 for draft in drafts])[numbers]
    num_below = np.cumsum((places == 0).astype(np.int64) - (places == last_places))
    is_possible[1:] &= num_below == 0  # no draft is cut below its minimum
    best = int(np.where(is_possible, gains, 0.0).argmax())
    is_stale = credit.num_drafting >= _PLAIN_EVERY and gains[best] < _SURE_GAIN
    least = LEAST_GAIN if costs.num_rows == 1 else _LEAST_GAIN_OF_MANY
    if gains[best] <= least or is_stale:
        return [0] * len(drafts)
    credit.spend(float(added[best]))
    if costs.num_rows == 1 and drafts[0].ends_early:
        return [len(drafts[0].token_ids)]
    counts: list[int] = np.bincount(numbers[:best], minlength=len(drafts)).tolist()
    return counts


def _grouped_gains(
    drafts: Sequence[DraftProposal],
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return the gains of `_log_gains`, averaged over the tokens that are added together.

    Returns:
        The gains, which are 0 for drafts below their minimum, and the ranks of tokens with equal
        gains. Earlier places come first, so that all drafts get their share.
    """
    gains = _log_gains(drafts)
    ranks = np.arange(gains.size).reshape(gains.shape, order="F")
    for row, rank, draft in zip(gains, ranks, drafts, strict=True):
        least = draft.least_tokens
        if len(draft.token_ids) < least:
            row[:] = 0.0
        elif least > 1:
            row[:least] = row[:least].mean()
            rank[:least] = rank[0]
    return gains, ranks


def least_chances(costs: StepCosts, rate: float, most: int) -> tuple[Floats, Floats]:
    """Return the least chances with which the tokens of a sequence's draft are worth their time.

    A chance is the probability that a token and all tokens before it are accepted.

    Args:
        costs: costs of the step, with those of the draft model.
        rate: expected tokens per second of the step with the draft. Each token should reach it.
        most: maximum number of draft tokens.

    Returns:
        The least chances [most] of tokens to verify, and of tokens after which one more is drafted.
    """
    assert costs.drafter is not None
    depth = costs.mean_depth
    rows = costs.num_rows + np.arange(most + 1.0)
    verifying = _further_seconds(costs.passes.seconds_of(rows, rows * depth))
    more = np.append(verifying[1:], verifying[-1]) + costs.drafter.seconds(1, depth)
    return rate * verifying, rate / _NEXT_CHANCE * more


def _further_seconds(seconds: Floats) -> Floats:
    """Return the time that a further row adds to a pass, by number of added rows.

    If a few more rows take hardly longer than one more, each of them counts as their average.
    """
    numbers = np.arange(1.0, len(seconds))
    return np.array(
        [
            ((seconds[added + 1 :] - seconds[added]) / numbers[: len(seconds) - added - 1]).min()
            for added in range(len(seconds) - 1)
        ]
    )


def observe_pass(
    costs: PassCosts,
    credit: DraftCredit,
    num_plain: int,
    num_rows: int,
    depth: float,
    seconds: float,
) -> None:
    """Learn the time of a pass, and spend what its draft tokens cost more than was expected.

    Args:
        costs: times of passes.
        credit: limit of the costs.
        num_plain: rows of the pass without draft tokens.
        num_rows: rows of the pass.
        depth: sum of the positions of the rows.
        seconds: measured time of the pass.
    """

    def relative() -> float:
        plain = costs.seconds(num_plain, depth * num_plain / num_rows)
        return costs.seconds(num_rows, depth) / plain

    if num_rows == num_plain:
        credit.num_drafting = 0
        costs.observe(num_rows, depth, seconds)
        return
    credit.num_drafting += 1
    expected = relative()
    costs.observe(num_rows, depth, seconds)
    credit.spend(relative() - expected)


def _log_gains(drafts: Sequence[DraftProposal]) -> Floats:
    """Return by how much each token increases the logarithm of the expected number of tokens.

    Returns:
        Increases [number of drafts, length of the longest draft], which are 0 after a draft's end.
    """
    chances = np.zeros((len(drafts), max(len(draft.token_ids) for draft in drafts)))
    for row, draft in zip(chances, drafts, strict=True):
        row[: len(draft.chances)] = draft.chances
    made = np.ones((len(drafts), chances.shape[1] + 1))
    np.cumprod(chances, axis=1, out=made[:, 1:])
    np.cumsum(made, axis=1, out=made)
    np.log(made, out=made)
    gains: Floats = made[:, 1:] - made[:, :-1]
    return gains
