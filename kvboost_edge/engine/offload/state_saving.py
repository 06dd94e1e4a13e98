"""Write-back and restore of recurrent state between its slots and the offload tiers.

In a tier, the state after a block is a record of its own. Periodic checkpoints are not written,
only states that a request is likely to continue from: a state may be as large as hundreds of
blocks.
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
    """The recurrent state side of `Tiering`; does nothing for models without recurrent state."""

    def __init__(self, manager: KVCacheManager, backend: Backend, io_thread: IOThread) -> None:
        self._manager = manager
        self._backend = backend
        self._io_thread = io_thread
        # Blocks with snapshots that were not copied out, the oldest first.
        self._unsaved: dict[int, None] = {}
        # Unused bytes of earlier steps: a state may be larger than one step may copy.
        self._credit = 0

    def put(self, table: BlockTable, num_blocks: int, data: Bytes) -> None:
        """Put an arrived state into a slot.

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
        """Copy out the oldest unsaved state that no tier holds, if the byte budget allows it.

        Args:
            most_bytes: Bytes added to the budget; None for no limit.

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
            and self._io_thread.has_state_room
        ):
            block_id = next(iter(self._unsaved))
            del self._unsaved[block_id]
            slot = self._manager.states.slots.of_block(block_id)
            block = self._manager.content.address(block_id)
            if slot is None or block is None or not self._manager.content.leaves_pool(block_id):
                continue  # dropped in the meantime
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
