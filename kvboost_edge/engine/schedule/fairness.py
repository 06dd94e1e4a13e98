"""Fairness between tenants: tokens of a step and places, in proportion to their weights.

With one tenant nothing here is asked. A tenant that wants less than its share leaves the rest to
the others; one that was away has nothing saved up: it starts level with whoever was served least.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvboost_edge.engine.schedule import sequence as running_state
    from kvboost_edge.engine.schedule.step_plan import ScheduledTokens

__all__ = ["Fairness"]

_SLICE = (
    256  # tokens a tenant may be ahead of one that waits before places change hands between equals
)


class Fairness:
    """One account per tenant that has requests: `served`, tokens computed for it over its weight.
    What is computed anew after preemption is not charged, so that whoever gets a place for a while
    gets on.

    Attributes:
        is_shared: whether several tenants have requests.
    """

    def __init__(self) -> None:
        self._served: dict[bytes, float] = {}
        self._weights: dict[bytes, float] = {}
        self.is_shared = False

    def update(self, live: Iterable[running_state.Sequence]) -> None:
        """Who has requests now, and the weights that the latest of them give."""
        self._weights = {sequence.tenant: sequence.request.terms.weight for sequence in live}
        self.is_shared = len(self._weights) > 1
        if not self.is_shared:
            self._served.clear()
            return
        known = [served for tenant, served in self._served.items() if tenant in self._weights]
        start = min(known, default=0.0)
        self._served = {tenant: self._served.get(tenant, start) for tenant in self._weights}

    def charge(self, work: ScheduledTokens[running_state.Sequence]) -> None:
        """These tokens are computed now."""
        sequence = work.sequence
        stop = work.certain_stop
        num_new = stop - max(work.start, sequence.num_charged_tokens)
        if num_new > 0:
            sequence.num_charged_tokens = stop
            if self.is_shared:
                self._served[sequence.tenant] += num_new / self._weights[sequence.tenant]

    def divide(self, budget: int, wants: Mapping[bytes, int]) -> dict[bytes, int]:
        """Tokens for each tenant, none more than it wants, all of the budget while anybody wants
        more. What does not divide goes to those who were served least.
        """
        given = dict.fromkeys(wants, 0)
        while budget and (hungry := [tenant for tenant in wants if given[tenant] < wants[tenant]]):
            total = sum(self._weights[tenant] for tenant in hungry)
            shares = {
                tenant: min(
                    int(budget * self._weights[tenant] / total), wants[tenant] - given[tenant]
                )
                for tenant in hungry
            }
            if not any(shares.values()):
                shares = {
                    min(hungry, key=lambda t: self._served[t] + given[t] / self._weights[t]): 1
                }
            for tenant, share in shares.items():
                given[tenant] += share
                budget -= share
        return given

    def in_turn(
        self, waiting: Iterable[running_state.Sequence], running: Sequence[running_state.Sequence]
    ) -> Iterator[running_state.Sequence]:
        """The waiting sequences of one priority, each tenant's by arrival: next is always whose
        tenant has the fewest running for its weight as of then, among equals the least served.
        """
        queues: dict[bytes, deque[running_state.Sequence]] = {}
        for sequence in waiting:
            queues.setdefault(sequence.tenant, deque()).append(sequence)
        while queues:
            counts = Counter(sequence.tenant for sequence in running)
            tenant = min(
                queues,
                key=lambda t: (counts[t] / self._weights[t], self._served[t], queues[t][0].index),
            )
            yield queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]

    def who_yields(
        self, sequence: running_state.Sequence, running: Sequence[running_state.Sequence]
    ) -> running_state.Sequence | None:
        """The running sequence whose place a waiting one takes, or None: the last of the tenant
        that has most for its weight, if that tenant still has as much as the other one afterwards,
        or is far ahead in what it was served.

        Nothing goes back and forth: after the first kind neither tenant may take the place back,
        before the second many new tokens are computed.
        """
        counts = Counter(other.tenant for other in running)
        mine = sequence.tenant
        for other in reversed(running):  # the last in rank of each tenant comes first
            if other.priority < sequence.priority:
                return None
            theirs = other.tenant
            if theirs == mine or counts[theirs] / self._weights[theirs] < self._most(counts, mine):
                continue
            if (counts[theirs] - 1) / self._weights[theirs] >= (counts[mine] + 1) / self._weights[
                mine
            ]:
                return other
            ahead = self._served[theirs] - self._served[mine]
            has_more = counts[theirs] / self._weights[theirs] > counts[mine] / self._weights[mine]
            is_dear = other.num_pending > 1 or not other.uses_cache
            if has_more and not is_dear and ahead > max(_SLICE, other.num_tokens // 2):
                return other
            return None
        return None

    def who_is_preempted(self, running: Sequence[running_state.Sequence]) -> running_state.Sequence:
        """Who gives its blocks back when they do not suffice: of the least urgent, the last of the
        tenant that has most running for its weight. Never the first of all while there is another,
        so that one always gets on.
        """
        last = [other for other in running[1:] if other.priority == running[-1].priority] or running
        counts = Counter(other.tenant for other in running)
        return max(
            reversed(last), key=lambda other: counts[other.tenant] / self._weights[other.tenant]
        )

    def _most(self, counts: Counter[bytes], but: bytes) -> float:
        return max(
            count / self._weights[tenant] for tenant, count in counts.items() if tenant != but
        )
