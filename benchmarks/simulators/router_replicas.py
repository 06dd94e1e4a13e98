"""Simulated replica: the real block manager, and steps on a virtual clock.

Costs were measured for the 0.5B shape in Q4_0 on two cores (LOG.md): 1.8 ms per prompt token, 10 ms
for a decode step of one sequence, and 7.5% more for each further sequence. A step computes at most
512 prompt tokens, first come first served, and one token of each running request. A block of the
manager stands for one id of the trace.

With `States` the model is a hybrid model. A prompt is one pass and an answer another, and
everything after the deepest stored state is recomputed.

With a `Shared` tier, everything that any replica computed is available at once and forever. The
part of a prompt that is not in the pool is read from the tier while other prompts are computed. The
part that is not in the tier is computed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from benchmarks.data.eviction_traces import Access
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.events import CacheEvents
from kvboost_edge.kvcache.eviction.policy import TenantFloors
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.kvcache.recurrent.snapshots import StateSizes
from kvboost_edge.serve_ray.routing.cache_records import Place
from kvboost_edge.serve_ray.routing.event_journal import Journal
from kvboost_edge.serve_ray.routing.load_meter import Meter

__all__ = [
    "DECODE_STEP",
    "POOL_TOKENS",
    "PROMPT_TOKEN",
    "Job",
    "Replica",
    "Shared",
    "States",
    "pool_tokens",
]

PROMPT_TOKEN = 1.8e-3
DECODE_STEP = 10e-3
DECODE_MORE = 0.075
STEP_TOKENS = 512
PLACES = 16
# Tokens per block of the manager. Every token of a block is the block's id, and one extra token
# makes the whole prompt matchable.
POOL_TOKENS = 2


def pool_tokens(ids: Sequence[int]) -> list[int]:
    """Return the token ids that stand for blocks of a trace in the manager."""
    return [token for one in ids for token in (one, one)]


@dataclasses.dataclass(slots=True, eq=False)
class Shared:
    """A tier that all replicas read and write.

    Attributes:
        token_seconds: Seconds to read a prompt token.
        is_told: Whether replicas report the contents of the tier to the router.
    """

    token_seconds: float
    is_told: bool = True
    blocks: set[bytes] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, slots=True)
class States:
    """Settings for a hybrid model: state slots per replica, and whether the router uses states."""

    num_slots: int
    are_seen: bool = True


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """A request in a replica.

    Attributes:
        access: The request of the trace. Its blocks have `block_tokens` tokens each.
        root: Root hash of its tenant's prefix chains.
        arrived_at: Time of arrival at the router.
        missing: Prompt tokens that the router believed to be missing.
        restored: Prompt tokens that the router believed to be in the tier.
        read_blocks: Number of blocks that will have been read from the tier.
        read_until: Time when they will have been read.
    """

    access: Access
    root: bytes
    arrived_at: float
    block_tokens: int
    missing: int = 0
    restored: int = 0
    read_blocks: int = 0
    read_until: float | None = None
    first_at: float | None = None
    hit_tokens: int = 0
    to_prefill: int = 0
    to_answer: int = 0
    table: BlockTable | None = None
    prompt: list[int] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [*pool_tokens((*self.access.prompt_ids, *self.access.output_ids)), 0]
        self.prompt = [*self.tokens[: len(self.access.prompt_ids) * POOL_TOKENS], 0]
        self.to_answer = 24 + len(self.access.output_ids) * self.block_tokens

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens. The last token belongs to no block."""
        return len(self.access.prompt_ids) * self.block_tokens + 1


class Replica:
    """A replica that computes its requests step by step.

    The caller uses `put` for new requests, and `step_done` at the time given by `next_end`.
    """

    def __init__(
        self,
        num_blocks: int,
        done: Callable[[Job, Replica, float], None],
        shared: Shared | None = None,
        states: States | None = None,
    ) -> None:
        sizes = None if states is None else StateSizes(states.num_slots)
        self.manager = KVCacheManager(
            num_blocks, POOL_TOKENS, policy=TenantFloors, state_sizes=sizes
        )
        self.journal = Journal()
        tiers = {Place.SHARED: shared.token_seconds} if shared and shared.is_told else None
        self.meter = Meter(
            seconds_per_token=PROMPT_TOKEN, step_tokens=STEP_TOKENS, max_running=PLACES, tiers=tiers
        )
        self.shared = shared
        self.read_tokens = 0
        self._seen: dict[bytes, None] = {}
        self._is_idle = False  # whether all requests wait for a read from the tier
        self.waiting: deque[Job] = deque()
        self.prefilling: list[Job] = []
        self.running: list[Job] = []
        self.next_end: float | None = None
        self.busy_seconds = 0.0
        self._began = self._step_seconds = 0.0
        self._num_steps = 0
        self._prefilled: list[tuple[Job, int]] = []
        self._done = done

    def put(self, job: Job, now: float) -> None:
        """Add a request. A run of decode steps is cut at the end of the current step."""
        self.meter.begin(job, job.missing, now, job.restored)
        self.waiting.append(job)
        if self.next_end is None or self._is_idle:
            self._begin(now)
        elif self._num_steps > 1:
            self._num_steps = min(
                self._num_steps, int((now - self._began) / self._step_seconds) + 1
            )
            self.next_end = self._began + self._num_steps * self._step_seconds

    def tier_events(self) -> CacheEvents | None:
        """Return the blocks written to the tier or read from it since the last call.

        Returns None if the router does not receive the contents of the tier.
        """
        seen = self._seen
        self._seen = {}
        return (
            CacheEvents(False, tuple(seen), ())
            if self.shared is not None and self.shared.is_told
            else None
        )

    def _keep(self, job: Job) -> None:
        """Put the computed blocks of a request into the tier."""
        if self.shared is not None:
            assert job.table is not None
            hashes = self.manager.content.chain(job.table)
            self.shared.blocks.update(hashes)
            self._seen.update(dict.fromkeys(hashes))

    def _reads(self, job: Job, now: float) -> bool:
        """Return whether a part of the prompt is being read from the tier.

        The first call starts the reading.
        """
        if self.shared is None:
            return False
        if job.read_until is None:
            after = self.manager.content.addresses_after(job.prompt, job.root)
            there = itertools.takewhile(
                self.shared.blocks.__contains__, (one.prefix_hash for one in after.addresses)
            )
            count = sum(1 for _ in there)
            job.read_blocks = after.num_shared + count
            job.read_until = now + count * job.block_tokens * self.shared.token_seconds
        return job.read_until > now

    def drain_out(self) -> list[Job]:
        """Stop the replica and return its requests without a first token."""
        unstarted = [*self.waiting, *self.prefilling]
        self.next_end = None
        return unstarted

    def step_done(self, now: float) -> None:
        """End the step or the run of decode steps."""
        self.busy_seconds += 0.0 if self._is_idle else now - self._began
        for job in list(self.running):
            job.to_answer -= self._num_steps
            if job.to_answer <= 0:
                self._finish(job, now)
        for job, num_tokens in self._prefilled:
            job.to_prefill -= num_tokens
            if job.to_prefill <= 0:
                self.prefilling.remove(job)
                self.running.append(job)
                self._commit(job, len(job.prompt) - 1)
                self._keep(job)
                job.first_at = now
                job.to_answer -= 1
                self.meter.first_token(job, now)
        self._begin(now)

    def _finish(self, job: Job, now: float) -> None:
        assert job.table is not None
        self.running.remove(job)
        self._commit(job, len(job.tokens) - 1)
        self._keep(job)
        self.manager.free(job.table)
        self.meter.end(job, now, 24 + len(job.access.output_ids) * job.block_tokens)
        self._done(job, self, now)

    def _commit(self, job: Job, stop: int) -> None:
        """Commit the tokens up to a position, computed in one pass."""
        assert job.table is not None
        start = job.table.num_computed_tokens
        states = self.manager.states
        if states is not None and stop > start:
            states.prepare(job.table)
            states.plan(job.table, start, stop)
        self.manager.commit(job.table, job.tokens, stop)

    def _admit(self, now: float) -> None:
        """Admit waiting requests in order while there is room.

        A request whose blocks are being computed by another one waits for it.
        """
        passed: list[Job] = []
        while self.waiting and len(self.running) + len(self.prefilling) < PLACES:
            job = self.waiting.popleft()
            if self.manager.awaited_hash(job.prompt, job.root) is not None or self._reads(job, now):
                passed.append(job)
                continue
            table = self.manager.open_table(job.prompt, job.root, owner=job.root)
            if self.manager.blocks_needed(table, len(job.tokens)) > self.manager.free_block_count:
                self.manager.free(table)
                passed.append(job)
                break
            self.manager.extend(table, len(job.tokens))
            job.table = table
            job.hit_tokens = table.num_cached_tokens // POOL_TOKENS * job.block_tokens
            read = max(0, job.read_blocks * job.block_tokens - job.hit_tokens)
            self.read_tokens += read
            job.hit_tokens += read
            job.to_prefill = job.num_tokens - job.hit_tokens
            self.prefilling.append(job)
        self.waiting.extendleft(reversed(passed))

    def _begin(self, now: float) -> None:
        """Start the next step, or wait if there is nothing to do."""
        self._admit(now)
        self._is_idle = False
        self._prefilled = []
        left = STEP_TOKENS - len(self.running)
        for job in self.prefilling:
            if left > 0:
                self._prefilled.append((job, min(left, job.to_prefill)))
                left -= self._prefilled[-1][1]
        num_tokens = sum(tokens for _, tokens in self._prefilled)
        if not num_tokens and not self.running:
            arriving = [
                job.read_until
                for job in self.waiting
                if job.read_until is not None and job.read_until > now
            ]
            self._is_idle = bool(arriving)
            self._num_steps = 0
            self.next_end = min(arriving, default=None)
            return
        decode = (
            DECODE_STEP * (1 + DECODE_MORE * (len(self.running) - 1))
            if self.running
            else DECODE_STEP
        )
        self._step_seconds = max(decode, PROMPT_TOKEN * (num_tokens + len(self.running)))
        # Decode steps are alike until the first request finishes, if no request waits.
        alone = not num_tokens and not self.waiting
        self._num_steps = min(job.to_answer for job in self.running) if alone else 1
        self._began = now
        self.next_end = now + self._num_steps * self._step_seconds
