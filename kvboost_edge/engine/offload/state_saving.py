"""Write-back of recurrent state to the offload tiers, and its restore.

A tier stores the state after a block as a separate record. A state can be as large as hundreds of
blocks, so only states that a request is likely to continue from are written. Periodic checkpoints
are not.
"""

from __future__ import annotations

import logging

from kvboost_edge.backends.base import Backend
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.tiers.io_thread import Bytes, IOThread

__all__ = ["SavedStates"]

_LOG = logging.getLogger(__name__)


class SavedStates:
    """The part of `Tiering` that handles recurrent state.

    For models without recurrent state, it does nothing.
    """

    def __init__(self, manager: KVCacheManager, backend: Backend, io_thread: IOThread) -> None:
        self._manager = manager
        self._backend = backend
        self._io_thread = io_thread
        # Blocks whose snapshots have not been saved yet, oldest first.
        self._unsaved: dict[int, None] = {}
        # Byte budget carried over from earlier steps, because a state may exceed the budget of one
        # step.
        self._credit = 0

    def put(self, table: BlockTable, num_blocks: int, data: Bytes) -> None:
        """Write a state that arrived from a tier into a slot.

        Args:
            table: A block table that waits for a state.
            num_blocks: The number of blocks before the state.
            data: uint8 [1, bytes_per_state].
        """
        assert self._manager.states is not None
        assert self._backend.states is not None
        write_slots = self._backend.states.write_slots
        self._manager.states.arrive(table, num_blocks, lambda slot: write_slots([slot], data))

    def save_next(self, most_bytes: int | None) -> bool:
        """Save the oldest unsaved state that no tier holds, if the byte budget allows it.

        Args:
            most_bytes: Bytes to add to the budget, or None for no limit.

        Returns:
            Whether unsaved states remain.
        """
        if self._manager.states is None or self._backend.states is None:
            return False
        self._unsaved.update(dict.fromkeys(self._manager.states.drain_kept()))
        size = self._backend.spec.bytes_per_state
        self._credit = size if most_bytes is None else min(size, self._credit + most_bytes)
        while (
            self._unsaved
            and self._credit >= size
            and self._io_thread.stores
            and self._io_thread.room_for(size)
        ):
            block_id = next(iter(self._unsaved))
            del self._unsaved[block_id]
            slot = self._manager.states.slots.of_block(block_id)
            block = self._manager.content.address(block_id)
            if slot is None or block is None or not self._manager.content.leaves_pool(block_id):
                continue  # evicted or dropped in the meantime
            if not self._io_thread.lacking([block.state_address.prefix_hash])[0]:
                continue
            try:
                data = self._backend.states.read_slots([slot])
            except MemoryError:
                _LOG.warning(
                    "not enough memory to copy a recurrent state of %d bytes to the offload "
                    "tiers; it is not saved",
                    size,
                )
                self._io_thread.note_lost(1)
                continue
            self._io_thread.store([block.state_address], data)
            self._credit -= size
        return bool(self._unsaved)
