"""Routing policies for `router.py`: the package's own code and two policies of other projects.

The other policies know at any time how many unfinished requests each replica has. Ours knows what
replicas report regularly. The policies of other projects are written from their descriptions. Both
remember the prompts that they sent, not the actual cache contents. Their threshold for "out of
balance" is 8 requests here, which suits replicas that run 16 requests. With their defaults (none,
and 64) they would hardly consider the load of such replicas.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Protocol

from kvboost_edge.serve_ray.routing.cache_records import RoutingDecision
from kvboost_edge.serve_ray.routing.prompt_chain import PromptChain
from kvboost_edge.serve_ray.routing.router import PrefixRouter

__all__ = ["POLICIES", "Ours", "Policy"]

_OUT_OF_BALANCE = 8


class Policy(Protocol):
    """Interface of a policy that chooses among the replicas in `alive`, by number."""

    alive: list[int]

    def choose(self, chain: PromptChain, load: Sequence[int], now: float) -> tuple[int, int, int]:
        """Choose a replica for a request.

        `load` has the number of unfinished requests of each replica.

        Returns:
            The replica, the prompt tokens believed to be missing there, and those to be read there
                from a tier.
        """
        ...


class Blind:
    """Policy that ignores the prompt."""

    def __init__(self, num_replicas: int, seed: int = 0) -> None:
        self.alive = list(range(num_replicas))
        self.rng = random.Random(seed)
        self._next = 0

    def choose(self, chain: PromptChain, load: Sequence[int], now: float) -> tuple[int, int, int]:
        return self.pick(chain, load), chain.num_tokens, 0

    def pick(self, chain: PromptChain, load: Sequence[int]) -> int:
        return self.rng.choice(self.alive)

    def least(self, load: Sequence[int]) -> int:
        """Return the replica with the fewest requests, at random if there are several."""
        fewest = min(load[one] for one in self.alive)
        return self.rng.choice([one for one in self.alive if load[one] == fewest])


class RoundRobin(Blind):
    def pick(self, chain: PromptChain, load: Sequence[int]) -> int:
        self._next += 1
        return self.alive[self._next % len(self.alive)]


class LeastLoaded(Blind):
    def pick(self, chain: PromptChain, load: Sequence[int]) -> int:
        return self.least(load)


class _Remembers(Blind):
    """Base of policies that remember which blocks they sent to which replica."""

    def __init__(self, num_replicas: int, seed: int = 0) -> None:
        super().__init__(num_replicas, seed)
        self._holders: dict[int, set[int]] = {}
        self._sizes = [0] * num_replicas

    def matched(self, chain: PromptChain) -> tuple[float, list[int]]:
        """Return the longest match as a share of the prompt, and the replicas that have it."""
        best = set(self.alive)
        depth = 0
        for key in chain.keys:
            holders = self._holders.get(key, set()) & best
            if not holders:
                break
            best = holders
            depth = depth + 1
        return depth / max(1, len(chain.keys)), sorted(best)

    def remember(self, chain: PromptChain, replica: int) -> int:
        for key in chain.keys:
            holders = self._holders.setdefault(key, set())
            self._sizes[replica] += replica not in holders
            holders.add(replica)
        return replica

    def smallest(self) -> list[int]:
        size = min(self._sizes[one] for one in self.alive)
        return [one for one in self.alive if self._sizes[one] == size]

    def spread(self, load: Sequence[int]) -> int:
        return max(load[one] for one in self.alive) - min(load[one] for one in self.alive)


class RayPrefix(_Remembers):
    """Ray's prefix-aware policy.

    If the load is out of balance, it takes the less loaded of two random replicas. With a match of
    a tenth or more, it takes the less loaded of two replicas with the longest match. Otherwise it
    takes one of two replicas for which the fewest blocks are remembered.
    """

    def pick(self, chain: PromptChain, load: Sequence[int]) -> int:
        candidates = self.alive
        if self.spread(load) <= _OUT_OF_BALANCE:
            share, holders = self.matched(chain)
            candidates = holders if share >= 0.1 and holders else self.smallest()
        two = self.rng.sample(candidates, min(2, len(candidates)))
        return self.remember(chain, min(two, key=load.__getitem__))


class CacheAware(_Remembers):
    """SGLang's cache_aware policy.

    If the load is out of balance, it takes the replica with the fewest requests. With a match over
    the threshold, it takes a replica that has it. Otherwise it takes the one with the smallest
    tree.
    """

    def pick(self, chain: PromptChain, load: Sequence[int]) -> int:
        most, fewest = (bound(load[one] for one in self.alive) for bound in (max, min))
        if most - fewest > _OUT_OF_BALANCE and most > 1.5 * fewest:
            return self.remember(chain, self.least(load))
        share, holders = self.matched(chain)
        return self.remember(
            chain, self.rng.choice(holders if share > 0.3 and holders else self.smallest())
        )


class Ours:
    """The package's own router, and its CPU time.

    Attributes:
        tells_at_once: Replicas report everything before each request, which no network could do.
            The remaining distance from `floor` is then not caused by delayed messages.
    """

    tells_at_once = False

    def __init__(self, num_replicas: int, seed: int = 0) -> None:
        self.alive = list(range(num_replicas))
        self.router = PrefixRouter()
        self.router.set_members(map(str, self.alive))
        self.cpu_seconds: list[float] = []
        self.last: RoutingDecision | None = None

    def choose(self, chain: PromptChain, load: Sequence[int], now: float) -> tuple[int, int, int]:
        began = time.process_time()
        choice = self.router.choose(chain, now)[0]
        self.router.note_routed(choice, chain, now)
        self.cpu_seconds.append(time.process_time() - began)
        return int(choice.replica_id), choice.missing_tokens, choice.restored_tokens


class ToldAtOnce(Ours):
    tells_at_once = True


POLICIES = {
    "random": Blind,
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "ray prefix": RayPrefix,
    "sglang": CacheAware,
    "ours": Ours,
    "told at once": ToldAtOnce,
}
