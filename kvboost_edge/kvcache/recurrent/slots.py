"""The slots that hold states: who has a reference on each, and which of them are snapshots.
Integers only.

A state is what a layer without keys and values keeps of all tokens before. A *snapshot* is the
state behind the last token of a published block: whoever shares the blocks up to there goes on from
it. It never changes, and it goes with its block, or before it, when its slot is needed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from kvboost_edge.errors import CacheCorruption, ConfigError

__all__ = [
    "ANSWER",
    "BACKBONE",
    "HINT",
    "JUNCTION",
    "PROMPT",
    "REASONS",
    "SnapshotWatcher",
    "StateSlots",
]

PROMPT = "prompt"
ANSWER = "answer"
JUNCTION = "junction"
HINT = "hint"
BACKBONE = "backbone"

# Why a state was kept -> its class: those of a higher one count as used later than they were, see
# `StateSlots`.
REASONS = {BACKBONE: 0, PROMPT: 1, JUNCTION: 2, HINT: 2, ANSWER: 3}


class _Snapshot(NamedTuple):
    """The published block whose end it stands behind, why it was kept, and whose it is."""

    block_id: int
    reason: str
    owner: bytes


class SnapshotWatcher(Protocol):
    """Who is told of every snapshot that comes and goes, by its block, at once, in the thread that
    keeps them.
    """

    def kept(self, block_id: int) -> None: ...

    def dropped(self, block_id: int) -> None: ...


class StateSlots:
    """Slots 0 .. num_slots-1, all free at first. A slot that somebody references is never handed
    out; of the snapshots nobody reads the one that was used longest ago goes first.

    Age is counted in snapshots made or read, without those of a backbone, of which there may be one
    behind every block, and without an answer's that only move on with it. Who goes on from one also
    uses the first at a junction or border before it, behind what more conversations begin with. The
    ends of prompts count as younger than a backbone, which is for what nobody foresaw, by as many
    as there are slots: the same prompt may come again, and one whose answer is written differently
    goes on from there. Junctions and message borders, behind what several prompts begin with, by
    twice as many, and the ends of answers, where a conversation goes on, by three times. Nothing
    stays for ever. benchmarks/simulators/snapshots.py compares.

    Snapshots have owners. To keep a state none is taken from another owner who holds no more than
    its part, which is half the slots divided by all owners; so nobody's flood leaves others without
    any.

    Attributes:
        pinned: blocks that are pinned: while they are no more than half the slots, their snapshots
            go only to running sequences, and last.
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
        # By class: slot -> when it was used last, the longest ago first.
        self._queues: tuple[OrderedDict[int, int], ...] = tuple(
            OrderedDict() for _ in set(REASONS.values())
        )
        self._num_idle = 0  # snapshots that nobody reads
        self._read: set[int] = set()  # those that somebody read
        self._num_owned: Counter[bytes] = Counter()  # snapshots by owner
        self._clock = 0
        self._pinned = pinned
        self._watchers: list[SnapshotWatcher] = []

    def watch(self, watcher: SnapshotWatcher) -> None:
        """Tell it of all snapshots there are, and of every change from here on."""
        for block_id in self._by_block:
            watcher.kept(block_id)
        self._watchers.append(watcher)

    @property
    def num_slots(self) -> int:
        """Slots, in any state."""
        return len(self._refs)

    @property
    def num_used(self) -> int:
        """Slots that hold a snapshot or a running sequence's state."""
        return len(self._refs) - len(self._free)

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Slots that a running sequence could get now: free ones, and snapshots that nobody
        reads.
        """
        return len(self._free) + self._num_idle

    def free_ids(self) -> list[int]:
        """Slots that hold nothing."""
        return self._free.copy()

    def counts(self) -> dict[str, int]:
        """Snapshots by the reason they were kept for; every reason is there."""
        found = dict.fromkeys(REASONS, 0)
        for snapshot in list(self._snapshots.values()):
            found[snapshot.reason] += 1
        return found

    def of_block(self, block_id: int) -> int | None:
        """The slot of the snapshot behind a published block."""
        return self._by_block.get(block_id)

    def snapshots(self) -> dict[int, int]:
        """Block -> slot, of all snapshots."""
        return dict(self._by_block)

    def is_own(self, slot: int) -> bool:
        """Whether whoever references the slot may write into it: nobody else does, and it is no
        snapshot.
        """
        return self._refs[slot] == 1 and slot not in self._snapshots

    def is_passed(self, block_id: int) -> bool:
        """Whether a block's snapshot is of an answer that went on, and nobody went on from it."""
        slot = self._by_block.get(block_id)
        return (
            slot is not None and self._snapshots[slot].reason == ANSWER and slot not in self._read
        )

    def take(self, reason: str | None = None, owner: bytes = b"") -> int | None:
        """A slot, with one reference: for an owner's running sequence, or to keep a state of its
        for some reason. The oldest snapshot makes room, one of another owner's part or pinned only
        for who runs, where no other goes; for a state that is to be kept only if it counts as older
        than that will. None: there is none.
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
        """One more reference on a slot that has some; a snapshot is used by it."""
        if not self._refs[slot]:
            raise CacheCorruption(f"slot {slot} of states is shared and holds nothing")
        if slot in self._snapshots:
            self._read.add(slot)
            self._use(slot)
        self.hold(slot)

    def use_first(self, block_ids: Iterable[int]) -> None:
        """By a prompt that has these blocks in common with others: the first snapshot at a junction
        or border.
        """
        for block_id in block_ids:
            slot = self._by_block.get(block_id)
            if slot is not None and self._snapshots[slot].reason in (JUNCTION, HINT):
                self._use(slot)
                return

    def hold(self, slot: int) -> None:
        """The same of who goes on from what it has just kept itself, which is no use of a
        snapshot.
        """
        if slot in self._snapshots:
            self._num_idle -= self._refs[slot] == 1
        self._refs[slot] += 1

    def release(self, slot: int) -> None:
        """One reference less; without any the slot is free."""
        if not self._refs[slot]:
            raise CacheCorruption(f"slot {slot} of states is released and holds nothing")
        self._refs[slot] -= 1
        if not self._refs[slot]:
            self._free.append(slot)
        elif slot in self._snapshots:
            self._num_idle += self._refs[slot] == 1

    def attach(
        self, slot: int, block_id: int, reason: str, owner: bytes = b"", *, moved: bool = False
    ) -> bool:
        """Make a slot of the caller's the snapshot behind a published block; its reference goes
        along. `moved`: it stands for one before it, nobody else's grows older. Where there is one
        already that one stays, and counts as kept for the better reason: False.
        """
        known = self._by_block.get(block_id)
        if known is not None:
            self.release(slot)
            if reason != ANSWER and REASONS[reason] >= REASONS[self._snapshots[known].reason]:
                self._give_reason(known, reason)
            return False
        if not self.is_own(slot):
            raise CacheCorruption(
                f"slot {slot} of states becomes a snapshot and is not its owner's alone"
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
        """A block's snapshot was an answer's, which is longer now: it counts as one of a
        backbone.
        """
        slot = self._by_block.get(block_id)
        if slot is not None:
            self._give_reason(slot, BACKBONE)

    def drop(self, block_id: int) -> None:
        """The block is forgotten, or its snapshot not wanted: who still reads it keeps the slot."""
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
        """Recount from `references`, one slot for each that a table holds; CacheCorruption on any
        difference.
        """
        counted = [0] * self.num_slots
        for slot in (*references, *self._by_block.values()):
            counted[slot] += 1
        if counted != self._refs:
            raise CacheCorruption(
                f"slots of states count {self._refs} references, their holders hold {counted}"
            )
        if sorted(self._free) != [slot for slot, count in enumerate(counted) if not count]:
            raise CacheCorruption(
                f"the list of free slots of states is {sorted(self._free)}, references are "
                f"{counted}"
            )
        if {slot: one.block_id for slot, one in self._snapshots.items()} != {
            s: b for b, s in self._by_block.items()
        }:
            raise CacheCorruption("snapshots and their blocks disagree")
        queued = {slot: rank for rank, queue in enumerate(self._queues) for slot in queue}
        if queued != {slot: REASONS[one.reason] for slot, one in self._snapshots.items()}:
            raise CacheCorruption("the order in which snapshots go is not of those there are")
        if Counter(one.owner for one in self._snapshots.values()) != self._num_owned:
            raise CacheCorruption(
                f"snapshots by owner are counted as {sorted(self._num_owned.values())}"
            )
        if not self._read <= set(self._snapshots):
            raise CacheCorruption(
                f"slots {sorted(self._read - set(self._snapshots))} count as snapshots that were "
                "read"
            )
        if self._num_idle != sum(counted[slot] == 1 for slot in self._snapshots):
            raise CacheCorruption(f"{self._num_idle} snapshots count as read by nobody")

    def _give_reason(self, slot: int, reason: str) -> None:
        before = self._snapshots[slot]
        del self._queues[REASONS[before.reason]][slot]
        self._snapshots[slot] = before._replace(reason=reason)
        self._use(slot)

    def _use(self, slot: int, *, counts: bool = True) -> None:
        reason = self._snapshots[slot].reason
        self._clock += counts and reason != BACKBONE
        queue = self._queues[REASONS[reason]]
        queue[slot] = self._clock
        queue.move_to_end(slot)

    def _grace(self, reason: str) -> int:
        return REASONS[reason] * self.num_slots

    def _age_of(self, slot: int) -> int:
        """When it counts as used."""
        reason = self._snapshots[slot].reason
        return self._queues[REASONS[reason]][slot] + self._grace(reason)

    def _victim(self, owner: bytes, *, spares: bool) -> int | None:
        """The snapshot that goes first, of those that nobody reads, to make room for one of an
        owner's.
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
            queue[slot] = (
                self._clock
            )  # somebody reads it, or it is spared: it would be in the way of the next look too
            queue.move_to_end(slot)
        return None

    def _spared_from(self, owner: bytes) -> Callable[[_Snapshot], bool]:
        """Which snapshots do not go for one of this owner's."""
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
            return snapshot.reason != BACKBONE and snapshot.block_id in pinned

        return is_spared
