"""Simulator of routing policies: the package's routing code and others on a virtual clock.

    python benchmarks/simulators/router.py [--quick] [--replicas 4 ...] [--traces chats ...]
    [--policies ours ...] [--out FILE]

Traces are those of `eviction.py`. Several copies with different seeds run at once, so that without
any cache the replicas would be busy for `--load` of the time. A block of a trace has 64 tokens
here. "unique" is the chats trace with prompts that have nothing in common. Requests in the first
half of the time only warm the caches and are not counted. Costs of a replica are described in
`router_replicas.py`.

    hit rate     share of the prompt tokens that the replica found in its cache
    p50, p99     seconds from arrival at the router to the first token
    "told at once"   our policy with replicas that report everything before each request, which
                     shows the cost of delayed messages
    "floor"      no policy: the times if each prompt found everything ever computed anywhere, and
                 no request waited
    imbalance    busy time of the busiest replica, divided by the mean
    messages     messages per second from all replicas to the router: events and figures, every
                 200 ms if anything changed
    lost, late   shares of the messages that are lost, or arrive one second late
    unknown      replicas about which the router's beliefs are wrong after all messages arrived
    read         share of the found tokens that came from a tier shared by all replicas (`--shared`:
                 seconds to read a token)
    missed       share of the prompt tokens that the router expected a replica to find but that the
                 replica computed (`--states`: state slots per replica of a hybrid model;
                 `--blocks-alone`: the router ignores states)
    stray        requests sent to a replica that had been removed or was draining
    CPU          time of this process in `choose` and `note_routed`, mean and 99th percentile, in
                 ms, without computing prefix hashes
    memory       size of the router's map of beliefs in MB

Every figure except CPU is the same on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[2] / "tests"))

from benchmarks import harness
from benchmarks.data.eviction_traces import TRACES, Access
from benchmarks.simulators.router_policies import POLICIES, Ours
from benchmarks.simulators.router_replicas import (
    DECODE_STEP,
    POOL_TOKENS,
    PROMPT_TOKEN,
    Job,
    Replica,
    Shared,
    States,
    pool_tokens,
)
from helpers.serve_ray.router_beliefs import beliefs, check_router, num_bytes
from kvboost_edge.kvcache.hashing import prefix_hashes, root_hash
from kvboost_edge.serve_ray.routing.cache_records import OUTSIDE_MASK, Place
from kvboost_edge.serve_ray.routing.prompt_chain import PromptChain, key_of

__all__ = ["Faults", "Outcome", "floor", "simulate", "workload"]

BLOCK_TOKENS = 64
POOL_BLOCKS = 512
EVERY = 0.2  # seconds between two messages of a replica
NETWORK = 0.005  # network delay in seconds, in each direction
_ANSWER_TOKEN = 2e-3  # seconds per output token in a batch with other requests


@dataclasses.dataclass(frozen=True, slots=True)
class Faults:
    """Faults of a run.

    Attributes:
        lost: Share of messages that are lost.
        late: Share of messages that arrive late.
        dies_at: Time at which the first replica dies.
        drains_at: Time at which the second replica drains.
    """

    lost: float = 0.0
    late: float = 0.0
    dies_at: float | None = None
    drains_at: float | None = None


@dataclasses.dataclass(slots=True)
class Outcome:
    """Counts of a run, described in the module docstring."""

    ttft: list[float] = dataclasses.field(default_factory=list)
    hit_tokens: int = 0
    read_tokens: int = 0
    all_hit_tokens: int = 0
    missed_tokens: int = 0
    prompt_tokens: int = 0
    num_messages: int = 0
    num_done: int = 0
    stray: int = 0
    unknown: int = 0
    seconds: float = 0.0
    busy: list[float] = dataclasses.field(default_factory=list)


def workload(
    name: str, num_replicas: int, load: float, seconds: float, most: int | None = None
) -> list[Access]:
    """Return the requests for a number of seconds, in order of arrival.

    As many copies of the trace run as are needed to reach the load in the second half of the time.
    By then, conversations begin as often as they end. At most the first `most` requests are
    returned.
    """
    make = TRACES["chats" if name == "unique" else name]
    copies: list[list[Access]] = []
    work = 0.0
    while load * num_replicas > work:
        copies.append(make(1 + 7 * len(copies), seconds))
        work += sum(_work(one) for one in copies[-1] if one.at >= seconds / 2) / (seconds / 2)
    # the last copy exceeds the load, so all copies are slowed down
    faster = load * num_replicas / work
    tagged = ((one.at / faster, number, one) for number, copy in enumerate(copies) for one in copy)
    chosen = sorted(tagged, key=lambda one: one[:2])[:most]
    fresh = itertools.count()

    def ids(given: Sequence[int]) -> tuple[int, ...]:
        """Return ids that fit in 32 bits. Copies may share ids, because their tenants differ."""
        return tuple(next(fresh) if name == "unique" else one % 2**32 for one in given)

    return [
        one._replace(
            at=at,
            tenant=f"{number} {one.tenant}",
            prompt_ids=ids(one.prompt_ids),
            output_ids=ids(one.output_ids),
        )
        for at, number, one in chosen
    ]


def _work(access: Access) -> float:
    """Return the seconds that a replica needs for a request without cache hits."""
    prompt = len(access.prompt_ids) * BLOCK_TOKENS
    answer = 24 + len(access.output_ids) * BLOCK_TOKENS
    return prompt * PROMPT_TOKEN + answer * _ANSWER_TOKEN


class _Run:
    """Run of one policy on one trace."""

    def __init__(
        self,
        trace: Sequence[Access],
        num_replicas: int,
        policy: str,
        faults: Faults,
        seed: int,
        shared: Shared | None,
        states: States | None,
    ) -> None:
        self.outcome = Outcome()
        self.sees_states = states is not None and states.are_seen
        self.policy = POLICIES[policy](num_replicas, seed)
        self.ours = self.policy if isinstance(self.policy, Ours) else None
        self.replicas = [
            Replica(POOL_BLOCKS, self._done, shared, states) for _ in range(num_replicas)
        ]
        self.numbers = {id(replica): number for number, replica in enumerate(self.replicas)}
        self.load = [0] * num_replicas
        self.gone: set[int] = set()
        self.dead: set[int] = set()
        self.faults = faults
        self.rng = random.Random(seed)
        self.trace = trace
        self.counted_from = trace[-1].at / 2
        self.roots = {
            tenant: root_hash(model_fingerprint="replay", kv_format="", tenant=tenant)
            for tenant in {access.tenant for access in trace}
        }
        self._told_of_tier: list[set[int]] = [set() for _ in range(num_replicas)]
        self._order = itertools.count()
        self._due: list[tuple[float, int, Any, tuple[Any, ...]]] = []

    def at(self, when: float, what: Any, *arguments: Any) -> None:
        heapq.heappush(self._due, (when, next(self._order), what, arguments))

    def run(self) -> Outcome:
        for access in self.trace:
            self.at(access.at, self._arrive, access)
        if self.ours is not None:
            for number in range(len(self.replicas)):
                self.at(EVERY * number / len(self.replicas), self._tell, number)
        for when, what in ((self.faults.dies_at, self._die), (self.faults.drains_at, self._drain)):
            if when is not None:
                self.at(when, what)
        now = 0.0
        while self._due:
            now, _, what, arguments = heapq.heappop(self._due)
            what(*arguments, now)
        self.outcome.seconds = max(now, 1e-9)
        self.outcome.busy = [replica.busy_seconds for replica in self.replicas]
        self.outcome.read_tokens = sum(replica.read_tokens for replica in self.replicas)
        if self.ours is not None:
            self._compare(now)
        return self.outcome

    def _arrive(self, access: Access, now: float) -> None:
        job = Job(access, self.roots[access.tenant], now, BLOCK_TOKENS)
        self._route(job, now)

    def _route(self, job: Job, now: float) -> None:
        hashes = prefix_hashes(pool_tokens(job.access.prompt_ids), job.root, POOL_TOKENS)
        chain = PromptChain.of_hashes(
            hashes, job.num_tokens, BLOCK_TOKENS, has_states=self.sees_states
        )
        if self.ours is not None and self.ours.tells_at_once:
            self._tell_all(now)
        number, job.missing, job.restored = self.policy.choose(chain, self.load, now)
        self.outcome.stray += number in self.gone
        self.load[number] += 1
        self.at(now + NETWORK, self._put, job, number)

    def _put(self, job: Job, number: int, now: float) -> None:
        if number in self.dead:  # the replica died while the request was on its way
            self.load[number] -= 1
            self._route(job, now)
            return
        replica = self.replicas[number]
        before = replica.next_end
        replica.put(job, now)
        if replica.next_end != before:
            self.at(replica.next_end or now, self._step, number)

    def _step(self, number: int, now: float) -> None:
        replica = self.replicas[number]
        if number not in self.dead and replica.next_end == now:  # otherwise the step ends later
            replica.step_done(now)
            if replica.next_end is not None:
                self.at(replica.next_end, self._step, number)

    def _done(self, job: Job, replica: Replica, now: float) -> None:
        self.load[self.numbers[id(replica)]] -= 1
        outcome = self.outcome
        outcome.all_hit_tokens += job.hit_tokens
        outcome.num_done += 1
        assert job.first_at is not None
        if job.arrived_at >= self.counted_from:
            outcome.ttft.append(job.first_at + NETWORK - job.arrived_at)
            outcome.hit_tokens += job.hit_tokens
            outcome.missed_tokens += max(0, job.num_tokens - job.missing - job.hit_tokens)
            outcome.prompt_tokens += job.num_tokens

    def _tell(self, number: int, now: float) -> None:
        """Send a replica's regular message: added and removed blocks, and its figures."""
        if number in self.dead:
            return
        assert self.ours is not None
        replica = self.replicas[number]
        batches = self._batches(replica)
        if batches or replica.next_end is not None:
            report = self._report(number, now)
            self.outcome.num_messages += 1
            if self.rng.random() >= self.faults.lost:
                late = self.rng.random() < self.faults.late
                self.at(now + NETWORK + late, self._told, number, batches, report)
        if self.outcome.num_done < len(self.trace):
            self.at(now + EVERY, self._tell, number)

    def _batches(self, replica: Replica) -> list[Any]:
        """Return the blocks added to and removed from the pool and the tier since the last call."""
        found = [replica.journal.add(replica.manager.events.take())]
        events = replica.tier_events()
        if events is not None:
            keys = {key_of(one, Place.SHARED) for one in events.published}
            self._told_of_tier[self.numbers[id(replica)]] |= {
                key for key in keys if not key & OUTSIDE_MASK
            }
            found.append(replica.journal.add(events, Place.SHARED))
        return [batch for batch in found if batch is not None]

    def _tell_all(self, now: float) -> None:
        """Send all changes of all replicas without delay."""
        assert self.ours is not None
        for number in self.policy.alive:
            replica = self.replicas[number]
            name = str(number)
            self.ours.router.take_events(name, self._batches(replica), now)
            if replica.next_end is not None:
                self.ours.router.take_report(name, self._report(number, now), now)

    def _report(self, number: int, now: float) -> Any:
        replica = self.replicas[number]
        return replica.meter.report(
            now, free_blocks=replica.manager.free_block_count, is_draining=number in self.gone
        )

    def _told(self, number: int, batches: list[Any], report: Any, now: float) -> None:
        assert self.ours is not None
        router = self.ours.router
        name = str(number)
        if not router.take_events(name, batches, now):
            # After a gap, the router asks for the missing messages, which takes two more network
            # delays.
            self.at(now + 2 * NETWORK, self._resync, number)
        router.take_report(name, report, now)

    def _resync(self, number: int, now: float) -> None:
        assert self.ours is not None
        if number in self.gone:
            return
        self.outcome.num_messages += 1
        router = self.ours.router
        name = str(number)
        router.take_events(name, self.replicas[number].journal.since(router.cursor(name)), now)

    def _die(self, now: float) -> None:
        """Remove the first replica. Its requests without a first token go to other replicas."""
        self._leave(0, dies=True)
        replica = self.replicas[0]
        lost = replica.drain_out()
        self.outcome.num_done += len(replica.running)  # these streams end with an error
        for job in lost:
            job.hit_tokens = 0
            job.table = None
            self._route(job, now)

    def _drain(self, now: float) -> None:
        """Drain the second replica, which then accepts no more requests and finishes its own."""
        self._leave(1, dies=False)
        if self.ours is not None:
            self.ours.router.take_report("1", self._report(1, now), now)

    def _leave(self, number: int, dies: bool) -> None:
        self.gone.add(number)
        self.policy.alive.remove(number)
        if dies:
            self.dead.add(number)
            if self.ours is not None:
                self.ours.router.remove(str(number))

    def _compare(self, now: float) -> None:
        """Count wrong beliefs of the router after all remaining messages have arrived."""
        assert self.ours is not None
        router = self.ours.router
        for number, replica in enumerate(self.replicas):
            if number in self.dead:
                continue
            self._batches(replica)
            router.take_events(str(number), replica.journal.since(router.cursor(str(number))), now)
        # sent requests that were never confirmed have expired
        router.choose(PromptChain((), 1, 1), now + 1e6)
        check_router(router)
        for number, replica in enumerate(self.replicas):
            if number not in self.dead:
                believed = beliefs(router, str(number))
                told = {key for key, is_told in believed.items() if is_told}
                held = (
                    set(map(key_of, replica.manager.events.take(whole=True).published))
                    | self._told_of_tier[number]
                )
                self.outcome.unknown += told != held or len(believed) != len(told)


def simulate(
    trace: Sequence[Access],
    num_replicas: int,
    policy: str,
    faults: Faults = Faults(),
    seed: int = 0,
    shared: Shared | None = None,
    states: States | None = None,
) -> tuple[Outcome, Any]:
    """Run a trace; return its counts and the policy after the run."""
    run = _Run(trace, num_replicas, policy, faults, seed, shared, states)
    return run.run(), run.policy


def floor(trace: Sequence[Access]) -> Outcome:
    """Return the time to the first token with a perfect cache."""
    outcome = Outcome(busy=[1.0], seconds=1.0)
    seen = set[tuple[str, int]]()
    for access in trace:
        found = list(
            itertools.takewhile(lambda one, a=access: (a.tenant, one) in seen, access.prompt_ids)
        )
        seen.update((access.tenant, one) for one in (*access.prompt_ids, *access.output_ids))
        if access.at >= trace[-1].at / 2:
            outcome.hit_tokens += len(found) * BLOCK_TOKENS
            outcome.prompt_tokens += len(access.prompt_ids) * BLOCK_TOKENS + 1
            missing = (len(access.prompt_ids) - len(found)) * BLOCK_TOKENS + 1
            outcome.ttft.append(2 * NETWORK + max(missing * PROMPT_TOKEN, DECODE_STEP))
    return outcome


def row_of(
    trace_name: str, num_replicas: int, policy: str, outcome: Outcome, made: Any
) -> dict[str, Any]:
    """Return one row of the table."""
    p50, p99 = np.percentile(outcome.ttft, [50, 99])
    cpu = 1e3 * np.array(made.cpu_seconds) if isinstance(made, Ours) else None
    return {
        "trace": trace_name,
        "replicas": num_replicas,
        "way": policy,
        "hit rate": round(outcome.hit_tokens / outcome.prompt_tokens, 4),
        "p50": round(float(p50), 3),
        "p99": round(float(p99), 3),
        "read": round(outcome.read_tokens / max(1, outcome.all_hit_tokens), 4),
        "missed": None if cpu is None else round(outcome.missed_tokens / outcome.prompt_tokens, 4),
        "imbalance": round(max(outcome.busy) / (sum(outcome.busy) / len(outcome.busy)), 3),
        "messages": round(outcome.num_messages / outcome.seconds, 1),
        "unknown": outcome.unknown if cpu is not None else None,
        "stray": outcome.stray,
        "CPU": None if cpu is None else round(float(cpu.mean()), 4),
        "CPU p99": None if cpu is None else round(float(np.percentile(cpu, 99)), 4),
        "memory": None if cpu is None else round(num_bytes(made.router) / 1e6, 2),
    }


def main() -> None:
    options = harness.parser(__doc__ or "")
    options.add_argument(
        "--replicas",
        type=int,
        nargs="+",
        default=[4, 32, 256],
        help="numbers of replicas (default: %(default)s)",
    )
    options.add_argument(
        "--traces",
        nargs="+",
        default=[*TRACES, "unique"],
        choices=[*TRACES, "unique"],
        help="traces of requests (default: all)",
    )
    usual = [
        name for name in POLICIES if name != "told at once"
    ]  # with many replicas this would take hours
    options.add_argument(
        "--policies",
        nargs="+",
        default=usual,
        choices=list(POLICIES),
        help="routing policies (default: %(default)s)",
    )
    options.add_argument(
        "--load",
        type=float,
        default=0.7,
        help="share of time that replicas would be busy without a cache",
    )
    options.add_argument(
        "--seconds",
        type=float,
        help="length of the trace (default: 9,600 divided by the replicas, at least 150)",
    )
    options.add_argument(
        "--lost", type=float, default=0.0, help="share of lost messages (default: %(default)s)"
    )
    options.add_argument(
        "--late",
        type=float,
        default=0.0,
        help="share of messages that arrive one second late (default: %(default)s)",
    )
    options.add_argument(
        "--shared",
        type=float,
        help="seconds to read a token from a tier that all replicas share",
    )
    options.add_argument(
        "--untold",
        action="store_true",
        help="do not report the contents of the shared tier to the router",
    )
    options.add_argument(
        "--states", type=int, help="simulate a hybrid model with this many state slots per replica"
    )
    options.add_argument("--blocks-alone", action="store_true", help="let the router ignore states")
    given: argparse.Namespace = options.parse_args()
    if given.shared is not None and given.states is not None:
        raise SystemExit(
            "--states and --shared cannot be combined, because the simulated tier stores no states"
        )
    rows: list[dict[str, Any]] = []
    for num_replicas in given.replicas:
        for name in given.traces:
            seconds = given.seconds or max(150.0, 9600 / num_replicas)
            trace = workload(name, num_replicas, given.load, seconds, 300 if given.quick else None)
            rows.append(row_of(name, num_replicas, "floor", floor(trace), None))
            for policy in given.policies:
                shared = None if given.shared is None else Shared(given.shared, not given.untold)
                states = (
                    None if given.states is None else States(given.states, not given.blocks_alone)
                )
                faults = Faults(given.lost, given.late)
                outcome, made = simulate(
                    trace, num_replicas, policy, faults, shared=shared, states=states
                )
                rows.append(row_of(name, num_replicas, policy, outcome, made))
                print(rows[-1], file=sys.stderr)
    harness.report(
        "router", rows, options=given, block_tokens=BLOCK_TOKENS, pool_blocks=POOL_BLOCKS
    )


if __name__ == "__main__":
    main()
