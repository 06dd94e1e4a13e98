"""Recurrent state of block tables: the slots that a pass reads and writes, and snapshots.

Attention can continue after any cached token, but a recurrent layer only from a snapshot. A table
of a hybrid model therefore shares blocks up to the deepest snapshot. Its first pass reads that
snapshot and writes a slot of the table's own; later passes read and write that slot. If a pass ends
where a snapshot is wanted, its slot becomes the snapshot, and the next pass reads it and writes
another slot. Snapshots inside a pass are written in addition to the table's own state.
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


_CHECKPOINT_SHARE = 8  # a prompt's checkpoints are thinned out beyond 1/8 of the slots
_EVERY_BLOCK_SHARE = 2  # checkpoints after every block: beyond 1/2 of the slots
_BOUNDARY_SHARE = 4  # a prompt's message boundaries take at most 1/4 of the slots, or two


def checkpoint_positions(
    start: int, stop: int, step: int, num_slots: int, *, small: bool
) -> Iterable[int]:
    """Return the positions of a prompt's periodic checkpoints in (start, stop).

    They are `step` tokens apart. If that takes too many slots, only the first one and those at
    doubling distances from the end are kept. A prompt that diverges late then finds one nearby.
    Small states are kept after every block, and thinned to equal distances.
    """
    every = range((start // step + 1) * step, stop, step)
    if small:
        return every[:: -(-len(every) // max(1, num_slots // _EVERY_BLOCK_SHARE)) or 1]
    if len(every) <= num_slots // _CHECKPOINT_SHARE:
        return every
    return sorted({every[0], *_doubling(every)})


def boundary_positions(hints: Sequence[int], num_slots: int) -> Sequence[int]:
    """Return the message boundaries, of those in ascending order, at which to keep snapshots.

    The first one, which follows the system message of a new conversation, is always kept. Of many
    others the last ones at doubling distances are kept.
    """
    most = max(2, num_slots // _BOUNDARY_SHARE)
    return hints if len(hints) <= most else sorted({hints[0], *_doubling(hints)[: most - 1]})


def _doubling(points: Sequence[int]) -> list[int]:
    """Return the last point, the second to last, the fourth to last, the eighth to last etc."""
    return [points[-(1 << n)] for n in range(len(points).bit_length())]


class StateSizes(NamedTuple):
    """Sizes for recurrent state.

    Attributes:
        num_slots: number of state slots.
        interval: tokens between the periodic checkpoints of a prompt.
        every_block: keep a snapshot after every block, because a state is no larger than a few
            blocks.
        num_draft_rows: most draft tokens of a pass, over all sequences, whose state updates can be
            stored.
    """

    num_slots: int
    interval: int = 1024
    every_block: bool = False
    num_draft_rows: int = 0


class PassSlots(NamedTuple):
    """Slots that a forward pass uses for the state of one table.

    Attributes:
        read: slot to read; -1 for a state of zeros.
        write: slot to write.
        saves: (rows, slot) for each snapshot inside the pass, taken after that many rows.
        keeps: the written state becomes a snapshot too; for an answer, only if a slot is free at
            commit.
    """

    read: int
    write: int
    saves: tuple[tuple[int, int], ...]
    keeps: bool = False


@dataclasses.dataclass(slots=True)
class _State:
    """Recurrent state of one table. Each slot named here holds one reference.

    Attributes:
        slot: slot with the state after `position` tokens; -1: zeros before the first token.
        position: tokens that the state covers.
        following: slot that the next pass writes, if `slot` is a snapshot; -1: none was taken.
        wanted: position -> reason for a snapshot there.
        known: number of tokens when the table was opened. Later tokens are the answer.
        planned: position at the end of the running pass; None if no pass runs.
        saves: (position, slot, reason) of the snapshots of that pass. A slot at its end is for the
            next pass; -1: it is taken at commit.
        tail: (block, serial of its entry) with the snapshot of the answer so far, or None.
        replayed: tokens that are recomputed only for their state, because their KV is cached.
        awaited: blocks are being loaded without a state, until the state after the last one
            arrives.
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
    """Null object for models without recurrent layers.

    Every table has room, and no snapshot is kept.
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
    """Recurrent state of one manager's tables.

    Args:
        sizes: sizes for recurrent state.
        block_size: tokens of a block.
        index: the prefix index.
        pinned: pinned blocks, see `StateSlots`.

    Attributes:
        slots: the slots.
        num_replayed: tokens recomputed only for their state since the start.
        num_released: counter of released references. While it is unchanged, a table that found no
            slot will not find any.
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
        # The first watcher: others are notified of a snapshot's end before that of its block.
        index.watch(self)

    @property
    def num_draft_rows(self) -> int:
        """Most draft tokens of a pass, over all sequences."""
        return self._sizes.num_draft_rows

    # Watcher of the prefix index.

    def entered(self, block_id: int, entry: object) -> None:
        """Ignore a published block: it cannot have a snapshot yet."""

    def left(self, block_id: int) -> None:
        """Drop the snapshot of a block that is no longer published."""
        self.slots.drop(block_id)
        self._kept.pop(block_id, None)

    # State of a table, from open to free.

    def deepest(self, block_ids: Sequence[int]) -> int:
        """Return how many blocks of a published prefix precede its deepest snapshot."""
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
            match: shared prefix, whose last block has a snapshot; None if nothing was looked up.
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
        # If this prompt repeats, it is served up to the block with its last token. A prompt that
        # extends it is served all full blocks.
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
        """Request a snapshot after block `index`, up to which another prompt shares this table."""
        state = self._states[table._serial]
        position = (index + 1) * self._size
        if (
            position > (state.planned or state.position)
            and REASONS[state.wanted.get(position, CHECKPOINT)] < REASONS[BRANCH_POINT]
        ):
            state.wanted[position] = BRANCH_POINT

    def has_room(self, table: BlockTable) -> bool:
        """Return whether the table has a slot to write, or can get one."""
        return self._has_own(self._states[table._serial]) or self.slots.num_available > 0

    def prepare(self, table: BlockTable) -> None:
        """Take the slot that the table's next pass writes, unless it has one.

        Raises:
            CapacityError: all slots belong to running sequences.
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
        """Return the slots of a pass over tokens start to stop - 1.

        The pass ends with `commit`, or with `free` if it failed.
        """
        state = self._states[table._serial]
        if state.planned is not None or state.position != start or stop <= start:
            raise CacheCorruption(
                f"a pass from {start} to {stop} does not continue the state at {state.position}"
            )
        write = state.following if state.following >= 0 else state.slot
        if write < 0 or (write == state.slot and not self.slots.is_own(write)):
            raise CacheCorruption(
                f"the state after {start} tokens is shared, and no slot was taken to write"
            )
        state.planned = stop
        if table._publishes:
            # Deepest first, checkpoints last: if slots are scarce, a message boundary must not take
            # the slot of the prompt's end.
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

        An answer has one after its last full block. Small states also get checkpoints after its
        other blocks.
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
        """Reserve a slot for a snapshot at a position; skip the snapshot if there is no slot."""
        if reason == ANSWER:
            # At the end of the pass: `commit` takes a slot once the old snapshot is dropped.
            if position == state.planned:
                state.saves.append((position, -1, reason))
                return
            # Inside the pass: accepted draft tokens cross the end of a block. If no slot is free,
            # drop the answer's old snapshot now. Otherwise each running answer would evict a
            # snapshot of another request just to hold two of its own for a moment. If the pass
            # reads the old snapshot, dropping it would not free its slot.
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
        """Set up a table that computes nothing, but waits for blocks and a state to be loaded.

        Until that state arrives, the deepest snapshot in the pool is held.
        """
        state = self._states[table._serial] = _State(
            position=table.num_computed_tokens, awaited=True
        )
        if depth := self.deepest(table.block_ids):
            slot = self.slots.of_block(table.block_ids[depth - 1])
            assert slot is not None  # that is what deepest looks for
            self.slots.share(slot)
            state.slot = slot

    def arrive(self, table: BlockTable, num_blocks: int, write: Callable[[int], None]) -> None:
        """Store the loaded state after the first `num_blocks` blocks of a waiting table.

        The state after the last block becomes the table's own. Any other becomes a snapshot for
        tables that are opened later, and this table keeps none. If this raises, the table still
        waits.

        Args:
            table: table that waits; its first `num_blocks` blocks are loaded.
            num_blocks: number of blocks before the state.
            write: writes the state to the given slot.

        Raises:
            CapacityError: no slot is available.
        """
        state = self._states[table._serial]
        position = num_blocks * self._size
        if not state.awaited or not 0 < position <= state.position:
            raise CacheCorruption(
                f"unexpected state after {position} tokens: the table does not wait for it"
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
        """Continue in the slot that was taken, if any."""
        if state.following >= 0:
            self._release(state.slot)
            state.slot = state.following
            state.following = -1

    def drain_kept(self) -> list[int]:
        """Return blocks that got a snapshot since the last call, checkpoints excluded.

        Some of the snapshots may have been dropped since.
        """
        kept = self._kept
        self._kept = {}
        return list(kept)

    def commit(self, table: BlockTable, num_computed: int) -> None:
        """End a pass: its blocks are published, and its snapshots become available."""
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
        if is_own:  # the written slot becomes the snapshot; continue in the new one
            state.following = slot
            slot = state.slot
        # Tiers store no checkpoints, and only the last snapshot of an answer, when it ends.
        if reason not in (CHECKPOINT, ANSWER):
            self._kept[block_id] = None
        is_new = self.slots.attach(slot, block_id, reason, table.owner, moved=moved)
        if is_own:
            self.slots.hold(slot)
        if reason == ANSWER:
            entry = self._index.entry(block_id)
            state.tail = (block_id, entry.serial) if entry is not None and is_new else None

    def _drop_old_tail(self, state: _State) -> None:
        """Drop the old snapshot of a growing answer, unless other tables continued from it.

        A small state is kept as a checkpoint instead.
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
        """Mark the last snapshot of a finished answer for the tiers."""
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
        """Set up the state of a second table that continues from this one."""
        state = self._states[table._serial]
        if state.planned is not None:
            raise CacheCorruption("a table cannot be forked while its state is being computed")
        if state.slot >= 0:
            self.slots.share(state.slot)
        wanted = dict(state.wanted)
        self._states[child._serial] = _State(
            state.slot, state.position, wanted=wanted, known=state.known
        )

    def free(self, table: BlockTable) -> None:
        """Release a table's slots.

        A state after a published block is kept as a snapshot, so that a preempted sequence can
        continue from it. The state of a failed pass is not kept.
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
        """Return the slots without content: free ones, and those that a next pass will write."""
        return self.slots.free_ids() + [
            one.following for one in self._states.values() if one.following >= 0
        ]

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Recompute all references from the live tables, and look up the block of each snapshot.

        Raises:
            CacheCorruption: something contradicts the recorded values.
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
                    f"a state covers {state.position} tokens of a table with "
                    f"{table.num_computed_tokens} computed tokens"
                )
            if not state.awaited and (state.slot < 0) != (state.position == 0):
                raise CacheCorruption(
                    f"the state after {state.position} tokens is in slot {state.slot}"
                )
        self.slots.check(slot for state in self._states.values() for slot in state.references())
        for block_id in self.slots.snapshots():
            if self._index.entry(block_id) is None:
                raise CacheCorruption(f"block {block_id} has a snapshot but is not published")
