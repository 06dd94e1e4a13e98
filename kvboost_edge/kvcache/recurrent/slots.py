"""Slots for recurrent state: reference counts, snapshots and their eviction, in integers only.

A recurrent layer keeps a fixed-size state of all tokens before the current one. A snapshot is the
state after the last token of a published block. A sequence that shares the blocks up to there
continues from it. A snapshot never changes. It ends with its block, or earlier when its slot is
needed.
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

# Kinds of snapshots. The strings are keys of `state_snapshots` in `paged_stats()`, so they must not
# change.
PROMPT = "prompt"
ANSWER = "answer"
BRANCH_POINT = "junction"
HINT = "hint"
CHECKPOINT = "backbone"

# Reason of a snapshot -> its class. Snapshots of a higher class count as used more recently than
# they were, see `StateSlots`.
REASONS = {CHECKPOINT: 0, PROMPT: 1, BRANCH_POINT: 2, HINT: 2, ANSWER: 3}


class _Snapshot(NamedTuple):
    """Snapshot in a slot.

    Attributes:
        block_id: published block after which it was taken.
        reason: kind of snapshot, a key of `REASONS`.
        owner: tenant that it belongs to.
    """

    block_id: int
    reason: str
    owner: bytes


class SnapshotWatcher(Protocol):
    """Receiver of new and dropped snapshots, called at once in the thread that changes them."""

    def kept(self, block_id: int) -> None: ...

    def dropped(self, block_id: int) -> None: ...


class StateSlots:
    """State slots 0 to num_slots - 1, all free at first.

    A referenced slot is never reused. Among snapshots that no sequence reads, the least recently
    used one is evicted first. Its age is counted in snapshots taken or read. Checkpoints, and
    snapshots that move along with a growing answer, do not count.

    Some kinds count as used more recently than they were, by a multiple of `num_slots`:

        kind                              bonus   reason
        periodic checkpoint                   0   for unforeseen branches
        end of a prompt                       1   the prompt may repeat, or its answer may be edited
        branch point, message boundary        2   several prompts share the text before it
        end of an answer                      3   the conversation continues here

    No bonus lasts forever. A read also uses the first branch point or message boundary before it,
    which more conversations share. `benchmarks/simulators/snapshots.py` compares alternatives.

    Each owner is guaranteed half of the slots divided by the number of owners. A new snapshot never
    evicts one of another owner within this share, so a flood of requests leaves other tenants their
    snapshots.

    Args:
        num_slots: number of slots.
        pinned: pinned blocks, a live view. While they are at most half the slots, their snapshots
            are evicted last, and only for running sequences.
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
        self._snapshots: dict[int, _Snapshot] = {}  # by slot
        self._by_block: dict[int, int] = {}
        # By class: slot -> time of the last use, oldest first.
        self._queues: tuple[OrderedDict[int, int], ...] = tuple(
            OrderedDict() for _ in set(REASONS.values())
        )
        self._num_idle = 0  # snapshots that no sequence reads
        self._read: set[int] = set()  # slots of snapshots that a sequence has read
        self._num_owned: Counter[bytes] = Counter()  # snapshots by owner
        self._clock = 0
        self._pinned = pinned
        self._watchers: list[SnapshotWatcher] = []

    def watch(self, watcher: SnapshotWatcher) -> None:
        """Report all existing snapshots to a watcher, and every change from now on."""
        for block_id in self._by_block:
            watcher.kept(block_id)
        self._watchers.append(watcher)

    @property
    def num_slots(self) -> int:
        """Number of slots."""
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
        """Number of slots for running sequences: empty ones and snapshots without readers."""
        return len(self._free) + self._num_idle

    def free_ids(self) -> list[int]:
        """Return the empty slots."""
        return self._free.copy()

    def counts(self) -> dict[str, int]:
        """Return the number of snapshots for every reason."""
        found = dict.fromkeys(REASONS, 0)
        for snapshot in list(self._snapshots.values()):
            found[snapshot.reason] += 1
        return found

    def of_block(self, block_id: int) -> int | None:
        """Return the slot of the snapshot after a published block, or None."""
        return self._by_block.get(block_id)

    def snapshots(self) -> dict[int, int]:
        """Return the slots of all snapshots by block id."""
        return dict(self._by_block)

    def is_own(self, slot: int) -> bool:
        """Return whether the slot may be written: one reference, and not a snapshot."""
        return self._refs[slot] == 1 and slot not in self._snapshots

    def is_passed(self, block_id: int) -> bool:
        """Return whether a block's snapshot is of an answer and was never read."""
        slot = self._by_block.get(block_id)
        return (
            slot is not None and self._snapshots[slot].reason == ANSWER and slot not in self._read
        )

    def take(self, reason: str | None = None, owner: bytes = b"") -> int | None:
        """Return a slot with one reference, or None.

        If no slot is empty, the oldest snapshot is evicted. A running sequence may also evict
        pinned snapshots, and those within another owner's share, if there are no others. A new
        snapshot evicts an old one only if that counts as older.

        Args:
            reason: reason of the new snapshot; None for the state of a running sequence.
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
        """Add a reference to a slot that has some. This counts as a use of a snapshot."""
        if not self._refs[slot]:
            raise CacheCorruption(f"state slot {slot} is empty and cannot be shared")
        if slot in self._snapshots:
            self._read.add(slot)
            self._use(slot)
        self.hold(slot)

    def use_first(self, block_ids: Iterable[int]) -> None:
        """Mark the first snapshot at a branch point or message boundary as used.

        Args:
            block_ids: blocks that a prompt shares with others.
        """
        for block_id in block_ids:
            slot = self._by_block.get(block_id)
            if slot is not None and self._snapshots[slot].reason in (BRANCH_POINT, HINT):
                self._use(slot)
                return

    def hold(self, slot: int) -> None:
        """Add a reference without counting a use.

        A table does this when it continues from a snapshot that it just took.
        """
        if slot in self._snapshots:
            self._num_idle -= self._refs[slot] == 1
        self._refs[slot] += 1

    def release(self, slot: int) -> None:
        """Drop a reference; the last one empties the slot."""
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
        """Make an own slot the snapshot after a published block, and return True.

        If the block already has a snapshot, that one stays with the better of both reasons. The
        slot is then released, and the result is False.

        Args:
            slot: slot that only the caller references. The snapshot takes over the reference.
            block_id: published block.
            reason: reason of the snapshot.
            owner: tenant that it belongs to.
            moved: it replaces an earlier snapshot of the same answer, so the other snapshots do not
                age.
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
        """Turn the snapshot of an answer that has grown since into a checkpoint."""
        slot = self._by_block.get(block_id)
        if slot is not None:
            self._give_reason(slot, CHECKPOINT)

    def drop(self, block_id: int) -> None:
        """Drop the snapshot of a block. A table that still reads it keeps the slot."""
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
        """Recount all references and snapshots; raise CacheCorruption on any difference.

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
            raise CacheCorruption("the maps between snapshots and blocks contradict each other")
        queued = {slot: rank for rank, queue in enumerate(self._queues) for slot in queue}
        if queued != {slot: REASONS[one.reason] for slot, one in self._snapshots.items()}:
            raise CacheCorruption("the eviction queues do not hold exactly the snapshots")
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
        """Return the time at which a snapshot counts as used."""
        reason = self._snapshots[slot].reason
        return self._queues[REASONS[reason]][slot] + self._grace(reason)

    def _victim(self, owner: bytes, *, spares: bool) -> int | None:
        """Return the unread snapshot that is evicted next for an owner, or None.

        With `spares`, pinned snapshots and those within other owners' shares are excluded.
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
            # It is in use or spared. Move it to the end so that the next search does not meet it.
            queue[slot] = self._clock
            queue.move_to_end(slot)
        return None

    def _spared_from(self, owner: bytes) -> Callable[[_Snapshot], bool]:
        """Return a function that says whether a snapshot is spared from this owner."""
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
