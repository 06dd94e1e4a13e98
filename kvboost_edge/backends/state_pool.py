"""A pool of slots for recurrent state, used by layers that have it instead of KV."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.block_bytes import check_content
from kvboost_edge.errors import CapacityError, ConfigError
from kvboost_edge.host.memory import Region

__all__ = ["LayerStateSpec", "StatePool"]

Bytes = npt.NDArray[np.uint8]

_CACHE_LINE = 64
_TILE_VALUES = 16  # value columns per matrix tile


@dataclasses.dataclass(frozen=True, slots=True)
class LayerStateSpec:
    """Shape of a sequence's recurrent state in one layer, in float32.

    The conv state comes first: the last inputs, [taps, channels], oldest first. A layer with heads
    then has a matrix per head, in tiles of 16 value columns: [heads, value_dim / 16 rounded up,
    key_dim, 16]. Both parts are aligned to a cache line.

    Attributes:
        taps: Number of earlier inputs that the convolution reads.
        channels: Channels of an input.
        heads: Number of heads.
        key_dim: Rows of a head's matrix.
        value_dim: Columns of a head's matrix.
        gates: Numbers that a token contributes to the matrices in addition to its input.
    """

    taps: int
    channels: int
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    gates: int = 0

    @property
    def tail_bytes(self) -> int:
        """Bytes of the conv state, which precedes the matrices."""
        return _in_lines(4 * self.taps * self.channels)

    @property
    def nbytes(self) -> int:
        """Bytes of a sequence's state in this layer."""
        tiles = -(-self.value_dim // _TILE_VALUES)
        return self.tail_bytes + _in_lines(4 * self.heads * tiles * self.key_dim * _TILE_VALUES)

    @property
    def draft_bytes(self) -> int:
        """Bytes that a draft token contributes to the state: its input and its gates."""
        return _in_lines(4 * (self.channels + self.gates))


def _in_lines(num_bytes: int) -> int:
    return -(-num_bytes // _CACHE_LINE) * _CACHE_LINE


class StatePool:
    """A pool of `num_slots` slots of recurrent state, uint8 [num_slots, slot_bytes].

    A slot holds the states of all layers in order, as described by `LayerStateSpec`. Draft rows
    follow the slots, uint8 [num_draft_rows, draft_row_bytes]. They hold the contributions of the
    last pass's draft tokens to each layer, which are applied later if the tokens are accepted.

    The content of a slot or row is undefined until a pass writes it.

    Raises:
        CapacityError: The memory cannot be allocated.
    """

    def __init__(
        self, specs: Sequence[LayerStateSpec], num_slots: int, num_draft_rows: int = 0
    ) -> None:
        if not specs or num_slots < 1:
            raise ConfigError(
                f"num_state_slots={num_slots} and the number of recurrent layers, {len(specs)}, "
                "must both be at least 1"
            )
        self.specs = tuple(specs)
        self.num_slots = num_slots
        self.num_draft_rows = num_draft_rows
        sizes = [spec.nbytes for spec in self.specs]
        self.slot_bytes = sum(sizes)
        self.draft_row_bytes = sum(spec.draft_bytes for spec in self.specs)
        self._offsets = [sum(sizes[:layer]) for layer in range(len(sizes))]
        slots_end = num_slots * self.slot_bytes
        num_bytes = slots_end + num_draft_rows * self.draft_row_bytes
        try:
            raw = np.empty(num_bytes + _CACHE_LINE, dtype=np.uint8)
        except MemoryError as error:
            raise CapacityError(
                f"recurrent state does not fit in memory: num_state_slots={num_slots} x "
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
        """Bytes of slots and draft rows."""
        return self._slots.nbytes + self._drafts.nbytes

    @property
    def region(self) -> Region:
        """Memory region of slots and draft rows."""
        return Region(self._slots.ctypes.data, self.nbytes)

    def address(self, slot: int) -> int:
        """Return the address of a slot's first byte."""
        self._check([slot])
        return int(self._slots.ctypes.data) + slot * self.slot_bytes

    def offset(self, layer: int) -> int:
        """Return the offset of a layer's conv state in a slot. Its matrices follow.

        `layer` counts only layers with recurrent state. The matrices start
        `specs[layer].tail_bytes` after the conv state.
        """
        return self._offsets[layer]

    @property
    def drafts_address(self) -> int:
        """Address of the first draft row."""
        return int(self._slots.ctypes.data) + self._slots.nbytes

    def read_slots(self, slots: Sequence[int]) -> Bytes:
        """Copy slots to bytes, uint8 [len(slots), slot_bytes]."""
        self._check(slots)
        return self._slots.take(list(slots), axis=0)

    def write_slots(self, slots: Sequence[int], data: Bytes) -> None:
        """Overwrite slots with bytes from `read_slots`. After an error, no slot has changed.

        Raises:
            ConfigError: The data has the wrong shape or dtype, or a slot is outside the pool or
                repeated.
        """
        self._check(slots)
        check_content(slots, data, self.slot_bytes, "slot")
        self._slots[list(slots)] = data

    def poison(self, slots: Sequence[int]) -> None:
        """Fill slots with NaN to expose reads of unwritten states. For debugging."""
        self._check(slots)
        self._slots.view(np.float32)[list(slots)] = np.nan

    def poison_drafts(self) -> None:
        """Fill the draft rows with NaN to expose reads of stale rows. For debugging."""
        self._drafts.view(np.float32)[:] = np.nan

    def checksums(self, slots: Sequence[int]) -> list[int]:
        """Return the CRC-32 of each slot. For debugging."""
        self._check(slots)
        return [zlib.crc32(self._slots[slot]) for slot in slots]

    def close(self) -> None:
        """Release the memory of all slots."""
        self._slots = np.empty((0, self.slot_bytes), dtype=np.uint8)
        self.num_slots = 0
        self._drafts = np.empty((0, self.draft_row_bytes), dtype=np.uint8)
        self.num_draft_rows = 0

    def _check(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise ConfigError(
                    f"recurrent state slot {slot} must be in the pool's 0..{self.num_slots - 1}"
                )
