"""The states of the sequences that tables belong to: which slot a pass reads and writes, and where
a snapshot is kept.

Keys and values can be taken up behind any token; a state only where it was kept. A table whose
model has layers with states shares the blocks up to the deepest snapshot. Its first pass reads that
snapshot and writes a slot of the table's own, every later one reads and writes that slot. Where a
pass ends at a place to be kept, the slot it wrote becomes the snapshot, and the next pass reads
that and writes another one. A snapshot never changes, and only those inside a pass are written
beside the table's own state.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from kvboost_edge.errors import CacheCorruption, CapacityError
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.duplicates import standing_for
from kvboost_edge.kvcache.prefix_index import PrefixIndex, PrefixMatch
from kvboost_edge.kvcache.recurrent.slots import (
    ANSWER,
    BACKBONE,
    HINT,
    JUNCTION,
    PROMPT,
    REASONS,
    StateSlots,
)

__all__ = [
    "NoTableStates",
    "PassSlots",
    "StateSizes",
    "TableStates",
    "backbone_points",
    "hint_points",
]


_BACKBONE_SHARE = 8  # a backbone of more than one in so many slots is thinned
_EVERY_BLOCK_SHARE = 2  # so is one behind every block
_HINT_SHARE = 4  # hints may be so many at most, and two in any case


def backbone_points(
    start: int, stop: int, step: int, num_slots: int, *, small: bool
) -> Iterable[int]:
    """Positions of a prompt's backbone in (start, stop), every `step` tokens. Where those are many,
    only those at doubling distances from the end: a prompt that branches off late finds one near.
    Of small states, kept behind every block, as many as may be, at equal distances.
    """
    every = range((start // step + 1) * step, stop, step)
    if small:
        return every[:: -(-len(every) // max(1, num_slots // _EVERY_BLOCK_SHARE)) or 1]
    if len(every) <= num_slots // _BACKBONE_SHARE:
        return every
    return sorted({every[0], *_doubling(every)})


def hint_points(hints: Sequence[int], num_slots: int) -> Sequence[int]:
    """Which of the message borders ahead, ascending, are kept: the first, which stands behind the
    system message of a new conversation, and of many the last ones at doubling distances.
    """
    most = max(2, num_slots // _HINT_SHARE)
    return hints if len(hints) <= most else sorted({hints[0], *_doubling(hints)[: most - 1]})


def _doubling(points: Sequence[int]) -> list[int]:
    """The last one, the one before, the fourth from the end, the eighth ..."""
    return [points[-(1 << n)] for n in range(len(points).bit_length())]


class StateSizes(NamedTuple):
    """num_slots       states that there is room for
    interval        tokens between the snapshots of a prompt's backbone
    every_block     a state is no larger than a few blocks: one is kept behind each
    num_draft_rows  guessed tokens of a pass that there is room for what they bring to states
    """

    num_slots: int
    interval: int = 1024
    every_block: bool = False
    num_draft_rows: int = 0


class PassSlots(NamedTuple):
    """What a pass does with one table's state: the slot it reads (-1: zeros), the one it writes,
    and (rows, slot) for each state inside the pass that is kept, behind so many rows. keeps: so is
    the one behind its last row, in the slot that it writes, an answer's where there is another one
    by then.
    """

    read: int
    write: int
    saves: tuple[tuple[int, int], ...]
    keeps: bool = False


@dataclasses.dataclass(slots=True)
class _State:
    """Of one table. Each slot named here is one reference.

    Attributes:
        slot: holds the state behind `position` tokens; -1: the zeros before the first.
        following: where the next pass writes, if not into `slot`, which is a snapshot then; -1:
            none was taken.
        wanted: position -> why a snapshot is to be kept there.
        known: tokens known when the table was opened: what comes behind is the answer.
        planned: the position behind the pass that runs, None: none runs.
        saves: (position, slot, reason) of that pass; a slot at its end is for the pass after it,
            -1: is taken then.
        tail: (block, serial of its entry) with the snapshot of the answer so far, None: none.
        replayed: tokens whose keys and values are there, and which are computed again for their
            state.
        awaited: blocks come from elsewhere, without a state, until that behind the last one comes
            too.
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
    """The recurrent state of models that have none: every table has room, and nothing is kept."""

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
    """The states of one manager's tables; `pinned` as in `StateSlots`.

    Attributes:
        num_replayed: tokens computed again though their keys and values were there, since the
            start.
        num_released: counts tables' references that ended: while it stands, who found no slot finds
            none.
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
        index.watch(
            self
        )  # before anybody else: of a snapshot's end others are told before its block's

    @property
    def num_draft_rows(self) -> int:
        """Most tokens that a pass may be given as guesses, all sequences together."""
        return self._sizes.num_draft_rows

    # What the index tells.

    def entered(self, block_id: int, entry: object) -> None:
        """A block is published: whatever was said of it before is over by now."""

    def left(self, block_id: int) -> None:
        """A block can be found no more, nor can its state."""
        self.slots.drop(block_id)
        self._kept.pop(block_id, None)

    # A table's life.

    def deepest(self, block_ids: Sequence[int]) -> int:
        """How many blocks of a published prefix lie before its deepest snapshot."""
        of_block = self.slots.of_block
        return next(
            (n for n in range(len(block_ids), 0, -1) if of_block(block_ids[n - 1]) is not None), 0
        )

    def open(
        self, table: BlockTable, num_tokens: int, match: PrefixMatch | None, hints: Iterable[int]
    ) -> None:
        """A table was opened for so many tokens on a match that ends with a snapshot, which it
        reads; None: on none.
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
                        f"block {match.block_ids[-1]} ends a match and has no state"
                    )
                self.slots.use_first(match.block_ids[:-1])
                self.slots.share(slot)
                state.slot = slot
                state.position = len(match.block_ids) * size
            state.replayed = match.beyond * size
        wanted = dict.fromkeys(self._backbone(state.position, num_tokens), BACKBONE)
        # The same prompt again is served up to the block of its last token, one that goes on with
        # all full blocks.
        ends = {max(num_tokens - 1, 0) // size * size, num_tokens // size * size}
        borders = sorted(
            {position // size * size for position in hints if position <= num_tokens} - ends
        )
        ahead = [position for position in borders if position > state.position]
        wanted |= dict.fromkeys(hint_points(ahead, self._sizes.num_slots), HINT)
        if matched > state.position:
            wanted[matched] = JUNCTION
        wanted |= dict.fromkeys(ends, PROMPT)
        state.wanted = {
            position: why for position, why in wanted.items() if position > state.position
        }

    def _backbone(self, start: int, stop: int) -> Iterable[int]:
        small = self._sizes.every_block
        step = self._size if small else -(-self._sizes.interval // self._size) * self._size
        return backbone_points(start, stop, step, self._sizes.num_slots, small=small)

    def ask(self, table: BlockTable, index: int) -> None:
        """Another prompt has this table's blocks up to `index` in common: the state behind that is
        wanted.
        """
        state = self._states[table._serial]
        position = (index + 1) * self._size
        if (
            position > (state.planned or state.position)
            and REASONS[state.wanted.get(position, BACKBONE)] < REASONS[JUNCTION]
        ):
            state.wanted[position] = JUNCTION

    def has_room(self, table: BlockTable) -> bool:
        """Whether the table has a slot to write into, or one can be had."""
        return self._has_own(self._states[table._serial]) or self.slots.num_available > 0

    def prepare(self, table: BlockTable) -> None:
        """Take the slot that the table's next pass writes, unless it has one; CapacityError where
        none can be had.
        """
        state = self._states[table._serial]
        if self._has_own(state):
            return
        slot = self.slots.take(owner=table.owner)
        if slot is None:
            raise CapacityError(
                f"all {self.slots.num_slots} slots of states belong to running sequences; lower "
                "max_num_seqs or enlarge max_state_bytes"
            )
        state.following = slot
        self.num_replayed += state.replayed
        state.replayed = 0

    def _has_own(self, state: _State) -> bool:
        return state.following >= 0 or (state.slot >= 0 and self.slots.is_own(state.slot))

    def plan(self, table: BlockTable, start: int, stop: int) -> PassSlots:
        """The slots of a pass over tokens start .. stop - 1. It ends with `commit`, or with `free`
        if it failed.
        """
        state = self._states[table._serial]
        if state.planned is not None or state.position != start or stop <= start:
            raise CacheCorruption(
                f"a pass from {start} to {stop} does not go on from the state at {state.position}"
            )
        write = state.following if state.following >= 0 else state.slot
        if write < 0 or (write == state.slot and not self.slots.is_own(write)):
            raise CacheCorruption(
                f"the state behind {start} tokens is not the table's own, and no slot was taken"
            )
        state.planned = stop
        if table._publishes:
            # The deepest first: where slots lack, a message border takes none from the prompt's
            # end. A backbone last.
            points = self._save_points(state, start, stop).items()
            for position, reason in sorted(
                points, key=lambda point: (point[1] != BACKBONE, point[0]), reverse=True
            ):
                state.wanted.pop(position, None)
                self._save(table, state, position, reason)
            state.saves.sort()
        inside = tuple(
            (position - start, slot) for position, slot, _ in state.saves if position < stop
        )
        return PassSlots(state.slot, write, inside, keeps=len(inside) < len(state.saves))

    def _save_points(self, state: _State, start: int, stop: int) -> dict[int, str]:
        """Where in (start, stop] the state is to be kept, and why: of an answer behind its last
        full block, of small states behind the others too, as a backbone.
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
                    dict.fromkeys(range(known // size * size + size, last, size), BACKBONE) | found
                )
        return found

    def _save(self, table: BlockTable, state: _State, position: int, reason: str) -> None:
        """Keep the state there if a slot can be had; nobody waits for one."""
        if reason == ANSWER:
            if (
                position == state.planned
            ):  # the pass needs no slot for it: one is taken when the old snapshot goes
                state.saves.append((position, -1, reason))
                return
            # Drafts that were right run over the block's end. Where no slot is free the old
            # snapshot's is taken before the new one is there: else somebody else's would go, for
            # each answer that runs, to hold two for a moment. One that the pass itself reads would
            # leave no slot.
            if (
                not self.slots.num_free
                and state.tail is not None
                and self.slots.of_block(state.tail[0]) != state.slot
            ):
                self._pass_tail(state)
        slot = self.slots.take(reason, table.owner)
        if slot is not None:
            state.saves.append((position, slot, reason))

    def wait(self, table: BlockTable) -> None:
        """A table was opened that computes nothing: blocks come from elsewhere, and then the state
        behind one of all it has. Until then the deepest that is here stays.
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
        """The awaited state came, behind so many of the table's blocks, all of which are there:
        `write` puts it into a slot; CapacityError where none can be had. Where that or `write`
        raises, the table waits on. One behind the last block is the table's; another is a snapshot
        for whoever opens a table next, and this one has none.
        """
        state = self._states[table._serial]
        position = num_blocks * self._size
        if not state.awaited or not 0 < position <= state.position:
            raise CacheCorruption(
                f"a state arrived behind {position} tokens, and nobody waits for it there"
            )
        self.prepare(table)
        write(state.following if state.following >= 0 else state.slot)
        self._move_on(state)
        if position == state.position:
            state.awaited = False
            return
        slot = state.slot
        state.slot = -1
        block_id = standing_for(table, num_blocks - 1, self._index)
        if block_id is None:
            self._release(slot)
        else:
            self._kept[block_id] = None
            self.slots.attach(slot, block_id, PROMPT, table.owner)

    def _move_on(self, state: _State) -> None:
        """Into the slot that was taken, if one was."""
        if state.following >= 0:
            self._release(state.slot)
            state.slot = state.following
            state.following = -1

    def drain_kept(self) -> list[int]:
        """Blocks with a snapshot that was kept since the last call, but for those of a backbone;
        some may be gone.
        """
        kept = self._kept
        self._kept = {}
        return list(kept)

    def commit(self, table: BlockTable, num_computed: int) -> None:
        """The pass is over and its blocks are published: so are the snapshots behind them."""
        state = self._states[table._serial]
        if state.awaited:
            state.position = num_computed
            return
        if num_computed != (state.position if state.planned is None else state.planned):
            raise CacheCorruption(
                f"a state is behind {state.position} tokens, its pass ends at {state.planned}, and "
                f"{num_computed} are committed"
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
            standing_for(table, position // self._size - 1, self._index)
            if table._publishes
            else None
        )
        if block_id is None:
            self._release(slot)
            return
        is_own = position == state.position and self.slots.of_block(block_id) is None
        moved = reason == ANSWER and state.tail is not None
        if reason == ANSWER:
            self._pass_tail(state)
        if slot < 0:
            taken = self.slots.take(reason, table.owner) if is_own else None
            if taken is None:
                return
            slot = taken
        if is_own:  # the slot that was taken is where the table goes on
            state.following = slot
            slot = state.slot
        if reason not in (
            BACKBONE,
            ANSWER,
        ):  # of an answer the last one goes to tiers, when it ends
            self._kept[block_id] = None
        is_new = self.slots.attach(slot, block_id, reason, table.owner, moved=moved)
        if is_own:
            self.slots.hold(slot)
        if reason == ANSWER:
            entry = self._index.entry(block_id)
            state.tail = (block_id, entry.serial) if entry is not None and is_new else None

    def _pass_tail(self, state: _State) -> None:
        """Of an answer one snapshot is enough, the last; the one before stays if others went on
        from it, and where it is small as one of a backbone.
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

    def _keep_tail(self, state: _State) -> None:
        """Of an answer that ended: its snapshot moves no more."""
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
        """A second table goes on from where this one is."""
        state = self._states[table._serial]
        if state.planned is not None:
            raise CacheCorruption("a table is forked while its state is being computed")
        if state.slot >= 0:
            self.slots.share(state.slot)
        wanted = dict(state.wanted)
        self._states[child._serial] = _State(
            state.slot, state.position, wanted=wanted, known=state.known
        )

    def free(self, table: BlockTable) -> None:
        """Give a table's slots back. A state that stands behind a published block is kept there:
        the same sequence goes on from it if it was preempted. That of a pass that failed is not.
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
            block_id = standing_for(table, state.position // self._size - 1, self._index)
        if block_id is not None and self.slots.of_block(block_id) is None:
            self._kept[block_id] = None
            self.slots.attach(slot, block_id, ANSWER, table.owner)
            state.slot = -1
        self._keep_tail(state)
        for one in state.references():
            self._release(one)
        self.num_released += 1

    def _release(self, slot: int) -> None:
        if slot >= 0:
            self.slots.release(slot)
            self.num_released += 1

    def unwritten(self) -> list[int]:
        """Slots that hold nothing yet: free ones, and those that a table's first pass will
        write.
        """
        return self.slots.free_ids() + [
            one.following for one in self._states.values() if one.following >= 0
        ]

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Recompute the references from all live tables, and look each snapshot's block up;
        CacheCorruption on any difference.
        """
        tables = list(tables)
        if {table._serial for table in tables} != set(self._states):
            raise CacheCorruption(
                f"{len(tables)} tables are live, {len(self._states)} have a state"
            )
        for table in tables:
            state = self._states[table._serial]
            if state.position != table.num_computed_tokens:
                raise CacheCorruption(
                    f"a state is behind {state.position} tokens of a table that has "
                    f"{table.num_computed_tokens}"
                )
            if not state.awaited and (state.slot < 0) != (state.position == 0):
                raise CacheCorruption(
                    f"the state behind {state.position} tokens is in slot {state.slot}"
                )
        self.slots.check(slot for state in self._states.values() for slot in state.references())
        for block_id in self.slots.snapshots():
            if self._index.entry(block_id) is None:
                raise CacheCorruption(f"block {block_id} has a snapshot and is not published")
