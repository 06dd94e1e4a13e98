"""The division of a step's budget among the running sequences.

The budget is counted in units of work. Without pacing, each token costs one unit. With pacing
(`StepPacing`), the cost of a prompt token is the time that it takes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from operator import attrgetter

from kvboost_edge.engine.schedule.fairness import Fairness
from kvboost_edge.engine.schedule.pacing import StepLimit
from kvboost_edge.engine.schedule.sequence import Sequence

__all__ = ["Budget"]

_OLDEST_PART = 4  # the oldest prompt gets 1/4 of the prompt tokens of a step, whatever its length

_BY_PRIORITY = attrgetter("priority")
_BY_ARRIVAL = attrgetter("index")
_BY_TURN = attrgetter("priority", "last_turn", "index")


class Budget:
    """The token budget of each step, divided by the rules in scheduler.py."""

    def __init__(self, fairness: Fairness) -> None:
        self._fairness = fairness
        self._step = 0
        self._turns = itertools.count()

    def share(self, running: list[Sequence], limit: StepLimit) -> dict[int, int]:
        """Return the number of tokens that each sequence computes in the next step.

        The keys are sequence indices.
        """
        self._step += 1
        shares: dict[int, int] = {}
        for members, budget in self._of_tenants(running, limit):
            self._share_among(members, limit._replace(total=budget), shares)
        return shares

    def share_whole(self, running: list[Sequence], limit: StepLimit) -> dict[int, int]:
        """Return the next step's tokens per sequence when each must be computed in one step.

        Sequences are served by priority, tenant share and arrival. The first one always gets all
        its tokens. The others get theirs only if all of them fit. The keys are sequence indices.
        """
        most = limit.total
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

    def _of_tenants(
        self, running: list[Sequence], limit: StepLimit
    ) -> list[tuple[list[Sequence], int]]:
        """Return each tenant's running sequences and its part of the step in units of work.

        Priority decides first, then the tenants' shares. If the step has room, decoding sequences
        are treated like the most urgent prompt. An urgent prompt therefore does not stall the
        decoding of less urgent sequences.
        """
        if not self._fairness.is_shared:
            return [(running, limit.total)]
        tenants: dict[bytes, list[Sequence]] = {}
        for sequence in running:
            tenants.setdefault(sequence.tenant, []).append(sequence)
        if len(tenants) < 2:
            return [(running, limit.total)]
        urgent = min(
            (s.priority for s in running if s.num_due and not s.decodes),
            default=running[0].priority,
        )
        decoding = {s.index for s in running if s.decodes} - limit.spare
        roomy = 2 * len(decoding) <= limit.total
        wants: dict[int, Counter[bytes]] = {}
        for sequence in running:
            lifted = roomy and sequence.index in decoding
            level = min(sequence.priority, urgent) if lifted else sequence.priority
            wanted = sequence.most_at_once * limit.price(sequence)
            wants.setdefault(level, Counter())[sequence.tenant] += wanted
        given: Counter[bytes] = Counter()
        for _, by_tenant in sorted(wants.items()):
            given.update(self._fairness.divide(limit.total - given.total(), by_tenant))
        return [(members, given[tenant]) for tenant, members in tenants.items() if given[tenant]]

    def _share_among(
        self, members: list[Sequence], limit: StepLimit, shares: dict[int, int]
    ) -> None:
        """Divide one tenant's part of the step among its sequences."""
        decoding: list[Sequence] = []
        filling: list[Sequence] = []
        for sequence in members:
            if sequence.num_due:
                decodes = sequence.decodes and sequence.index not in limit.spare
                (decoding if decodes else filling).append(sequence)
        budget = limit.total
        # Background sequences come after the prompts of other sequences, even while they decode.
        # Reserve one token for prefill so that neither prefill nor decoding starves. If the budget
        # is only one token, steps alternate between them.
        kept = 0
        prompts = [one for one in filling if one.index not in limit.spare]
        if decoding and prompts:
            kept = min(map(limit.price, prompts))
            if budget <= kept:
                kept *= self._step % 2
        # Serve the least recently served sequences first. This matters only if the budget is
        # smaller than their number.
        chosen = sorted(decoding, key=_BY_TURN)[: max(0, budget - kept)]
        budget -= len(chosen)
        for sequence in chosen:
            shares[sequence.index] = 1
            sequence.last_turn = next(self._turns)
        filling.sort(key=_BY_PRIORITY)
        if budget > 0 and filling:
            # Compute at least one token, even if it costs more than the tenant's part.
            most_urgent = (one for one in filling if one.priority == filling[0].priority)
            budget = max(budget, limit.price(min(most_urgent, key=_BY_ARRIVAL)))
        for _, group in itertools.groupby(filling, key=_BY_PRIORITY):
            budget -= _fill(list(group), limit._replace(total=budget), shares)


def _fill(prompts: list[Sequence], limit: StepLimit, shares: dict[int, int]) -> int:
    """Divide units of work among prompts and return the number of units used.

    The oldest prompt gets a fixed part, at least one token. The rest goes to prompts in order of
    pending tokens, fewest first.
    """
    oldest = min(prompts, key=_BY_ARRIVAL)
    kept = max(-(-limit.total // _OLDEST_PART), min(limit.price(oldest), limit.total))
    shortest_first = sorted(prompts, key=lambda one: (one.num_due, one.index))
    left = limit.total
    for sequence, most in ((oldest, kept), *((one, limit.total) for one in shortest_first)):
        price = limit.price(sequence)
        given = shares.get(sequence.index, 0)
        more = min(sequence.most_at_once - given, min(most, left) // price)
        shares[sequence.index] = given + more
        left -= more * price
    return limit.total - left
