"""The slots that hold sequences' states, for layers that keep one instead of keys and values."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import CapacityError, ConfigError
from kvboost_edge.host.memory import Region

__all__ = ["LayerStateSpec", "StatePool"]

Bytes = npt.NDArray[np.uint8]

_CACHE_LINE = 64
_TILE_VALUES = 16  # value columns of a matrix that lie side by side


@dataclasses.dataclass(frozen=True, slots=True)
class LayerStateSpec:
    """Shape of the state that one layer without keys and values keeps of a sequence, float32
    throughout.

    First the tail of its convolution: the last inputs, [taps, channels], the oldest first. Then,
    where the layer has heads, a matrix of each, as tiles of 16 value columns: [heads, value_dim /
    16 rounded up, key_dim, 16]. Both begin at a cache line.

    taps      inputs before a token that its convolution reads
    channels  of an input
    gates     numbers beside its input that a token brings to the matrices
    """

    taps: int
    channels: int
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    gates: int = 0

    @property
    def tail_bytes(self) -> int:
        """Bytes before the matrices."""
        return _in_lines(4 * self.taps * self.channels)

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state."""
        tiles = -(-self.value_dim // _TILE_VALUES)
        return self.tail_bytes + _in_lines(4 * self.heads * tiles * self.key_dim * _TILE_VALUES)

    @property
    def draft_bytes(self) -> int:
        """Bytes of what a token that is only guessed brings to the state: its input, then its
        gates.
        """
        return _in_lines(4 * (self.channels + self.gates))


def _in_lines(num_bytes: int) -> int:
    return -(-num_bytes // _CACHE_LINE) * _CACHE_LINE


class StatePool:
    """`num_slots` slots, uint8 [num_slots, slot_bytes]. A slot is layer after layer what
    LayerStateSpec says.

    Behind the slots are rows of drafts, uint8 [num_draft_rows, draft_row_bytes]: what the tokens
    that the last pass was given as guesses brought to the state of each layer, which takes in those
    that turn out right.

    What a slot or a row holds is undefined until a pass writes it. CapacityError when memory is
    refused.
    """

    def __init__(
        self, specs: Sequence[LayerStateSpec], num_slots: int, num_draft_rows: int = 0
    ) -> None:
        if not specs or num_slots < 1:
            raise ConfigError(
                f"num_state_slots={num_slots} of {len(specs)} layers: both must be at least 1"
            )
        self.specs = tuple(specs)
        self.num_slots = num_slots
        self.num_draft_rows = num_draft_rows
        sizes = [spec.nbytes for spec in self.specs]
        rows = [spec.draft_bytes for spec in self.specs]
        self.slot_bytes = sum(sizes)
        self.draft_row_bytes = sum(rows)
        self._offsets = [sum(sizes[:layer]) for layer in range(len(sizes))]
        self._draft_offsets = [sum(rows[:layer]) for layer in range(len(rows))]
        slots_end = num_slots * self.slot_bytes
        num_bytes = slots_end + num_draft_rows * self.draft_row_bytes
        try:
            raw = np.empty(num_bytes + _CACHE_LINE, dtype=np.uint8)
        except MemoryError as error:
            raise CapacityError(
                f"the states do not fit into memory: num_state_slots={num_slots} x "
                f"{self.slot_bytes} bytes and {num_draft_rows} drafts x {self.draft_row_bytes} "
                f"bytes = {num_bytes} bytes; lower max_state_bytes, max_num_seqs or "
                "max_draft_tokens"
            ) from error
        start = -raw.ctypes.data % _CACHE_LINE
        memory = raw[start : start + num_bytes]
        self._slots: Bytes = memory[:slots_end].reshape(num_slots, self.slot_bytes)
        self._drafts: Bytes = memory[slots_end:].reshape(num_draft_rows, self.draft_row_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots and of the drafts behind them."""
        return self._slots.nbytes + self._drafts.nbytes

    @property
    def region(self) -> Region:
        """Where all of it lies in this process's memory."""
        return Region(self._slots.ctypes.data, self.nbytes)

    def address(self, slot: int) -> int:
        """Address of a slot's first byte."""
        self._check([slot])
        return int(self._slots.ctypes.data) + slot * self.slot_bytes

    def offset(self, layer: int) -> int:
        """First byte in a slot of the state of a layer, counted among those with one: the tail of
        its convolution; its matrices begin `specs[layer].tail_bytes` further.
        """
        return self._offsets[layer]

    def tail(self, slot: int, layer: int) -> npt.NDArray[np.float32]:
        """The tail of a convolution, a view, float32 [taps, channels]."""
        spec = self.specs[layer]
        start = self._offsets[layer]
        floats: npt.NDArray[np.float32] = self._row(slot)[start : start + spec.tail_bytes].view(
            np.float32
        )
        return floats[: spec.taps * spec.channels].reshape(spec.taps, spec.channels)

    def matrices(self, slot: int, layer: int) -> npt.NDArray[np.float32]:
        """The matrices of a layer's heads, a view, float32 [heads, tiles, key_dim, 16]."""
        spec = self.specs[layer]
        start = self._offsets[layer]
        floats: npt.NDArray[np.float32] = self._row(slot)[
            start + spec.tail_bytes : start + spec.nbytes
        ].view(np.float32)
        shape = (spec.heads, -(-spec.value_dim // 16), spec.key_dim, 16)
        return floats[: int(np.prod(shape))].reshape(shape)

    @property
    def drafts_address(self) -> int:
        """Address of the first row of drafts."""
        return int(self._slots.ctypes.data) + self._slots.nbytes

    def draft_offset(self, layer: int) -> int:
        """First byte in a row of drafts of what it brings to a layer, counted as in `offset`."""
        return self._draft_offsets[layer]

    def draft(self, row: int, layer: int) -> npt.NDArray[np.float32]:
        """What a draft brings to a layer, a view, float32 [channels + gates]."""
        spec = self.specs[layer]
        start = self._draft_offsets[layer]
        floats: npt.NDArray[np.float32] = self._drafts[row, start : start + spec.draft_bytes].view(
            np.float32
        )
        return floats[: spec.channels + spec.gates]

    def read_slots(self, slots: Sequence[int]) -> Bytes:
        """The bytes of slots, uint8 [len(slots), slot_bytes], a copy."""
        self._check(slots)
        return self._slots.take(list(slots), axis=0)

    def write_slots(self, slots: Sequence[int], data: Bytes) -> None:
        """Put what `read_slots` returned into these slots, each named once. ConfigError for data of
        another shape or type, and for a slot outside the pool or named twice; nothing is changed
        then.
        """
        self._check(slots)
        expected = (len(slots), self.slot_bytes)
        if data.dtype != np.uint8 or data.shape != expected:
            raise ConfigError(
                f"{len(slots)} slots are written from uint8 bytes of shape {expected}; got "
                f"{data.dtype} {data.shape}"
            )
        if len(set(slots)) != len(slots):
            raise ConfigError(
                f"slots {list(slots)} are written at once, and one of them is named twice"
            )
        self._slots[list(slots)] = data

    def poison(self, slots: Sequence[int]) -> None:
        """Debug: fill slots with NaN, so that a read of a state that was never written shows."""
        self._check(slots)
        self._slots.view(np.float32)[list(slots)] = np.nan

    def poison_drafts(self) -> None:
        """Debug: fill the rows of drafts with NaN, so that a read of another pass's shows."""
        self._drafts.view(np.float32)[:] = np.nan

    def checksums(self, slots: Sequence[int]) -> list[int]:
        """Debug: CRC-32 of each slot's bytes."""
        self._check(slots)
        return [zlib.crc32(self._slots[slot]) for slot in slots]

    def close(self) -> None:
        """Release the memory; no slot is left."""
        self._slots = np.empty((0, self.slot_bytes), dtype=np.uint8)
        self.num_slots = 0
        self._drafts = np.empty((0, self.draft_row_bytes), dtype=np.uint8)
        self.num_draft_rows = 0

    def _row(self, slot: int) -> Bytes:
        self._check([slot])
        row: Bytes = self._slots[slot]
        return row

    def _check(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise ConfigError(
                    f"slot {slot} of states must lie in the pool's 0..{self.num_slots - 1}"
                )
