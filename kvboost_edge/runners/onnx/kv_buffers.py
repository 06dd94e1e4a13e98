"""Contiguous KV of running sequences, in the layout that onnxruntime needs.

The block pool is the source of truth. A buffer is a copy of the blocks in one block table. It is
gathered when a sequence arrives and extended by each computed token. Change counters of the blocks
show whether a buffer still equals the pool.

If a graph shares past and present, a layer's buffer is [1, heads, capacity, dim] and grows in
place. Otherwise past and present are [1, heads, count, dim] arrays that alternate between two
allocations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.models.onnx.past_kv import LayerPast, PastLayout

__all__ = ["Buffer", "PastBuffers"]

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
_LEAST = 64  # minimum capacity in tokens; a full buffer is replaced by one of twice the size


@dataclasses.dataclass(slots=True, eq=False)
class Buffer:
    """KV of the first `count` tokens in a block table.

    Attributes:
        capacity: maximum number of tokens.
        memory: allocations for each layer's keys, then its values. There are two each if past and
            present are separate arrays.
        count: number of stored tokens.
        turn: index of the allocation that contains the past.
        binding: onnxruntime binding, created once if past and present are shared.
        blocks: int32, ids of the copied blocks.
        marks: int64, change counters of these blocks when they were copied.
    """

    capacity: int
    memory: list[list[Array]]
    count: int = 0
    turn: int = 0
    binding: Any = None
    blocks: npt.NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))
    marks: Ints = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for pieces in self.memory for piece in pieces)


class PastBuffers:
    """Buffers of the most recent sequences, within a memory limit.

    Args:
        layout: inputs and outputs of the graph.
        block_size: number of tokens in a block.
        most_bytes: limit of all buffers together in bytes. A single buffer may exceed it.
        gather: returns the keys and values of each layer for some block ids, [heads, len(blocks) *
            block_size, dim].
    """

    def __init__(
        self,
        layout: PastLayout,
        block_size: int,
        most_bytes: int,
        gather: Callable[[npt.NDArray[np.int32]], list[tuple[Array, Array]]],
    ) -> None:
        self._layout = layout
        self._block_size = block_size
        self._most_bytes = most_bytes
        self._gather = gather
        self._dtype = np.dtype(layout.dtype)
        self._kept: list[Buffer] = []  # least recently used first
        self.num_gathered = 0

    @property
    def nbytes(self) -> int:
        # Copied, because other threads call this while the engine runs.
        return sum(buffer.nbytes for buffer in tuple(self._kept))

    def take(self, table: npt.NDArray[np.int32], start: int, stop: int, marks: Ints) -> Buffer:
        """Return a buffer with the first `start` tokens of a block table and room for `stop`.

        `marks` are the change counters of all blocks.
        """
        buffer = self._find(table, start, marks)
        if buffer is not None and stop <= buffer.capacity:
            self._cut(buffer, start)
            return buffer
        if buffer is not None:
            self._kept.remove(buffer)
            self._cut(buffer, start)
        found = self._make(stop)
        if buffer is not None:
            for layer, index in self._pieces():
                self._past(found, layer, index, start)[...] = self._past(
                    buffer, layer, index, start
                )
        elif start:
            self._fill(found, table, start)
        found.count = start
        self._kept.append(found)
        return found

    def past(self, buffer: Buffer, layer: int, index: int) -> Array:
        """Return the array to bind as a layer's past keys (index 0) or values (index 1)."""
        if self._layout.shared:
            return buffer.memory[2 * layer + index][0]
        return self._past(buffer, layer, index, buffer.count)

    def present(self, buffer: Buffer, layer: int, index: int, stop: int) -> Array:
        """Return the array to bind as a layer's present keys or values for `stop` tokens."""
        if self._layout.shared:
            return buffer.memory[2 * layer + index][0]
        return self._view(buffer.memory[2 * layer + index][1 - buffer.turn], layer, stop)

    def advance(self, buffer: Buffer, stop: int) -> None:
        """Make the computed present arrays the past of the next run."""
        buffer.count = stop
        if not self._layout.shared:
            buffer.turn = 1 - buffer.turn

    def added(self, buffer: Buffer, layer: int, index: int, start: int) -> Array:
        """Return a view of the keys or values from token `start` on, [heads, tokens, dim]."""
        return self._past(buffer, layer, index, buffer.count)[0, :, start : buffer.count]

    def clear(self) -> None:
        self._kept.clear()

    def _find(self, table: npt.NDArray[np.int32], start: int, marks: Ints) -> Buffer | None:
        """Return an unchanged buffer whose blocks are the first ones of the table, or None.

        A buffer without blocks, as a failed pass leaves it, fits no table.
        """
        for buffer in reversed(self._kept):
            count = len(buffer.blocks)
            if (
                start
                and buffer.count >= start
                and 0 < count <= len(table)
                and np.array_equal(buffer.blocks, table[:count])
                and np.array_equal(buffer.marks, marks[buffer.blocks])
            ):
                self._kept.remove(buffer)
                self._kept.append(buffer)
                return buffer
        return None

    def _make(self, stop: int) -> Buffer:
        capacity = _LEAST
        while capacity < stop:
            capacity *= 2
        copies = 1 if self._layout.shared else 2
        per_token = sum(2 * layer.num_kv_heads * layer.head_dim for layer in self._layout.layers)
        needed = capacity * per_token * self._dtype.itemsize * copies
        while self._kept and self.nbytes + needed > self._most_bytes:
            self._kept.pop(0)
        memory = [
            [self._empty(layer, capacity) for _ in range(copies)] for layer, _ in self._named()
        ]
        return Buffer(capacity, memory)

    def _named(self) -> list[tuple[LayerPast, int]]:
        return [(layer, index) for layer in self._layout.layers for index in (0, 1)]

    def _pieces(self) -> list[tuple[int, int]]:
        return [(layer, index) for layer in range(len(self._layout.layers)) for index in (0, 1)]

    def _empty(self, layer: LayerPast, capacity: int) -> Array:
        # Initialized to zero, because the graph multiplies masked entries, which must not be NaN.
        return np.zeros((1, layer.num_kv_heads, capacity, layer.head_dim), dtype=self._dtype)

    def _view(self, memory: Array, layer: int, count: int) -> Array:
        """Return the start of an allocation as a contiguous array for `count` tokens."""
        one = self._layout.layers[layer]
        return memory.reshape(-1)[: one.num_kv_heads * count * one.head_dim].reshape(
            1, one.num_kv_heads, count, one.head_dim
        )

    def _past(self, buffer: Buffer, layer: int, index: int, count: int) -> Array:
        if self._layout.shared:
            return buffer.memory[2 * layer + index][0][:, :, :count]
        return self._view(buffer.memory[2 * layer + index][buffer.turn], layer, count)

    def _cut(self, buffer: Buffer, start: int) -> None:
        """Drop the tokens from `start` on."""
        if start == buffer.count:
            return
        if not self._layout.shared:
            for layer, index in self._pieces():
                kept = self._past(buffer, layer, index, buffer.count)[:, :, :start].copy()
                self._past(buffer, layer, index, start)[...] = kept
        buffer.count = start

    def _fill(self, buffer: Buffer, table: npt.NDArray[np.int32], start: int) -> None:
        self.num_gathered += 1
        blocks = table[: -(-start // self._block_size)]
        for layer, both in enumerate(self._gather(blocks)):
            for index, values in enumerate(both):
                self._past(buffer, layer, index, start)[0] = values[:, :start]
