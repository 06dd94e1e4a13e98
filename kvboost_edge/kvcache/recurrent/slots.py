"""Slots for recurrent state, with reference counts, snapshots and eviction. Integers only.

A recurrent layer keeps a fixed-size state that summarizes all tokens so far. A snapshot is the
state after the last token of a published block. A sequence that shares all blocks up to a snapshot
continues from it. Snapshots are immutable. A snapshot is dropped with its block, or earlier if its
slot is needed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from kvboost_edge.errors import CacheCorruption, ConfigError

__all__ = [
    "ANSWER",
    "BRANCH_POINT",
    "CHECKPOINT",
    "HINT",
    "PROMPT",
    "REASONS",
    "SnapshotWatcher",
    "StateSlots",
]

# Reasons for snapshots. The strings are keys of `state_snapshots` in `paged_stats()`, so they must
# not change.
PROMPT = "prompt"
ANSWER = "answer"
BRANCH_POINT = "junction"
HINT = "hint"
CHECKPOINT = "backbone"

# Reason for a snapshot -> its class. Snapshots of a higher class are kept longer. See `StateSlots`.
REASONS = {CHECKPOINT: 0, PROMPT: 1, BRANCH_POINT: 2, HINT: 2, ANSWER: 3}


class _Snapshot(NamedTuple):
    """Snapshot of recurrent state in a slot.

    Attributes:
        block_id: published block after which the snapshot was taken.
        reason: reason for the snapshot, a key of `REASONS`.
        owner: tenant that it belongs to.
    """

    block_id: int
    reason: str
    owner: bytes


class SnapshotWatcher(Protocol):
    """Observer of snapshots, called synchronously in the thread that adds or drops them."""

    def kept(self, block_id: int) -> None: ...

    def dropped(self, block_id: int) -> None: ...


class StateSlots:
    """State slots 0 to num_slots - 1, all empty at first.

    A slot in use by a sequence is never reused. Among snapshots that no sequence is reading, the
    least recently used one is evicted first. Time advances with each snapshot that is taken or
    read. Checkpoints do not advance it, nor do snapshots that replace an earlier one of the same
    growing answer.

    Some snapshots count as used more recently than they were, by a multiple of `num_slots`:

        reason                            bonus   why
        periodic checkpoint                   0   for unforeseen branches
        end of a prompt                       1   the prompt may repeat, or its answer may be edited
        branch point, message boundary        2   several prompts share the text before it
        end of an answer                      3   the conversation continues here

    The bonus is finite, so every unused snapshot is evicted eventually. Reading a snapshot also
    counts as a use of the first branch point or message boundary before it, which more
    conversations share. `benchmarks/simulators/snapshots.py` compares alternatives.

    Each owner is guaranteed half of the slots divided by the number of owners. A new snapshot never
    evicts another owner's snapshots within this share. A flood of requests from one tenant
    therefore cannot evict all snapshots of the others.

    Args:
        num_slots: number of slots.
        pinned: live view of the pinned blocks. If they have at most half of the slots, their
            snapshots are evicted last, and only for running sequences.
    """

    __slots__ = (
        "_by_block",
        "_clock",
        "_free",
        "_num_idle",
        "_num_owned",
        "_pinned",
        "_queues",
        "_read",
        "_refs",
        "_snapshots",
        "_watchers",
    )

    def __init__(self, num_slots: int, pinned: Collection[int] = ()) -> None:
        if isinstance(num_slots, bool) or not isinstance(num_slots, int) or num_slots < 1:
            raise ConfigError(f"num_state_slots={num_slots!r} must be an integer of at least 1")
        self._refs = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._snapshots: dict[int, _Snapshot] = {}  # snapshots by slot
        self._by_block: dict[int, int] = {}
        # One queue per class: slot -> time of the last use, oldest first.
        self._queues: tuple[OrderedDict[int, int], ...] = tuple(
            OrderedDict() for _ in set(REASONS.values())
        )
        self._num_idle = 0  # number of snapshots that no sequence is reading
        self._read: set[int] = set()  # slots of snapshots that some sequence has read
        self._num_owned: Counter[bytes] = Counter()  # number of snapshots by owner
        self._clock = 0
        self._pinned = pinned
        self._watchers: list[SnapshotWatcher] = []

    def watch(self, watcher: SnapshotWatcher) -> None:
        """Report all existing snapshots to a watcher, then every later change."""
        for block_id in self._by_block:
            watcher.kept(block_id)
        self._watchers.append(watcher)

    @property
    def num_slots(self) -> int:
        """Total number of slots."""
        return len(self._refs)

    @property
    def num_used(self) -> int:
        """Number of slots that hold a snapshot or the state of a running sequence."""
        return len(self._refs) - len(self._free)

    @property
    def num_free(self) -> int:
        """Number of empty slots."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Number of slots available to running sequences: empty slots and unread snapshots."""
        return len(self._free) + self._num_idle

    def free_ids(self) -> list[int]:
        """Return the empty slots."""
        return self._free.copy()

    def counts(self) -> dict[str, int]:
        """Return the number of snapshots by reason."""
        found = dict.fromkeys(REASONS, 0)
        for snapshot in list(self._snapshots.values()):
            found[snapshot.reason] += 1
        return found

    def of_block(self, block_id: int) -> int | None:
        """Return the slot of the snapshot after a block, or None."""
        return self._by_block.get(block_id)

    def snapshots(self) -> dict[int, int]:
        """Return the slots of all snapshots, by block id."""
        return dict(self._by_block)

    def is_own(self, slot: int) -> bool:
        """Return whether a slot may be written: it has one reference and holds no snapshot."""
        return self._refs[slot] == 1 and slot not in self._snapshots

    def is_passed(self, block_id: int) -> bool:
        """Return whether a block's snapshot belongs to an answer and was never read."""
        slot = self._by_block.get(block_id)
        return (
            slot is not None and self._snapshots[slot].reason == ANSWER and slot not in self._read
        )

    def take(self, reason: str | None = None, owner: bytes = b"") -> int | None:
        """Allocate a slot with one reference, or return None.

        If no slot is empty, the oldest snapshot is evicted. As a last resort, a running sequence
        may also evict pinned snapshots and those within another owner's share. A new snapshot may
        only evict one that counts as older than itself.

        Args:
            reason: reason for the new snapshot, or None for the state of a running sequence.
            owner: tenant that the slot is for.
        """
        if not self._free:
            victim = self._victim(owner, spares=True)
            if victim is None and reason is None:
                victim = self._victim(owner, spares=False)
            if victim is None or (
                reason is not None and self._age_of(victim) > self._clock + self._grace(reason)
            ):
                return None
            self.drop(self._snapshots[victim].block_id)
        slot = self._free.pop()
        self._refs[slot] = 1
        return slot

    def share(self, slot: int) -> None:
        """Add a reference to a slot in use. This counts as a use if the slot holds a snapshot."""
        if not self._refs[slot]:
            raise CacheCorruption(f"state slot {slot} is empty and cannot be shared")
        if slot in self._snapshots:
            self._read.add(slot)
            self._use(slot)
        self.hold(slot)

    def use_first(self, block_ids: Iterable[int]) -> None:
        """Mark the first branch point or message boundary among these blocks' snapshots as used.

        Args:
            block_ids: cached blocks that a prompt shares, in order.
        """
        for block_id in block_ids:
            slot = self._by_block.get(block_id)
            if slot is not None and self._snapshots[slot].reason in (BRANCH_POINT, HINT):
                self._use(slot)
                return

    def hold(self, slot: int) -> None:
        """Add a reference to a slot without counting it as a use.

        A table does this when it continues from a snapshot that it has just taken.
        """
        if slot in self._snapshots:
            self._num_idle -= self._refs[slot] == 1
        self._refs[slot] += 1

    def release(self, slot: int) -> None:
        """Drop a reference to a slot. Dropping the last one empties the slot."""
        if not self._refs[slot]:
            raise CacheCorruption(f"state slot {slot} is empty and cannot be released")
        self._refs[slot] -= 1
        if not self._refs[slot]:
            self._free.append(slot)
        elif slot in self._snapshots:
            self._num_idle += self._refs[slot] == 1

    def attach(
        self, slot: int, block_id: int, reason: str, owner: bytes = b"", *, moved: bool = False
    ) -> bool:
        """Turn a private slot into the snapshot after a published block.

        If the block already has a snapshot, the existing one is kept with the better of the two
        reasons, and the slot is released.

        Args:
            slot: slot with one reference, held by the caller. The snapshot takes it over.
            block_id: published block.
            reason: reason for the snapshot.
            owner: tenant that the snapshot belongs to.
            moved: the snapshot replaces an earlier one of the same answer, so it does not age the
                others.

        Returns:
            False if the block already had a snapshot.
        """
        known = self._by_block.get(block_id)
        if known is not None:
            self.release(slot)
            if reason != ANSWER and REASONS[reason] >= REASONS[self._snapshots[known].reason]:
                self._give_reason(known, reason)
            return False
        if not self.is_own(slot):
            raise CacheCorruption(
                f"state slot {slot} cannot become a snapshot: it is shared or already a snapshot"
            )
        self._by_block[block_id] = slot
        self._snapshots[slot] = _Snapshot(block_id, reason, owner)
        self._num_owned[owner] += 1
        self._num_idle += 1
        self._use(slot, counts=not moved)
        for watcher in self._watchers:
            watcher.kept(block_id)
        return True

    def demote(self, block_id: int) -> None:
        """Turn a block's snapshot into a checkpoint, because its answer has grown beyond it."""
        slot = self._by_block.get(block_id)
        if slot is not None:
            self._give_reason(slot, CHECKPOINT)

    def drop(self, block_id: int) -> None:
        """Drop the snapshot of a block. Tables that are still reading it keep the slot in use."""
        slot = self._by_block.pop(block_id, None)
        if slot is not None:
            snapshot = self._snapshots.pop(slot)
            del self._queues[REASONS[snapshot.reason]][slot]
            self._num_owned[snapshot.owner] -= 1
            if not self._num_owned[snapshot.owner]:
                del self._num_owned[snapshot.owner]
            self._num_idle -= self._refs[slot] == 1
            self._read.discard(slot)
            self.release(slot)
            for watcher in self._watchers:
                watcher.dropped(block_id)

    def check(self, references: Iterable[int]) -> None:
        """Recount all references and snapshots, and raise CacheCorruption on any mismatch.

        Args:
            references: one slot for each reference that a table holds.
        """
        counted = [0] * self.num_slots
        for slot in (*references, *self._by_block.values()):
            counted[slot] += 1
        if counted != self._refs:
            raise CacheCorruption(
                f"reference counts of state slots are {self._refs}, but should be {counted}"
            )
        if sorted(self._free) != [slot for slot, count in enumerate(counted) if not count]:
            raise CacheCorruption(
                f"free state slots are {sorted(self._free)}, but reference counts are {counted}"
            )
        if {slot: one.block_id for slot, one in self._snapshots.items()} != {
            s: b for b, s in self._by_block.items()
        }:
            raise CacheCorruption("the snapshots by slot and by block do not match")
        queued = {slot: rank for rank, queue in enumerate(self._queues) for slot in queue}
        if queued != {slot: REASONS[one.reason] for slot, one in self._snapshots.items()}:
            raise CacheCorruption("the eviction queues do not match the snapshots")
        if Counter(one.owner for one in self._snapshots.values()) != self._num_owned:
            raise CacheCorruption(
                f"snapshot counts by owner are wrong: {sorted(self._num_owned.values())}"
            )
        if not self._read <= set(self._snapshots):
            raise CacheCorruption(
                f"state slots {sorted(self._read - set(self._snapshots))} are marked as read "
                "snapshots but hold none"
            )
        if self._num_idle != sum(counted[slot] == 1 for slot in self._snapshots):
            raise CacheCorruption(f"the count of idle snapshots is wrong: {self._num_idle}")

    def _give_reason(self, slot: int, reason: str) -> None:
        before = self._snapshots[slot]
        del self._queues[REASONS[before.reason]][slot]
        self._snapshots[slot] = before._replace(reason=reason)
        self._use(slot)

    def _use(self, slot: int, *, counts: bool = True) -> None:
        reason = self._snapshots[slot].reason
        self._clock += counts and reason != CHECKPOINT
        queue = self._queues[REASONS[reason]]
        queue[slot] = self._clock
        queue.move_to_end(slot)

    def _grace(self, reason: str) -> int:
        return REASONS[reason] * self.num_slots

    def _age_of(self, slot: int) -> int:
        """Return the time of a snapshot's last use, including the bonus for its reason."""
        reason = self._snapshots[slot].reason
        return self._queues[REASONS[reason]][slot] + self._grace(reason)

    def _victim(self, owner: bytes, *, spares: bool) -> int | None:
        """Return the slot of the unread snapshot to evict next for an owner, or None.

        If `spares` is true, pinned snapshots and those within other owners' shares are excluded.
        """
        if not self._num_idle:
            return None
        is_spared = self._spared_from(owner) if spares else lambda _: False
        oldest = [self._oldest(queue, is_spared) for queue in self._queues]
        return min((slot for slot in oldest if slot is not None), key=self._age_of, default=None)

    def _oldest(
        self, queue: OrderedDict[int, int], is_spared: Callable[[_Snapshot], bool]
    ) -> int | None:
        for _ in range(len(queue)):
            slot = next(iter(queue))
            if self._refs[slot] == 1 and not is_spared(self._snapshots[slot]):
                return slot
            # This slot is being read or spared. Move it to the end, so the next search does not
            # visit it again.
            queue[slot] = self._clock
            queue.move_to_end(slot)
        return None

    def _spared_from(self, owner: bytes) -> Callable[[_Snapshot], bool]:
        """Return a predicate for snapshots that must not be evicted for this owner."""
        part = self.num_slots // (2 * (len(self._num_owned) + (owner not in self._num_owned)))
        pinned = self._pinned
        if (
            not pinned
            or 2 * sum(block_id in pinned for block_id in self._by_block) > self.num_slots
        ):
            pinned = ()

        def is_spared(snapshot: _Snapshot) -> bool:
            if snapshot.owner != owner and self._num_owned[snapshot.owner] <= part:
                return True
            return snapshot.reason != CHECKPOINT and snapshot.block_id in pinned

        return is_spared
