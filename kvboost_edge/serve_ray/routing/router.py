"""The router: it tracks the cache content and load of replicas, and places requests."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvboost_edge.serve_ray.routing.cache_records import (
    Cursor,
    EventBatch,
    Place,
    ReplicaReport,
    RoutingDecision,
)
from kvboost_edge.serve_ray.routing.prompt_chain import PromptChain
from kvboost_edge.serve_ray.routing.replica_loads import ReplicaLoads
from kvboost_edge.serve_ray.routing.residency import Level, Residency

__all__ = ["PrefixRouter", "choose", "home", "seed_of"]

Depths = npt.NDArray[np.int64]

_KEY_SHARE = 0.8  # factor on the time of the preferred replica of a cache key
_OTHERS = 0.5  # weight of the delay that computing causes for later requests
_DISK_LEVELS = 8  # parts of a chain; an eighth is read quickly
_FEW_HOLDERS = 8  # Up to this many bits are handled one by one.


_TIE_SHARE = 0.02
_TIE_SECONDS = 1e-3

Seeds = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.intp]


def seed_of(replica_id: str) -> int:
    """Return a replica's seed for rendezvous hashing. It is the same in every process."""
    return int.from_bytes(
        hashlib.sha256(replica_id.encode("utf-8", "surrogatepass")).digest()[:8], "little"
    )


def home(key: int, slots: Slots, seeds: Seeds) -> int:
    """Return the home slot of a key by rendezvous hashing.

    The home of a key changes only if its slot is removed, or if a new slot becomes the home.
    """
    mixed = seeds[slots] ^ np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return int(slots[np.argmax(mixed ^ (mixed >> np.uint64(31)))])


def choose(
    seconds: npt.NDArray[np.float64], depths: npt.NDArray[np.int64], key: int, seeds: Seeds
) -> int:
    """Return the slot with the shortest time; inf marks unusable slots.

    Among nearly equal slots, the ones with the most blocks are preferred, then the home of `key`.
    """
    least = float(seconds.min())
    near = np.flatnonzero(seconds <= least * (1 + _TIE_SHARE) + _TIE_SECONDS)
    if len(near) == 1:
        return int(near[0])
    held = depths[near]
    return home(key, near[held == held.max()], seeds)


class PrefixRouter:
    """Router that chooses replicas by their expected time to first token. Not thread-safe.

    Blocks that are neither in the pool nor in a tier are computed, and blocks in a tier are read.
    For a hybrid model, blocks after the deepest recurrent state of a replica are computed too.

    Beliefs about caches may be wrong, which only costs time. The set of usable replicas is always
    exact: those that were added, not removed and are not draining. `now` is a monotonic time in
    seconds (`time.monotonic`).

    Args:
        max_entries: Most (replica, block) pairs to remember, see `Residency`.
        believed_seconds: Lifetime of the belief that a replica holds a prompt sent to it.
        report_seconds: Maximum age of a report when it arrives.
    """

    def __init__(
        self,
        *,
        max_entries: int = 4_000_000,
        believed_seconds: float = 120.0,
        report_seconds: float = 0.05,
    ) -> None:
        self._residency = Residency(max_entries, believed_seconds)
        self._loads = ReplicaLoads(report_seconds)
        self._slots: dict[str, int] = {}
        self._ids: list[str | None] = []
        self._free: list[int] = []
        self._seeds = np.zeros(0, np.uint64)
        self._num_routed = 0

    def set_members(self, replica_ids: Iterable[str]) -> None:
        """Set the replicas. New ones hold nothing, and beliefs about removed ones are dropped."""
        members = dict.fromkeys(replica_ids)
        for replica_id in self._slots.keys() - members.keys():
            self.remove(replica_id)
        for replica_id in members:
            self.add(replica_id)

    def members(self) -> list[str]:
        """Return the names of the replicas."""
        return list(self._slots)

    def add(self, replica_id: str) -> None:
        """Add a replica. A known replica is unchanged."""
        if replica_id in self._slots:
            return
        slot = self._free.pop() if self._free else len(self._ids)
        if slot == len(self._ids):
            self._ids.append(None)
        self._ids[slot] = replica_id
        self._slots[replica_id] = slot
        self._residency.open(slot)
        self._loads.open(slot)
        if len(self._seeds) < len(self._loads.usable):
            more = len(self._loads.usable) - len(self._seeds)
            self._seeds = np.concatenate([self._seeds, np.zeros(more, np.uint64)])
        self._seeds[slot] = seed_of(replica_id)

    def remove(self, replica_id: str) -> None:
        """Remove a replica. An unknown replica is ignored."""
        slot = self._slots.pop(replica_id, None)
        if slot is None:
            return
        self._residency.close(slot)
        self._loads.close(slot)
        self._ids[slot] = None
        self._free.append(slot)

    def cursor(self, replica_id: str) -> Cursor:
        """Return a replica's position for `Journal.since`; NOTHING_KNOWN if content is missing."""
        return self._residency.cursor(self._slots[replica_id])

    def take_events(self, replica_id: str, batches: Iterable[EventBatch], now: float) -> bool:
        """Apply a replica's event batches; return False if some are missing.

        After False, poll again from `cursor`. Repeated and late batches are ignored. For an unknown
        replica, nothing is applied and True is returned.
        """
        slot = self._slots.get(replica_id)
        if slot is None:
            return True
        is_synced = True
        for batch in batches:
            is_synced = self._residency.apply(slot, batch, now)
        return is_synced

    def take_report(self, replica_id: str, report: ReplicaReport, now: float) -> None:
        """Apply a replica's load report. Late reports and unknown replicas are ignored."""
        slot = self._slots.get(replica_id)
        if slot is not None:
            self._loads.take(slot, report, now)

    def choose(
        self, chain: PromptChain, now: float, among: Collection[str] | None = None, count: int = 1
    ) -> list[RoutingDecision]:
        """Return at most `count` replicas for a prompt, best first; [] if no replica is usable.

        The call removes expired beliefs and changes nothing else.

        Args:
            chain: The prompt.
            now: Monotonic time in seconds.
            among: Names of the replicas to choose from; None for all.
            count: Maximum number of replicas to return.
        """
        self._residency.expire(now)
        usable = self._usable(among)
        slots = np.flatnonzero(usable)
        if not len(slots):
            return []
        levels = self._residency.levels(chain.keys)
        depths = ties = held = _depths(levels, len(usable))
        if chain.states:
            # Of equal replicas, prefer the one with more blocks, because the next state will be
            # after them.
            depths = self._state_ends(chain, Place.POOL, len(usable))
            ties = depths * (len(chain.keys) + 1) + held
        most = chain.num_tokens - 1  # The last token is always computed.
        matched = np.minimum(depths * chain.block_size, most)
        reached, restoring = self._restoring(chain, depths, held)
        served = np.minimum(reached * chain.block_size, most)
        shared = np.minimum(np.maximum(held, depths), reached)
        present = np.minimum(shared * chain.block_size, most) - matched
        missing_blocks = (-(-chain.num_tokens // chain.block_size) - shared).astype(np.float64)
        missing_tokens = (chain.num_tokens - served).astype(np.float64)
        seconds, own = self._loads.seconds(missing_tokens, missing_blocks, now, restoring)
        # Computing delays later requests too, so it weighs more than waiting.
        ranks = np.where(usable, seconds + _OTHERS * own, np.inf)
        if chain.cache_key is not None:
            ranks[home(chain.cache_key, slots, self._seeds)] *= _KEY_SHARE
        chosen = [choose(ranks, ties, self._tie_key(chain, levels), self._seeds)]
        if count > 1:
            order = slots[np.argsort(ranks[slots], kind="stable")]
            chosen += [int(slot) for slot in order[:count] if slot != chosen[0]][: count - 1]
        found: list[RoutingDecision] = []
        for slot in chosen:
            replica_id = self._ids[slot]
            here = int(matched[slot])
            there = int(served[slot])
            assert replica_id is not None  # Only members are usable.
            expected = float(seconds[slot])
            found.append(
                RoutingDecision(
                    replica_id,
                    here,
                    chain.num_tokens - there,
                    expected,
                    there - here,
                    int(present[slot]),
                )
            )
        return found

    def _restoring(
        self, chain: PromptChain, depths: Depths, held: Depths
    ) -> tuple[Depths, npt.NDArray[np.float64] | float]:
        """Return the blocks that each slot has after reading its tiers, and the seconds to read.

        Both are [slots].
        """
        # A replica reads its disk before the shared server, and both after the `held` blocks of its
        # pool. Of the states, only the deepest one is read. It takes as long as a block.
        on_disk, on_server = (
            self._loads.token_seconds(place) for place in (Place.DISK, Place.SHARED)
        )
        disk_end: Depths = depths
        if (chain.disk.keys or chain.states) and on_disk.any():
            disk_end = np.where(
                on_disk > 0, np.maximum(self._on_disk(chain, len(depths)), depths), depths
            )
        reached = disk_end
        if (chain.shared.keys or chain.states) and on_server.any():
            reached = np.where(
                on_server > 0, np.maximum(self._on_server(chain), disk_end), disk_end
            )
        if reached is depths:
            return depths, 0.0
        in_pool = np.maximum(held, depths)  # A state in the pool implies the blocks before it.
        from_disk = disk_end - np.minimum(in_pool, disk_end)
        from_server = reached - np.minimum(np.maximum(in_pool, disk_end), reached)
        if chain.states:
            from_disk += (depths < disk_end) & (disk_end == reached)
            from_server += disk_end < reached
        return (
            reached,
            from_disk * chain.block_size * on_disk + from_server * chain.block_size * on_server,
        )

    def _on_disk(self, chain: PromptChain, num_slots: int) -> Depths:
        """Return the number of usable blocks of a chain on each slot's disk, [num_slots]."""
        if chain.states:
            return self._state_ends(chain, Place.DISK, num_slots)
        # A disk evicts a block only after all later blocks.
        told = _depths(self._residency.levels(chain.disk.keys, _DISK_LEVELS), num_slots)
        ends: Depths = np.array((0, *chain.disk.ends))
        return ends[told]

    def _on_server(self, chain: PromptChain) -> int:
        """Return the number of usable blocks of a chain on the shared server."""
        # A state is written after its blocks, and has their lifetime. Blocks that were not used
        # recently exist, but are not reported.
        if not chain.states:
            return (0, *chain.shared.ends)[self._residency.reach(chain.shared.keys)]
        levels = self._residency.deepest(chain.servable_states(Place.SHARED))
        return levels[-1].num_blocks if levels else 0

    def _state_ends(self, chain: PromptChain, place: Place, num_slots: int) -> Depths:
        """Return the blocks before each slot's last recurrent state at a place, [num_slots]."""
        return _depths(self._residency.deepest(chain.servable_states(place)), num_slots)

    def _usable(self, among: Collection[str] | None) -> npt.NDArray[np.bool_]:
        if among is None:
            return self._loads.usable
        asked = np.zeros(len(self._loads.usable), bool)
        asked[[slot for slot in map(self._slots.get, among) if slot is not None]] = True
        return asked & self._loads.usable

    def _tie_key(self, chain: PromptChain, levels: Sequence[Level]) -> int:
        """Return the key whose home is preferred among equal slots."""
        # This is the first block after the known part, so prompts with the same continuation meet.
        if chain.cache_key is not None:
            return chain.cache_key
        if not chain.keys:
            # Without full blocks nothing can be reused, so requests are spread evenly.
            return self._num_routed * 0x9E3779B97F4A7C15 % 2**64
        known = levels[-1].num_blocks if levels else 0
        return chain.keys[min(known, len(chain.keys) - 1)]

    def note_routed(self, choice: RoutingDecision, chain: PromptChain, now: float) -> None:
        """Record that a request was sent to a replica.

        Until the next report, its tokens count as queued. Its blocks count as cached for
        `believed_seconds`.
        """
        self._num_routed += 1
        slot = self._slots.get(choice.replica_id)
        if slot is None:
            return
        taking = choice.missing_tokens + choice.restored_tokens - choice.present_tokens
        num_blocks = -(-taking // chain.block_size)
        self._loads.note_routed(slot, choice.missing_tokens, num_blocks, now)
        self._residency.believe(slot, chain.keys, choice.matched_tokens // chain.block_size, now)
        if chain.states:  # for a repeated prompt, and its continuation
            ends = {*chain.servable_states(Place.POOL)[-1:], *chain.states[Place.POOL][-1:]}
            self._residency.believe(slot, tuple(ends), 0, now)

    def note_not_started(self, choice: RoutingDecision) -> None:
        """Undo `note_routed` for a request that did not start on the replica."""
        slot = self._slots.get(choice.replica_id)
        if slot is not None:
            self._loads.note_not_started(slot, choice.missing_tokens)


def _depths(levels: Sequence[Level], num_slots: int) -> Depths:
    """Return the number of a chain's blocks that each slot holds, [num_slots]."""
    depths = np.zeros(num_slots, np.int64)
    many = [level for level in levels if level.holders.bit_count() > _FEW_HOLDERS]
    if many:
        size = -(-num_slots // 8)
        packed = np.frombuffer(
            b"".join(level.holders.to_bytes(size, "little") for level in many), np.uint8
        )
        bits = np.unpackbits(
            packed.reshape(len(many), size), axis=1, count=num_slots, bitorder="little"
        )
        ends = np.array([0, *(level.num_blocks for level in many)])
        # A holder of a level holds all earlier levels, so their number identifies its last one.
        depths = ends[bits.sum(axis=0, dtype=np.uint8)]
    for num_blocks, holders in levels[len(many) :]:
        while holders:
            low = holders & -holders
            depths[low.bit_length() - 1] = num_blocks
            holders ^= low
    return depths
