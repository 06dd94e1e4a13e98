"""The engine thread's side of the offload tiers, for arriving blocks and write-back.

After each step, a few blocks are copied out of the pool. When the engine is idle or closes, all of
them are. A block that is about to be evicted is copied immediately. Nothing here waits for a tier.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from kvboost_edge.backends.base import Backend
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.offload.draft_saving import DrafterKV, NoSavedDrafts, SavedDrafts
from kvboost_edge.engine.offload.prefetch import Prefetch, PrefetchQueue
from kvboost_edge.engine.offload.state_saving import SavedStates
from kvboost_edge.engine.schedule.planners import Prefetcher
from kvboost_edge.errors import CacheCorruption, ConfigError
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.events import CacheEvents
from kvboost_edge.kvcache.hashing import BlockAddress, root_hash
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.tiers.base import Tier, TierStats
from kvboost_edge.tiers.io_thread import IOChunk, IOThread

__all__ = [
    "NoTiers",
    "Tiering",
    "check_tiers",
    "make_tiering",
    "open_tiers",
    "tier_places",
]

_LOG = logging.getLogger(__name__)
# Number of bytes to save per second of step time. At 4 GB/s, copying takes 1% of the time.
_BYTES_A_SECOND = 40e6
_LEAST_BYTES = 256 << 10
_MOST_BYTES = 16 << 20
# Number of bytes per copy while the engine is idle. A new request waits about 2 ms for one copy.
_IDLE_BYTES = 4 << 20
_CLOSING_SECONDS = 10.0  # time limit for saving blocks when the engine closes


def open_tiers(
    config: EngineConfig, fingerprint: str, kv_format: str, architecture: str, name: str = ""
) -> tuple[Tier, ...]:
    """Open the tiers that a config names, nearest first.

    If the disk tier cannot be opened, the error is logged, and the tier stores nothing. Its
    statistics give the reason.

    Args:
        config: Options of the engine.
        fingerprint: Fingerprint of the model's files.
        kv_format: Identifier of the KV format.
        architecture: The model's architecture.
        name: The model's display name, or "".

    Raises:
        ConfigError: `redis_url` is invalid or has no secret.
        BackendUnavailable: The Redis client is not installed.
    """
    # All tenants share one directory, because the roots of their hash chains differ.
    space = root_hash(model_fingerprint=fingerprint, kv_format=kv_format)
    # Open Redis before the disk tier, because opening Redis may raise.
    shared = () if config.redis_url is None else (_redis_tier(config, space),)
    if config.disk_cache_dir is None:
        return shared
    from kvboost_edge.tiers.disk.tier import DiskTier

    description = {"model": fingerprint[:16], "architecture": architecture, "kv_format": kv_format}
    description |= {"name": name} if name else {}
    try:
        disk = DiskTier.open(
            config.disk_cache_dir, space, max_bytes=config.max_disk_bytes, description=description
        )
    except ConfigError as error:
        _LOG.warning("KV blocks are not saved to disk: %s", error)
        disk = DiskTier(None, str(error))
    return (disk, *shared)


def check_tiers(config: EngineConfig) -> None:
    """Check the tiers' options before a model is loaded, without connecting.

    Raises:
        ConfigError: `redis_url` is invalid or has no secret.
        BackendUnavailable: The Redis client is not installed.
    """
    if config.redis_url is not None:
        _redis_tier(config, bytes(32)).close()


def tier_places(config: EngineConfig) -> dict[str, str]:
    """Return each tier's directory or address by name. Addresses omit user and password."""
    places = {} if config.disk_cache_dir is None else {"disk": os.fspath(config.disk_cache_dir)}
    if config.redis_url is not None:
        from kvboost_edge.tiers.redis.address import parse_url
        from kvboost_edge.tiers.redis.tier import PASSWORD_VARIABLE

        places["redis"] = parse_url(config.redis_url, os.environ.get(PASSWORD_VARIABLE, "")).place
    return places


def _redis_tier(config: EngineConfig, space: bytes) -> Tier:
    from kvboost_edge.tiers.redis.tier import RedisTier

    assert config.redis_url is not None
    return RedisTier(config.redis_url, space, trust=config.redis_trust)


def make_tiering(
    manager: KVCacheManager,
    backend: Backend,
    tiers: Sequence[Tier],
    drafter: DrafterKV | None = None,
) -> tuple[Prefetcher, NoTiers]:
    """Return the scheduler's prefetcher and the engine's `Tiering` object.

    Args:
        manager: Manager of the engine's blocks.
        backend: The engine's pool.
        tiers: The tiers, nearest first.
        drafter: Drafter whose KV is stored too, or None.
    """
    if not tiers:
        return Prefetcher(), NoTiers()
    io_thread = IOThread(tiers, backend.spec.bytes_per_block, backend.spec.bytes_per_state)
    loads = PrefetchQueue(manager, io_thread)
    return loads, Tiering(manager, backend, loads, io_thread, drafter)


class NoTiers:
    """The null implementation for an engine without offload tiers."""

    def start(self, deliver: Callable[[IOChunk], None]) -> None:
        """Start the I/O thread.

        Args:
            deliver: Function that puts arrived chunks into the engine's inbox.
        """

    def fill(self, piece: IOChunk) -> None:
        """Write arrived blocks into the pool and add them to the cache."""

    def save_first(self, block_ids: Sequence[int]) -> None:
        """Move cached blocks to the front of the write-back queue."""

    def save_evicted(self) -> None:
        """Copy out evicted blocks that no tier holds, before they are overwritten."""

    def save_some(self, seconds: float) -> None:
        """Save some unsaved blocks after a step that took `seconds`."""

    def save_more(self) -> bool:
        """Save unsaved blocks while the engine is idle, and return whether any remain."""
        return False

    def stats(self) -> Mapping[str, TierStats]:
        """Return the statistics of each tier by name."""
        return {}

    def take_held(self, whole: bool = False) -> dict[str, CacheEvents]:
        """Return the hashes that each tier gained and lost since the last call.

        Any thread may call this method, but only one caller, because each call consumes the
        changes.

        Args:
            whole: Return all current hashes instead of changes.
        """
        return {}

    @property
    def num_lost(self) -> int:
        """Number of blocks that were evicted before they could be saved."""
        return 0

    @property
    def num_draft_restored(self) -> int:
        """Number of blocks whose KV of the drafter was restored."""
        return 0

    @property
    def staging_bytes(self) -> int:
        """Size in bytes of blocks in transit to or from a tier."""
        return 0

    def close(self, *, save: bool) -> None:
        """Close the tiers.

        Args:
            save: Save unsaved blocks first.
        """


class Tiering(NoTiers):
    """The engine's offload tiers, served by an I/O thread.

    Args:
        loads: The scheduler's prefetch queue.
        drafter: Drafter whose KV is stored too, or None.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        backend: Backend,
        loads: PrefetchQueue,
        io_thread: IOThread,
        drafter: DrafterKV | None = None,
    ) -> None:
        self._manager = manager
        self._backend = backend
        self._loads = loads
        self._io_thread = io_thread
        # Cached blocks that have not been saved. Urgent blocks (True) come first, then the oldest.
        self._unsaved: OrderedDict[int, bool] = OrderedDict()
        self._states = SavedStates(manager, backend, io_thread)
        self._drafts = NoSavedDrafts()
        if drafter is not None:
            self._drafts = SavedDrafts(manager, drafter, io_thread)
        manager.content.track()

    def start(self, deliver: Callable[[IOChunk], None]) -> None:
        self._io_thread.start(deliver)

    def fill(self, piece: IOChunk) -> None:
        # If the pool has no room for the arrived blocks, the prefetch ends and the rest is
        # computed.
        load = self._loads.heard(piece.ticket)
        try:
            if piece.places is not None:
                self._drafts.put(piece)
            elif load is not None and not load.is_done:
                self._take(load, piece)
        except CacheCorruption:
            raise
        except Exception:
            _LOG.exception(
                "blocks from tier %s could not be written into the pool; they are computed instead",
                piece.tier,
            )
            if load is not None:
                self._loads.finish(load)
        finally:
            self._io_thread.release(piece)

    def _take(self, load: Prefetch, piece: IOChunk) -> None:
        if piece.num_blocks_before is not None:
            self._take_state(load, piece.num_blocks_before, piece)
            return
        count = len(piece.data) * self._manager.block_size
        stop = load.table.num_computed_tokens + count
        if (
            not self._manager.recurrent.has_room(load.table)
            or self._manager.blocks_needed(load.table, stop) > self._manager.free_block_count
        ):
            self._loads.finish(load)
            return
        if count:
            new = self._put(load.table, load.token_ids, stop, piece)
            if load.is_prefix:  # requests with reused spans do not use the drafter
                self._drafts.load(new)
            load.arrived[piece.tier] += count
        if piece.is_last:
            load.end()
            if stop < len(load.token_ids):
                self._loads.finish(load)  # no tier has the rest, so free it for other sequences

    def _take_state(self, load: Prefetch, num_covered: int, piece: IOChunk) -> None:
        """Handle the last chunk for a hybrid model, which holds its deepest state or nothing."""
        if not self._manager.recurrent.has_room(load.table):
            num_covered = 0  # a prefetch of only a state reserved no slot
        num_blocks = load.num_found - load.num_in_pool + num_covered
        if num_covered:
            self._states.put(load.table, num_blocks, piece.data)
        load.cut(max(0, num_covered - load.num_in_pool) * self._manager.block_size)
        load.end()
        if num_blocks * self._manager.block_size < len(load.token_ids):
            self._loads.finish(load)  # no tier has the rest, so free it for other sequences

    def _put(self, table: BlockTable, token_ids: list[int], stop: int, piece: IOChunk) -> list[int]:
        """Write an arrived chunk into the next blocks of a table, and return their ids."""
        first = len(table)
        copies = self._manager.extend(table, stop)
        assert not copies  # a prefetch ends at a block boundary, so no block is copied
        new = table.block_ids[first:]
        self._manager.mark_filled(new)
        self.save_evicted()
        if self._backend.spec.is_quantized:
            # A reused block may have been freed while it was partly filled.
            self._backend.release_blocks(new)
        self._backend.write_blocks(new, piece.data)
        self._manager.commit(table, token_ids, stop)
        return table.block_ids[first:]

    def save_first(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            self._note_published()
        for block_id in reversed(block_ids):
            if block_id in self._unsaved:
                self._unsaved[block_id] = True
                self._unsaved.move_to_end(block_id, last=False)

    def save_evicted(self) -> None:
        self._note_published()
        evicted = self._manager.content.drain_evicted()
        if not evicted:
            return
        self._save_evicted(evicted)
        self._drafts.save_evicted(evicted)

    def _save_evicted(self, evicted: Mapping[int, BlockAddress]) -> None:
        wanted = sorted(
            evicted.keys() & self._unsaved.keys(), key=self._unsaved.__getitem__, reverse=True
        )
        unsaved = {block_id: evicted[block_id] for block_id in wanted}
        for block_id in unsaved:
            del self._unsaved[block_id]
        if not self._io_thread.stores:
            holds = self._io_thread.holds
            self._io_thread.note_lost(sum(not holds(one.prefix_hash) for one in unsaved.values()))
            return
        dying = self._lacking(unsaved)
        room = self._room
        self._io_thread.note_lost(max(0, len(dying) - room))
        self._save(dict(itertools.islice(dying.items(), room)))

    def save_some(self, seconds: float) -> None:
        allowed = min(max(_LEAST_BYTES, int(seconds * _BYTES_A_SECOND)), _MOST_BYTES)
        self._save_next(allowed)
        self._states.save_next(allowed)
        if not self._unsaved:
            self._drafts.save_next(allowed)

    def save_more(self) -> bool:
        self._save_next(_IDLE_BYTES)
        are_left = self._states.save_next(None)
        if not self._unsaved:
            are_left |= self._drafts.save_next(_IDLE_BYTES)
        return (bool(self._unsaved) or are_left) and self._io_thread.stores

    def _save_next(self, most_bytes: int) -> None:
        """Save the oldest unsaved blocks. At least one is saved if the I/O thread has room."""
        self._note_published()
        # Keep blocks in the pool while no tier can store them. A full disk may have room later.
        if not self._unsaved or not self._io_thread.stores:
            return
        most = min(max(1, most_bytes // self._backend.spec.bytes_per_block), self._room)
        oldest = list(itertools.islice(self._unsaved, most))
        content = self._manager.content
        # A reset may have dropped a block, whose id then belongs to a block that stays in the pool.
        found = {
            block_id: content.address(block_id)
            for block_id in oldest
            if content.leaves_pool(block_id)
        }
        for block_id in oldest:
            del self._unsaved[block_id]
        self._save(
            self._lacking({block_id: one for block_id, one in found.items() if one is not None})
        )

    @property
    def _room(self) -> int:
        return self._io_thread.room_for(self._backend.spec.bytes_per_block)

    def _lacking(self, blocks: Mapping[int, BlockAddress]) -> dict[int, BlockAddress]:
        """Return the blocks that at least one tier does not hold."""
        lacking = self._io_thread.lacking([block.prefix_hash for block in blocks.values()])
        return dict(itertools.compress(blocks.items(), lacking))

    def _note_published(self) -> None:
        published = self._manager.content.drain_published()
        self._unsaved.update(dict.fromkeys(published, False))
        self._drafts.note_published(published)

    def _save(self, blocks: Mapping[int, BlockAddress]) -> None:
        if not blocks:
            return
        try:
            data = self._backend.read_blocks(list(blocks))
        except MemoryError:
            _LOG.warning(
                "not enough memory to copy %d blocks to the offload tiers; they are not saved",
                len(blocks),
            )
            self._io_thread.note_lost(len(blocks))
            return
        self._io_thread.store(list(blocks.values()), data)

    def stats(self) -> Mapping[str, TierStats]:
        return self._io_thread.stats()

    def take_held(self, whole: bool = False) -> dict[str, CacheEvents]:
        return self._io_thread.take_held(whole)

    @property
    def num_lost(self) -> int:
        return self._io_thread.num_lost

    @property
    def num_draft_restored(self) -> int:
        return self._drafts.num_restored

    @property
    def staging_bytes(self) -> int:
        return self._io_thread.staging_bytes

    def close(self, *, save: bool) -> None:
        deadline = time.monotonic() + _CLOSING_SECONDS
        while save and self.save_more() and time.monotonic() < deadline:
            time.sleep(0.005)
        self._io_thread.close(max(0.0, deadline - time.monotonic()))
