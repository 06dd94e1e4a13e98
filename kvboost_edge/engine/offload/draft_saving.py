"""Write-back of a drafter's KV to the offload tiers, and its restore.

A tier stores the drafter's KV of a block as a separate record. Its address depends on the block's
prefix hash and on the drafter, so tenants and drafters are kept apart. The block's own record does
not depend on it: a lost, damaged or missing record, or another drafter, only means that the drafter
computes the KV again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Protocol

from kvboost_edge.backends.base import Backend
from kvboost_edge.kvcache.hashing import BlockAddress
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.tiers.io_thread import IOChunk, IOThread

__all__ = ["DrafterKV", "NoSavedDrafts", "SavedDrafts"]

_LOG = logging.getLogger(__name__)
_LOAD_BYTES = 8 << 20  # per load, which takes 1-2 ms to copy within a step of 20 ms


class DrafterKV(Protocol):
    """The KV of a drafter, such as a draft model.

    Attributes:
        backend: pool of the KV, with the block ids of the engine's pool.
        digest: 32-byte digest of everything that affects the bits of the KV.
    """

    @property
    def backend(self) -> Backend: ...

    @property
    def digest(self) -> bytes: ...


class NoSavedDrafts:
    """The null implementation for an engine without a drafter or without tiers.

    Attributes:
        num_restored: number of blocks whose KV of the drafter was restored.
    """

    num_restored = 0

    def load(self, block_ids: Iterable[int]) -> None:
        """Start loading the drafter's KV of blocks that arrived from a tier."""

    def put(self, chunk: IOChunk) -> None:
        """Write KV of the drafter that arrived into its pool."""

    def note_published(self, block_ids: Iterable[int]) -> None:
        """Queue those blocks for saving whose KV of the drafter is complete.

        Args:
            block_ids: blocks that were published since the last call.
        """

    def save_evicted(self, evicted: Mapping[int, BlockAddress]) -> None:
        """Copy out unsaved KV of evicted blocks before it is overwritten.

        Args:
            evicted: addresses of the evicted blocks.
        """

    def save_next(self, most_bytes: int) -> bool:
        """Save the oldest unsaved KV, and return whether any remains.

        Args:
            most_bytes: number of bytes to save. At least one block is saved.
        """
        return False


class SavedDrafts(NoSavedDrafts):
    """The part of `Tiering` that handles the KV of a drafter."""

    def __init__(self, manager: KVCacheManager, drafter: DrafterKV, io_thread: IOThread) -> None:
        self._content = manager.content
        self._drafted = manager.drafted
        self._backend = drafter.backend
        self._io_thread = io_thread
        self._bytes_per_block = drafter.backend.spec.bytes_per_block
        # Full, published blocks whose KV of the drafter was not saved, oldest first.
        self._unsaved: dict[int, None] = {}
        self._loads: dict[int, list[tuple[int, BlockAddress]]] = {}
        # Prefetches count upwards from 0.
        self._tickets = itertools.count(-1, -1)
        manager.drafted.track(drafter.digest)

    def load(self, block_ids: Iterable[int]) -> None:
        if not self._drafted.is_on:
            return
        wanted = [
            (block_id, block)
            for block_id in block_ids
            if (block := self._content.address(block_id)) is not None
            and not self._drafted.is_full(block_id)
            and self._io_thread.may_hold(self._drafted.address(block).prefix_hash)
        ]
        most = max(1, _LOAD_BYTES // self._bytes_per_block)
        for start in range(0, len(wanted), most):
            ticket = next(self._tickets)
            self._loads[ticket] = blocks = wanted[start : start + most]
            self._drafted.arriving.update(blocks)
            addresses = [self._drafted.address(block) for _, block in blocks]
            self._io_thread.load_each(ticket, addresses, self._bytes_per_block)

    def put(self, chunk: IOChunk) -> None:
        assert chunk.places is not None
        blocks = self._loads.pop(chunk.ticket)
        arriving = self._drafted.arriving
        # A block may have been evicted, and its id may even await other KV.
        own = {id_: block for id_, block in blocks if arriving.get(id_) == block}
        for block_id in own:
            del arriving[block_id]
        rows = {
            block_id: row
            for row, (block_id, block) in enumerate(blocks[place] for place in chunk.places)
            if block_id in own and self._content.address(block_id) == block
        }
        if not rows:
            return
        # In a quantized pool, these blocks may be partly written, also by earlier owners.
        for block_id in rows:
            self._drafted.drop(block_id)
        self._backend.release_blocks(list(rows))
        try:
            self._backend.write_blocks(list(rows), chunk.data[list(rows.values())])
        except Exception:
            _LOG.exception(
                "KV of the drafter could not be written into its pool; it is computed instead"
            )
            return
        for block_id in rows:
            self._drafted.fill(block_id, self._drafted.block_size)
        self.num_restored += len(rows)

    def note_published(self, block_ids: Iterable[int]) -> None:
        for block_id in itertools.chain(block_ids, self._drafted.drain_full()):
            if self._drafted.is_full(block_id) and self._content.leaves_pool(block_id):
                self._unsaved[block_id] = None

    def save_evicted(self, evicted: Mapping[int, BlockAddress]) -> None:
        dying = {
            block_id: evicted[block_id]
            for block_id in self._drafted.drain_evicted()
            if block_id in self._unsaved and block_id in evicted
        }
        for block_id in evicted:
            self._unsaved.pop(block_id, None)
        if self._io_thread.stores:
            self._save(dying)

    def save_next(self, most_bytes: int) -> bool:
        if not self._unsaved or not self._io_thread.stores:
            return bool(self._unsaved)
        most = max(1, most_bytes // self._bytes_per_block)
        oldest = itertools.islice(self._unsaved, min(most, self._room))
        found = {block_id: self._content.address(block_id) for block_id in oldest}
        for block_id in found:
            del self._unsaved[block_id]
        self._save(
            {
                block_id: block
                for block_id, block in found.items()
                if block is not None and self._drafted.is_full(block_id)
            }
        )
        return bool(self._unsaved)

    @property
    def _room(self) -> int:
        return self._io_thread.room_for(self._bytes_per_block)

    def _save(self, blocks: Mapping[int, BlockAddress]) -> None:
        """Copy out KV that at least one tier does not hold, as far as there is room."""
        addresses = {block_id: self._drafted.address(block) for block_id, block in blocks.items()}
        lacking = self._io_thread.lacking([one.prefix_hash for one in addresses.values()])
        wanted = itertools.compress(addresses.items(), lacking)
        saved = dict(itertools.islice(wanted, self._room))
        if not saved:
            return
        try:
            data = self._backend.read_blocks(list(saved))
        except MemoryError:
            _LOG.warning(
                "not enough memory to copy the drafter's KV of %d blocks to the offload tiers; it "
                "is not saved",
                len(saved),
            )
            return
        self._io_thread.store(list(saved.values()), data)
