"""Fairness between tenants, which share step tokens and running slots by weight.

With a single tenant, this has no effect. If a tenant wants less than its share, the others get the
rest. A tenant that was idle does not build up credit. It starts level with the least served tenant.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvboost_edge.engine.schedule import sequence as running_state
    from kvboost_edge.engine.schedule.step_plan import ScheduledTokens

__all__ = ["Fairness"]

# Number of tokens that a tenant may be ahead of a waiting one before it loses a running slot.
_SLICE = 256


class Fairness:
    """Accounts of the tokens computed for each tenant that has requests, divided by its weight.

    Tokens recomputed after a preemption are not charged, so a preempted sequence is not penalized
    twice. Background requests are not charged, because they only use what others leave.

    Attributes:
        is_shared: True if several tenants have requests.
    """

    def __init__(self) -> None:
        self._served: dict[bytes, float] = {}
        self._weights: dict[bytes, float] = {}
        self.is_shared = False

    def update(self, live: Iterable[running_state.Sequence]) -> None:
        """Update the tenants that have requests, with the weight of each one's latest request."""
        self._weights = {sequence.tenant: sequence.request.terms.weight for sequence in live}
        self.is_shared = len(self._weights) > 1
        if not self.is_shared:
            self._served.clear()
            return
        known = [served for tenant, served in self._served.items() if tenant in self._weights]
        start = min(known, default=0.0)
        self._served = {tenant: self._served.get(tenant, start) for tenant in self._weights}

    def charge(self, work: ScheduledTokens[running_state.Sequence]) -> None:
        """Charge a sequence's tenant for the tokens it computes in this step."""
        sequence = work.sequence
        if sequence.is_background:
            return
        stop = work.certain_stop
        num_new = stop - max(work.start, sequence.num_charged_tokens)
        if num_new > 0:
            sequence.num_charged_tokens = stop
            if self.is_shared:
                self._served[sequence.tenant] += num_new / self._weights[sequence.tenant]

    def charge_scoring(self, sequence: running_state.Sequence, count: int) -> None:
        """Charge a sequence's tenant for the tokens that are scored in this step.

        They count as fewer tokens, because scoring runs only some layers.
        """
        probe = sequence.spans.probe
        if probe is None or sequence.is_background or sequence.preemptions or not self.is_shared:
            return
        self._served[sequence.tenant] += count * probe.layer_share / self._weights[sequence.tenant]

    def divide(self, budget: int, wants: Mapping[bytes, int]) -> dict[bytes, int]:
        """Divide a budget of tokens among tenants, giving none more than it wants.

        The whole budget is used as long as a tenant wants more. Tokens that cannot be divided by
        weight go to the least served tenants.
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
        """Yield waiting sequences of one priority in fair order.

        The next sequence is from the tenant with the fewest running sequences relative to its
        weight. Ties go to the least served tenant. Within a tenant, sequences are in order of
        arrival.
        """
        queues: dict[bytes, deque[running_state.Sequence]] = {}
        is_background = False
        for sequence in waiting:
            queues.setdefault(sequence.tenant, deque()).append(sequence)
            is_background = sequence.is_background
        while queues:
            counts = _counts(running, is_background=is_background)
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
        """Return the running sequence to preempt for a waiting one, or None.

        It is the lowest-ranked sequence of the tenant with the most running sequences relative to
        its weight. Afterwards that tenant must still have at least as many as the waiting one's
        tenant, or be far ahead in served tokens.
        """
        # These conditions prevent the two tenants from preempting each other in turn. In the first
        # case the other tenant cannot take the slot back. In the second case many tokens are
        # computed before it can.
        counts = _counts(running, is_background=sequence.is_background)
        mine = sequence.tenant
        for other in reversed(running):  # finds the lowest-ranked sequence of each tenant
            if other.is_background != sequence.is_background:
                continue
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
        """Return the sequence to preempt when blocks run out.

        It is one of the least urgent sequences, from the tenant with the most running sequences
        relative to its weight. The first of several sequences is never preempted, so that one
        sequence always advances.
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


def _counts(running: Iterable[running_state.Sequence], *, is_background: bool) -> Counter[bytes]:
    """Return the number of running sequences of each tenant, in the background or not."""
    return Counter(one.tenant for one in running if one.is_background == is_background)
