"""Open (partly written) blocks of a quantized pool: their buffers, and changes per pass.

This module handles indices only. During a pass, each block that the pass fills moves to a temporary
buffer with its earlier content. Queries of the pass then read it in float16 in every layer, and its
old buffer is free for the next block at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.errors import CapacityError, ConfigError
from kvboost_edge.segments import Segment, is_last, own_segments

__all__ = ["OpenBlocks", "PassPlan"]

Longs = npt.NDArray[np.int64]


class PassPlan(NamedTuple):
    """The writes of one pass. Buffers from `num_open` on are temporary.

    Attributes:
        slots (int64 [num_tokens]): buffer * block_size + offset of each new token.
        tables (int32 [num_seqs, width]): Buffers of the blocks that each sequence writes, in order.
        first (int32 [num_seqs]): Position of slot 0 of the first block that each sequence writes.
        continued: Pairs (buffer, temporary buffer) to copy before anything is written.
        closed: Pairs (temporary buffer, block id) to quantize after everything is written.
        num_temporary: Number of temporary buffers.
    """

    slots: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    first: npt.NDArray[np.int32]
    continued: list[tuple[int, int]]
    closed: list[tuple[int, int]]
    num_temporary: int


class OpenBlocks:
    """The open blocks of a pool, in `num_open` buffers."""

    def __init__(self, num_open: int, block_size: int) -> None:
        self.num_open = num_open
        self._block_size = block_size
        self._buffers: dict[int, int] = {}
        self._free = list(range(num_open - 1, -1, -1))

    def buffer(self, block_id: int) -> int | None:
        """Return the buffer of a block, or None if it is not open."""
        return self._buffers.get(block_id)

    def check_full(self, block_ids: Iterable[int]) -> None:
        """Raise ConfigError if any of the blocks is open."""
        for block_id in block_ids:
            if block_id in self._buffers:
                raise ConfigError(
                    f"block {block_id} is only partly written; in a quantized pool, only full "
                    "blocks can be read or written as a whole"
                )

    def release(self, block_ids: Iterable[int]) -> None:
        """Free the buffers of open blocks. Blocks that are not open are ignored."""
        for block_id in block_ids:
            buffer = self._buffers.pop(block_id, None)
            if buffer is not None:
                self._free.append(buffer)

    def copied(self, src: int, dst: int) -> tuple[int, int] | None:
        """Make block `dst` a copy of `src`. If `src` is open, return both buffers."""
        if src == dst:
            return None
        source = self._buffers.get(src)
        if source is None:
            self.release([dst])
            return None
        return source, self._take(dst)

    def plan(self, layout: BatchLayout) -> PassPlan:
        """Plan the writes of a layout, opening and closing its blocks. An error changes nothing.

        Raises:
            ConfigError: A slot contradicts the block table, a block that is not open is written
                from its middle on, two sequences write one block, or an earlier segment has a block
                that stays open.
            CapacityError: Too many blocks would be open.
        """
        size = self._block_size
        lengths = np.diff(layout.cu_seqlens_q)
        # From here on, positions count from slot 0 of each sequence's last segment, which receives
        # the new tokens.
        own_index, own_position = own_segments(len(lengths), layout.segments)
        ends = layout.seq_lens - own_position
        starts = ends - lengths
        first = starts // size
        positions = _first_positions(layout, own_position + first * size)
        counts = np.where(lengths > 0, -(-ends // size) - first, 0)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        numbers, offsets = np.divmod(
            (starts - layout.cu_seqlens_q[:-1])[rows] + np.arange(len(rows)), size
        )
        _check_slots(layout, rows, own_index[rows] + numbers, offsets, size)
        tables = np.zeros((len(lengths), max(1, int(counts.max(initial=0)))), dtype=np.int32)
        continued: list[tuple[int, int]] = []
        closed: list[tuple[int, int]] = []
        opened: dict[int, int] = {}
        written: set[int] = set()
        gone: list[int] = []
        for sequence in np.flatnonzero(lengths).tolist():
            begin = int(starts[sequence])
            end = int(ends[sequence])
            for number in range(int(counts[sequence])):
                block_id = int(
                    layout.block_tables[sequence, own_index[sequence] + first[sequence] + number]
                )
                held = self._buffers.get(block_id)
                if block_id in written:
                    raise ConfigError(
                        f"block {block_id} is written by two sequences of the same batch; give "
                        "one of them a copy"
                    )
                written.add(block_id)
                if number == 0 and begin % size:
                    self._check_open(block_id, begin % size, held)
                if end >= (int(first[sequence]) + number + 1) * size:
                    buffer = self.num_open + len(closed)
                    closed.append((buffer, block_id))
                    if held is not None:
                        gone.append(block_id)
                        continued.append((held, buffer))
                    tables[sequence, number] = buffer
                else:
                    opened[block_id] = sequence * tables.shape[1] + number
        self._check_closed(layout, own_index, (self._buffers.keys() - set(gone)) | opened.keys())
        fresh = [block_id for block_id in opened if block_id not in self._buffers]
        if len(fresh) > len(self._free) + len(gone):
            raise self._too_many(len(self._buffers) - len(gone) + len(fresh))
        self.release(gone)
        for block_id, place in opened.items():
            tables.reshape(-1)[place] = self._take(block_id)
        slots = tables[rows, numbers - first[rows]].astype(np.int64) * size + offsets
        return PassPlan(slots, tables, positions, continued, closed, len(closed))

    def view(self, layout: BatchLayout) -> PassPlan:
        """Plan a pass that only reads KV.

        Raises:
            ConfigError: A block that contains the position of a row is not open, or the layout has
                segments.
        """
        if layout.segments is not None:
            raise ConfigError(
                f"segments {layout.segments.tolist()}: a pass that stores nothing must have one "
                "segment for each sequence; leave segments out"
            )
        first = (layout.seq_lens - np.diff(layout.cu_seqlens_q)) // self._block_size
        ends = -(-layout.seq_lens // self._block_size)
        tables = np.zeros((len(first), max(1, int((ends - first).max(initial=0)))), dtype=np.int32)
        for sequence, blocks in enumerate(layout.block_tables):
            own = blocks[first[sequence] : ends[sequence]].tolist()
            closed = [block_id for block_id in own if block_id not in self._buffers]
            if closed:
                raise ConfigError(
                    f"blocks {closed} are not open; in a quantized pool, a pass that stores "
                    "nothing can only have rows in blocks that are partly written"
                )
            tables[sequence, : len(own)] = [self._buffers[block_id] for block_id in own]
        positions = (first * self._block_size).astype(np.int32)
        return PassPlan(np.empty(0, dtype=np.int64), tables, positions, [], [], 0)

    def _check_closed(self, layout: BatchLayout, own_index: Longs, still_open: set[int]) -> None:
        """Raise ConfigError if an earlier segment has a block that is still open after the pass."""
        # Attention reads earlier segments as codes, which exist only for full blocks.
        if layout.segments is None:
            return
        for table, end in zip(layout.block_tables.tolist(), own_index.tolist(), strict=True):
            for block_id in table[:end]:
                if block_id in still_open:
                    raise ConfigError(
                        f"block {block_id} is only partly written, but is not in the last "
                        "segment of its sequence; fill it first"
                    )

    def _take(self, block_id: int) -> int:
        if block_id in self._buffers:
            return self._buffers[block_id]
        if not self._free:
            raise self._too_many(len(self._buffers) + 1)
        self._buffers[block_id] = self._free.pop()
        return self._buffers[block_id]

    def _too_many(self, wanted: int) -> CapacityError:
        return CapacityError(
            f"{wanted} blocks of the quantized pool would be partly written, but there are only "
            f"num_open={self.num_open} buffers; use at least max_num_seqs + 1"
        )

    def _check_open(self, block_id: int, offset: int, held: int | None) -> None:
        if held is None:
            raise ConfigError(
                f"block {block_id} cannot be written from offset {offset}, because a quantized "
                "block is written from its first slot; start the recompute at a multiple of "
                f"block_size={self._block_size}"
            )


def _first_positions(layout: BatchLayout, positions: Longs) -> npt.NDArray[np.int32]:
    """Return the position of slot 0 of the first block that each sequence writes.

    Raises ConfigError if a last segment does not begin at slot 0 of a block.
    """
    if layout.segments is not None:
        last = Segment(*layout.segments[is_last(layout.segments)].T)
        if (last.first_position != last.valid_from).any():
            raise ConfigError(
                f"segments {layout.segments.tolist()}: in a quantized pool, the last segment must "
                "begin at slot 0 of a block"
            )
    return positions.astype(np.int32)


def _check_slots(
    layout: BatchLayout, rows: Longs, numbers: Longs, offsets: Longs, size: int
) -> None:
    """Raise ConfigError unless each token's slot agrees with the block table.

    Args:
        layout: The layout.
        rows: Sequence index of each token.
        numbers: Block-table entry of each token.
        offsets: Offset of each token in its block.
        size: Block size.
    """
    expected = layout.block_tables[rows, numbers].astype(np.int64) * size + offsets
    wrong = np.flatnonzero(expected != layout.slot_mapping)
    if wrong.size:
        row = int(wrong[0])
        raise ConfigError(
            f"token {row} of the batch has slot {int(layout.slot_mapping[row])}, but its block "
            f"table gives slot {int(expected[row])}; in a quantized pool, the two must be equal"
        )
