"""The token budget of a step: how many tokens each sequence computes."""

from __future__ import annotations

import itertools
from collections import Counter
from operator import attrgetter

from kvboost_edge.engine.schedule.fairness import Fairness
from kvboost_edge.engine.schedule.sequence import Sequence

__all__ = ["Budget"]

_OLDEST_PART = (
    4  # one in so many tokens of a step goes to the prompt that came first, whatever its length
)

_BY_PRIORITY = attrgetter("priority")
_BY_ARRIVAL = attrgetter("index")
_BY_TURN = attrgetter("priority", "last_turn", "index")


class Budget:
    """The tokens of each step, shared out among the running sequences; by which rules stands in
    scheduler.py.
    """

    def __init__(self, fairness: Fairness) -> None:
        self._fairness = fairness
        self._step = 0
        self._turns = itertools.count()

    def share(self, running: list[Sequence], most: int) -> dict[int, int]:
        """Tokens of the next step, `most` in all, by sequence index."""
        self._step += 1
        shares: dict[int, int] = {}
        for members, budget in self._of_tenants(running, most):
            self._share_among(members, budget, shares)
        return shares

    def share_whole(self, running: list[Sequence], most: int) -> dict[int, int]:
        """The same of sequences that are computed whole: by priority, the tenants' shares and
        arrival all tokens of each that still fits, and of the first one whatever their number.
        """
        turn = list(running)
        if self._fairness.is_shared:
            groups = itertools.groupby(running, key=_BY_PRIORITY)
            turn = [
                sequence for _, group in groups for sequence in self._fairness.in_turn(group, ())
            ]
        shares: dict[int, int] = {}
        for sequence in turn:
            if not shares or sequence.num_pending <= most:
                shares[sequence.index] = sequence.num_pending
                most -= sequence.num_pending
        return shares

    def _of_tenants(self, running: list[Sequence], most: int) -> list[tuple[list[Sequence], int]]:
        """Each tenant's running sequences and its part of the budget: by priority first, then by
        the tenants' shares.

        A token of an urgent prompt does not keep a less urgent sequence from its next one: where
        the budget has room for all of those they count as no less urgent, as they do among the
        sequences of one tenant.
        """
        ready = [sequence for sequence in running if sequence.spans.probe is None]
        if not self._fairness.is_shared:
            return [(ready, most)]
        tenants: dict[bytes, list[Sequence]] = {}
        for sequence in ready:
            tenants.setdefault(sequence.tenant, []).append(sequence)
        if len(tenants) < 2:
            return [(ready, most)]
        urgent = min((s.priority for s in ready if s.num_pending > 1), default=ready[0].priority)
        roomy = 2 * sum(s.num_pending == 1 for s in ready) <= most
        wants: dict[int, Counter[bytes]] = {}
        for sequence in ready:
            lifted = roomy and sequence.num_pending == 1
            level = min(sequence.priority, urgent) if lifted else sequence.priority
            wants.setdefault(level, Counter())[sequence.tenant] += sequence.most_at_once
        given: Counter[bytes] = Counter()
        for _, wanted in sorted(wants.items()):
            given.update(self._fairness.divide(most - given.total(), wanted))
        return [(members, given[tenant]) for tenant, members in tenants.items() if given[tenant]]

    def _share_among(self, members: list[Sequence], budget: int, shares: dict[int, int]) -> None:
        """Give out tokens to compute of one tenant's sequences."""
        decoding: list[Sequence] = []
        filling: list[Sequence] = []
        for sequence in members:
            if pending := sequence.num_pending:
                (decoding if pending == 1 else filling).append(sequence)
        # Neither kind starves the other: a token is kept for prefill; a budget of one token
        # alternates.
        kept = 0 if not (decoding and filling) else (1 if budget > 1 else self._step % 2)
        # The least recently served go first, which matters only when the budget is smaller than
        # their number.
        chosen = sorted(decoding, key=_BY_TURN)[: budget - kept]
        budget -= len(chosen)
        for sequence in chosen:
            shares[sequence.index] = 1
            sequence.last_turn = next(self._turns)
        for _, group in itertools.groupby(sorted(filling, key=_BY_PRIORITY), key=_BY_PRIORITY):
            budget -= _fill(list(group), budget, shares)


def _fill(prompts: list[Sequence], budget: int, shares: dict[int, int]) -> int:
    """Give out tokens of prompts, none of them over the budget; how many. A part goes to the
    oldest, the rest to those with fewest pending tokens, in this order.
    """
    left = budget
    kept = -(-budget // _OLDEST_PART)
    shortest_first = sorted(prompts, key=lambda one: (one.num_pending, one.index))
    for sequence, most in (
        (min(prompts, key=_BY_ARRIVAL), kept),
        *((one, budget) for one in shortest_first),
    ):
        given = shares.get(sequence.index, 0)
        shares[sequence.index] = given + min(sequence.most_at_once - given, most, left)
        left -= shares[sequence.index] - given
    return budget - left
