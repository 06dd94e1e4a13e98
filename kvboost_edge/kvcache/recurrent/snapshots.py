"""Recurrent state of block tables: the slots that each pass reads and writes, and its snapshots.

Attention can continue after any cached token, but a recurrent layer can only continue from a
snapshot. A table of a hybrid model therefore shares blocks up to the deepest snapshot. Its first
pass reads that snapshot and writes to a private slot. Later passes read and write the private slot.
If a pass ends where a snapshot is wanted, the private slot becomes the snapshot. The next pass then
reads the snapshot and writes to a new slot. Snapshots inside a pass are written to slots of their
own.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from kvboost_edge.errors import CacheCorruption, CapacityError
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.duplicates import published_equal
from kvboost_edge.kvcache.prefix_index import PrefixIndex, PrefixMatch
from kvboost_edge.kvcache.recurrent.slots import (
    ANSWER,
    BRANCH_POINT,
    CHECKPOINT,
    HINT,
    PROMPT,
    REASONS,
    StateSlots,
)

__all__ = [
    "NoTableStates",
    "PassSlots",
    "StateSizes",
    "TableStates",
    "boundary_positions",
    "checkpoint_positions",
]


# A prompt's checkpoints are thinned out if they need more than 1/8 of the slots.
_CHECKPOINT_SHARE = 8
_EVERY_BLOCK_SHARE = 2  # checkpoints after every block are thinned out if they need more than 1/2
_BOUNDARY_SHARE = 4  # a prompt's message boundaries take at most 1/4 of the slots, but at least two


def checkpoint_positions(
    start: int, stop: int, step: int, num_slots: int, *, small: bool
) -> Iterable[int]:
    """Return the positions of a prompt's periodic checkpoints, between `start` and `stop`.

    Checkpoints are `step` tokens apart. If they need too many slots, only the first one and those
    at doubling distances from the end are kept. A prompt that diverges near the end then still
    finds one nearby.

    If `small` is true, a state is so small that a step is a single block. Such checkpoints are
    thinned out to equal distances.
    """
    every = range((start // step + 1) * step, stop, step)
    if small:
        return every[:: -(-len(every) // max(1, num_slots // _EVERY_BLOCK_SHARE)) or 1]
    if len(every) <= num_slots // _CHECKPOINT_SHARE:
        return every
    return sorted({every[0], *_doubling(every)})


def boundary_positions(hints: Sequence[int], num_slots: int) -> Sequence[int]:
    """Return the message boundaries at which to keep snapshots.

    The first boundary is always kept, because it follows the system message of a new conversation.
    If there are too many, only the last ones at doubling distances from the end are kept besides.

    Args:
        hints: positions of message boundaries, in ascending order.
        num_slots: number of state slots.
    """
    most = max(2, num_slots // _BOUNDARY_SHARE)
    return hints if len(hints) <= most else sorted({hints[0], *_doubling(hints)[: most - 1]})


def _doubling(points: Sequence[int]) -> list[int]:
    """Return the last point, the second to last, the fourth to last, and so on."""
    return [points[-(1 << n)] for n in range(len(points).bit_length())]


class StateSizes(NamedTuple):
    """Sizes that configure the storage of recurrent state.

    Attributes:
        num_slots: number of state slots.
        interval: number of tokens between periodic checkpoints in a prompt.
        every_block: keep a snapshot after every block. Used if a state is as small as a few blocks.
        num_draft_rows: maximum number of draft tokens per pass, over all sequences.
    """

    num_slots: int
    interval: int = 1024
    every_block: bool = False
    num_draft_rows: int = 0


class PassSlots(NamedTuple):
    """Slots that a forward pass uses for the recurrent state of one table.

    Attributes:
        read: slot to read, or -1 for a state of zeros.
        write: slot to write.
        saves: (rows, slot) for each snapshot inside the pass, where `rows` is the number of tokens
            before it.
        keeps: whether the written state also becomes a snapshot. In an answer, this requires a free
            slot at commit.
    """

    read: int
    write: int
    saves: tuple[tuple[int, int], ...]
    keeps: bool = False


@dataclasses.dataclass(slots=True)
class _State:
    """Recurrent state of one table. Each slot in these fields holds one reference.

    Attributes:
        slot: slot with the state after `position` tokens, or -1 for zeros before the first token.
        position: number of tokens that the state covers.
        following: slot that the next pass writes if `slot` is a snapshot, or -1 if none is
            allocated.
        wanted: position at which to take a snapshot -> reason for it.
        known: number of tokens when the table was opened. Later tokens belong to the answer.
        planned: position at the end of the running pass, or None if no pass is running.
        saves: (position, slot, reason) for each snapshot of the running pass. At the end of the
            pass, `slot` is the one that the next pass writes, or -1 if it is allocated at commit.
        tail: (block, serial of its entry) of the latest snapshot in the answer, or None.
        replayed: number of tokens whose KV is cached but which are recomputed for their state.
        awaited: whether the table is waiting for a state to be loaded. Until then, its blocks are
            committed without a state.
    """

    slot: int = -1
    position: int = 0
    following: int = -1
    wanted: dict[int, str] = dataclasses.field(default_factory=dict)
    known: int = 0
    planned: int | None = None
    saves: list[tuple[int, int, str]] = dataclasses.field(default_factory=list)
    tail: tuple[int, int] | None = None
    replayed: int = 0
    awaited: bool = False

    def references(self) -> list[int]:
        return [
            slot
            for slot in (self.slot, self.following, *(slot for _, slot, _ in self.saves))
            if slot >= 0
        ]


class NoTableStates:
    """Replacement of `TableStates` for models without recurrent layers.

    Every table has room, and no snapshots are kept.
    """

    slots = None
    num_draft_rows = sys.maxsize
    num_replayed = 0
    num_released = 0

    def open(
        self, table: BlockTable, num_tokens: int, match: PrefixMatch | None, hints: Iterable[int]
    ) -> None:
        pass

    def wait(self, table: BlockTable) -> None:
        pass

    def ask(self, table: BlockTable, index: int) -> None:
        pass

    def has_room(self, table: BlockTable) -> bool:
        return True

    def prepare(self, table: BlockTable) -> None:
        pass

    def commit(self, table: BlockTable, num_computed: int) -> None:
        pass

    def fork(self, table: BlockTable, child: BlockTable) -> None:
        pass

    def free(self, table: BlockTable) -> None:
        pass

    def check(self, tables: Iterable[BlockTable]) -> None:
        pass


class TableStates:
    """Recurrent state of all tables of one manager.

    Args:
        sizes: sizes for recurrent state.
        block_size: tokens per block.
        index: the prefix index.
        pinned: live view of the pinned blocks. See `StateSlots`.

    Attributes:
        slots: the state slots.
        num_replayed: number of tokens recomputed only for their state since the start.
        num_released: counter of released slot references. As long as it does not change, retrying
            an allocation that failed is pointless.
    """

    def __init__(
        self, sizes: StateSizes, block_size: int, index: PrefixIndex, pinned: Collection[int]
    ) -> None:
        self.slots = StateSlots(sizes.num_slots, pinned)
        self._sizes = sizes
        self._size = block_size
        self._index = index
        self._states: dict[int, _State] = {}
        self._kept: dict[int, None] = {}
        self.num_replayed = self.num_released = 0
        # This must be the first watcher. Later watchers then learn of a dropped snapshot before
        # they learn of its withdrawn block.
        index.watch(self)

    @property
    def num_draft_rows(self) -> int:
        """Maximum number of draft tokens per pass, over all sequences."""
        return self._sizes.num_draft_rows

    # `Watcher` methods, called by the prefix index.

    def entered(self, block_id: int, entry: object) -> None:
        """Do nothing, because a newly published block has no snapshot yet."""

    def left(self, block_id: int) -> None:
        """Drop the snapshot of a block that is no longer published."""
        self.slots.drop(block_id)
        self._kept.pop(block_id, None)

    # Life cycle of a table's state, from `open` to `free`.

    def deepest(self, block_ids: Sequence[int]) -> int:
        """Return how many blocks of a published prefix are covered by its deepest snapshot."""
        of_block = self.slots.of_block
        return next(
            (n for n in range(len(block_ids), 0, -1) if of_block(block_ids[n - 1]) is not None), 0
        )

    def open(
        self, table: BlockTable, num_tokens: int, match: PrefixMatch | None, hints: Iterable[int]
    ) -> None:
        """Set up the state of a new table and choose the positions of its snapshots.

        Args:
            table: the new table.
            num_tokens: tokens of the prompt.
            match: shared prefix, whose last block has a snapshot. None if no lookup was made.
            hints: positions of message boundaries.
        """
        state = self._states[table._serial] = _State(known=num_tokens)
        size = self._size
        matched = 0
        if match is not None:
            matched = (len(match.block_ids) + match.beyond) * size
            if match.block_ids:
                slot = self.slots.of_block(match.block_ids[-1])
                if slot is None:
                    raise CacheCorruption(
                        f"block {match.block_ids[-1]} ends a match but has no snapshot"
                    )
                self.slots.use_first(match.block_ids[:-1])
                self.slots.share(slot)
                state.slot = slot
                state.position = len(match.block_ids) * size
            state.replayed = match.beyond * size
        wanted = dict.fromkeys(self._checkpoints(state.position, num_tokens), CHECKPOINT)
        # Two snapshots are useful near the end. If the prompt repeats, its blocks before the last
        # token are shared. A prompt that extends it can share all its full blocks.
        ends = {max(num_tokens - 1, 0) // size * size, num_tokens // size * size}
        borders = sorted(
            {position // size * size for position in hints if position <= num_tokens} - ends
        )
        ahead = [position for position in borders if position > state.position]
        wanted |= dict.fromkeys(boundary_positions(ahead, self._sizes.num_slots), HINT)
        if matched > state.position:
            wanted[matched] = BRANCH_POINT
        wanted |= dict.fromkeys(ends, PROMPT)
        state.wanted = {
            position: why for position, why in wanted.items() if position > state.position
        }

    def _checkpoints(self, start: int, stop: int) -> Iterable[int]:
        small = self._sizes.every_block
        step = self._size if small else -(-self._sizes.interval // self._size) * self._size
        return checkpoint_positions(start, stop, step, self._sizes.num_slots, small=small)

    def ask(self, table: BlockTable, index: int) -> None:
        """Request a snapshot after block `index`, where another prompt diverges from this table."""
        state = self._states[table._serial]
        position = (index + 1) * self._size
        if (
            position > (state.planned or state.position)
            and REASONS[state.wanted.get(position, CHECKPOINT)] < REASONS[BRANCH_POINT]
        ):
            state.wanted[position] = BRANCH_POINT

    def has_room(self, table: BlockTable) -> bool:
        """Return whether the table has a writable slot or can get one."""
        return self._has_own(self._states[table._serial]) or self.slots.num_available > 0

    def prepare(self, table: BlockTable) -> None:
        """Allocate the slot that the table's next pass writes, unless it already has one.

        Raises:
            CapacityError: running sequences use all slots.
        """
        state = self._states[table._serial]
        if self._has_own(state):
            return
        slot = self.slots.take(owner=table.owner)
        if slot is None:
            raise CapacityError(
                f"running sequences use all {self.slots.num_slots} state slots; lower "
                "max_num_seqs or enlarge max_state_bytes"
            )
        state.following = slot
        self.num_replayed += state.replayed
        state.replayed = 0

    def _has_own(self, state: _State) -> bool:
        return state.following >= 0 or (state.slot >= 0 and self.slots.is_own(state.slot))

    def plan(self, table: BlockTable, start: int, stop: int) -> PassSlots:
        """Return the slots for a pass over tokens start to stop - 1.

        The caller must end the pass with `commit`, or with `free` if the pass failed.
        """
        state = self._states[table._serial]
        if state.planned is not None or state.position != start or stop <= start:
            raise CacheCorruption(
                f"a pass over tokens {start} to {stop} cannot continue the state after "
                f"{state.position} tokens"
            )
        write = state.following if state.following >= 0 else state.slot
        if write < 0 or (write == state.slot and not self.slots.is_own(write)):
            raise CacheCorruption(
                f"the state after {start} tokens is shared, and no slot to write was allocated; "
                "call prepare first"
            )
        state.planned = stop
        if table._publishes:
            # Deepest first and checkpoints last. If slots are scarce, the end of the prompt must
            # get its slot before a message boundary does.
            points = self._save_points(state, start, stop).items()
            for position, reason in sorted(
                points, key=lambda point: (point[1] != CHECKPOINT, point[0]), reverse=True
            ):
                state.wanted.pop(position, None)
                self._save(table, state, position, reason)
            state.saves.sort()
        inside = tuple(
            (position - start, slot) for position, slot, _ in state.saves if position < stop
        )
        return PassSlots(state.slot, write, inside, keeps=len(inside) < len(state.saves))

    def _save_points(self, state: _State, start: int, stop: int) -> dict[int, str]:
        """Return the positions in (start, stop] at which to take snapshots, with their reasons.

        An answer gets a snapshot after its last full block. With `every_block`, its other blocks
        get checkpoints.
        """
        found = {
            position: why for position, why in state.wanted.items() if start < position <= stop
        }
        last = stop // self._size * self._size
        size = self._size
        known = max(start, state.known)
        if last > known:
            found.setdefault(last, ANSWER)
            if self._sizes.every_block:
                found = (
                    dict.fromkeys(range(known // size * size + size, last, size), CHECKPOINT)
                    | found
                )
        return found

    def _save(self, table: BlockTable, state: _State, position: int, reason: str) -> None:
        """Reserve a slot for a snapshot at a position, or skip the snapshot if all are in use."""
        if reason == ANSWER:
            # The snapshot is at the end of the pass. `commit` allocates its slot after dropping the
            # old one.
            if position == state.planned:
                state.saves.append((position, -1, reason))
                return
            # The snapshot is inside the pass, because accepted draft tokens cross the end of a
            # block. If no slot is free, drop the answer's old snapshot now. Otherwise each running
            # answer would evict another request's snapshot just to hold two of its own briefly. If
            # the pass reads the old snapshot, dropping it would not free its slot.
            if (
                not self.slots.num_free
                and state.tail is not None
                and self.slots.of_block(state.tail[0]) != state.slot
            ):
                self._drop_old_tail(state)
        slot = self.slots.take(reason, table.owner)
        if slot is not None:
            state.saves.append((position, slot, reason))

    def wait(self, table: BlockTable) -> None:
        """Set up the state of a table that waits for blocks and a state to be loaded.

        The table holds the deepest snapshot in the pool until that state arrives.
        """
        state = self._states[table._serial] = _State(
            position=table.num_computed_tokens, awaited=True
        )
        if depth := self.deepest(table.block_ids):
            slot = self.slots.of_block(table.block_ids[depth - 1])
            assert slot is not None  # `deepest` found this snapshot
            self.slots.share(slot)
            state.slot = slot

    def arrive(self, table: BlockTable, num_blocks: int, write: Callable[[int], None]) -> None:
        """Store a loaded state, which covers the first `num_blocks` blocks of a waiting table.

        If the state covers all blocks of the table, the table continues from it. Otherwise the
        state becomes a snapshot for tables opened later, and this table keeps waiting without a
        state. The table also keeps waiting if this method raises.

        Args:
            table: waiting table, whose first `num_blocks` blocks are loaded.
            num_blocks: number of blocks that the state covers.
            write: function that writes the state to the given slot.

        Raises:
            CapacityError: no slot is available.
        """
        state = self._states[table._serial]
        position = num_blocks * self._size
        if not state.awaited or not 0 < position <= state.position:
            raise CacheCorruption(
                f"unexpected state after {position} tokens: the table is not waiting for it"
            )
        self.prepare(table)
        write(state.following if state.following >= 0 else state.slot)
        self._move_on(state)
        if position == state.position:
            state.awaited = False
            return
        slot = state.slot
        state.slot = -1
        block_id = published_equal(table, num_blocks - 1, self._index)
        if block_id is None:
            self._release(slot)
        else:
            self._kept[block_id] = None
            self.slots.attach(slot, block_id, PROMPT, table.owner)

    def _move_on(self, state: _State) -> None:
        """Make the newly written slot the table's current one, if the pass wrote a new slot."""
        if state.following >= 0:
            self._release(state.slot)
            state.slot = state.following
            state.following = -1

    def drain_kept(self) -> list[int]:
        """Return the blocks that got a snapshot since the last call, except for checkpoints.

        Some of the snapshots may have been dropped in the meantime.
        """
        kept = self._kept
        self._kept = {}
        return list(kept)

    def commit(self, table: BlockTable, num_computed: int) -> None:
        """End a pass whose blocks are published, and make its snapshots available."""
        state = self._states[table._serial]
        if state.awaited:
            state.position = num_computed
            return
        if num_computed != (state.position if state.planned is None else state.planned):
            raise CacheCorruption(
                f"commit of {num_computed} tokens: the state covers {state.position} and its pass "
                f"ends at {state.planned}"
            )
        if state.planned is None:
            return
        self._move_on(state)
        saves = state.saves
        state.saves = []
        state.position = num_computed
        state.planned = None
        for position, slot, reason in saves:
            self._keep(state, table, position, slot, reason)

    def _keep(
        self, state: _State, table: BlockTable, position: int, slot: int, reason: str
    ) -> None:
        block_id = (
            published_equal(table, position // self._size - 1, self._index)
            if table._publishes
            else None
        )
        if block_id is None:
            self._release(slot)
            return
        is_own = position == state.position and self.slots.of_block(block_id) is None
        moved = reason == ANSWER and state.tail is not None
        if reason == ANSWER:
            self._drop_old_tail(state)
        if slot < 0:
            taken = self.slots.take(reason, table.owner) if is_own else None
            if taken is None:
                return
            slot = taken
        if is_own:  # the written slot becomes the snapshot, and the next pass writes the new slot
            state.following = slot
            slot = state.slot
        # Tiers do not store checkpoints. They store only the last snapshot of an answer, once the
        # answer is complete.
        if reason not in (CHECKPOINT, ANSWER):
            self._kept[block_id] = None
        is_new = self.slots.attach(slot, block_id, reason, table.owner, moved=moved)
        if is_own:
            self.slots.hold(slot)
        if reason == ANSWER:
            entry = self._index.entry(block_id)
            state.tail = (block_id, entry.serial) if entry is not None and is_new else None

    def _drop_old_tail(self, state: _State) -> None:
        """Drop the previous snapshot of a growing answer, unless another table uses it.

        With `every_block`, the snapshot is kept as a checkpoint instead.
        """
        if state.tail is not None:
            block_id, serial = state.tail
            entry = self._index.entry(block_id)
            if entry is not None and entry.serial == serial and self.slots.is_passed(block_id):
                if self._sizes.every_block:
                    self.slots.demote(block_id)
                else:
                    self.slots.drop(block_id)
            state.tail = None

    def _offer_tail(self, state: _State) -> None:
        """Add the last snapshot of a finished answer to those that the tiers store."""
        if state.tail is not None:
            block_id, serial = state.tail
            entry = self._index.entry(block_id)
            if (
                entry is not None
                and entry.serial == serial
                and self.slots.of_block(block_id) is not None
            ):
                self._kept[block_id] = None

    def fork(self, table: BlockTable, child: BlockTable) -> None:
        """Set up the state of a forked table."""
        state = self._states[table._serial]
        if state.planned is not None:
            raise CacheCorruption(
                "a table cannot be forked while its state is being computed; commit the pass first"
            )
        if state.slot >= 0:
            self.slots.share(state.slot)
        wanted = dict(state.wanted)
        self._states[child._serial] = _State(
            state.slot, state.position, wanted=wanted, known=state.known
        )

    def free(self, table: BlockTable) -> None:
        """Release the slots of a table.

        A state at the end of a published block is kept as a snapshot, from which a preempted
        sequence can continue. The state of a failed pass is discarded.
        """
        state = self._states.pop(table._serial)
        slot = state.slot
        at_border = state.position > 0 and state.position % self._size == 0
        block_id = None
        if (
            state.planned is None
            and not state.awaited
            and at_border
            and table._publishes
            and slot >= 0
            and self.slots.is_own(slot)
        ):
            block_id = published_equal(table, state.position // self._size - 1, self._index)
        if block_id is not None and self.slots.of_block(block_id) is None:
            self._kept[block_id] = None
            self.slots.attach(slot, block_id, ANSWER, table.owner)
            state.slot = -1
        self._offer_tail(state)
        for one in state.references():
            self._release(one)
        self.num_released += 1

    def _release(self, slot: int) -> None:
        if slot >= 0:
            self.slots.release(slot)
            self.num_released += 1

    def unwritten(self) -> list[int]:
        """Return the slots without content: the empty ones, and those reserved for a next pass."""
        return self.slots.free_ids() + [
            one.following for one in self._states.values() if one.following >= 0
        ]

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Recount all slot references, and check that each snapshot has a published block.

        Args:
            tables: all live tables.

        Raises:
            CacheCorruption: the recorded values are inconsistent.
        """
        tables = list(tables)
        if {table._serial for table in tables} != set(self._states):
            raise CacheCorruption(
                f"{len(tables)} tables are live, but {len(self._states)} have a state"
            )
        for table in tables:
            state = self._states[table._serial]
            if state.position != table.num_computed_tokens:
                raise CacheCorruption(
                    f"a state covers {state.position} tokens, but its table has "
                    f"{table.num_computed_tokens} computed tokens"
                )
            if not state.awaited and (state.slot < 0) != (state.position == 0):
                raise CacheCorruption(
                    f"the state after {state.position} tokens cannot be in slot {state.slot}"
                )
        self.slots.check(slot for state in self._states.values() for slot in state.references())
        for block_id in self.slots.snapshots():
            if self._index.entry(block_id) is None:
                raise CacheCorruption(f"block {block_id} has a snapshot but is not published")
