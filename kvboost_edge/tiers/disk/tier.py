"""Disk tier: a persistent KV cache that may lose blocks but never returns wrong ones.

Engines in one process with the same directory and space share a store. If several processes open a
directory, the first one owns it and writes. The others read what it stores, new blocks within a
second, and one of them becomes the owner when it ends.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvboost_edge.config import disk_cache_root
from kvboost_edge.errors import ConfigError
from kvboost_edge.kvcache.hashing import BlockAddress
from kvboost_edge.tiers.base import TierStats
from kvboost_edge.tiers.disk.directory import open_directory
from kvboost_edge.tiers.disk.segment_sealing import Sealer
from kvboost_edge.tiers.disk.store import Store
from kvboost_edge.tiers.disk.system_calls import Files

__all__ = ["DiskTier"]

_SPACE_BYTES = 32


class _Shared:
    """Store that several tiers share, with the number of tiers that use it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.users = 0


_stores: dict[str, _Shared] = {}
_stores_lock = threading.Lock()


class DiskTier:
    """`Tier` that stores blocks in a local directory. Create it with `open`.

    Args:
        store: the store of the directory. None makes a tier without blocks, for a directory that
            cannot be opened.
        state: state to report while there is no store.
    """

    name = "disk"

    def __init__(self, store: Store | None, state: str = "closed") -> None:
        self._store = store
        self._state = state
        self._counts: Counter[str] = Counter()

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        space: bytes,
        *,
        max_bytes: int | None = None,
        description: Mapping[str, Any] | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
        sealer: Sealer | None = None,
    ) -> DiskTier:
        """Open the tier of one space in a cache directory, creating the directory if necessary.

        Args:
            directory: the cache directory.
            space: 32-byte id of everything that affects a block's bytes: model, KV format and
                numerics.
            max_bytes: cap over all spaces in the directory, in bytes. None means 16 GiB or a fifth
                of the free space, whichever is less. If several tiers share a space, the last cap
                that was set applies.
            description: description of the space for space.json, which must not contain prompt
                text. None keeps the existing one.
            files: system calls to use. Only the first tier of a store sets `files`, `clock` and
                `sealer`.
            clock: function that returns monotonic time in seconds.
            sealer: runs the background jobs that seal segments.

        Raises:
            ConfigError: the directory can be neither written nor read, or the cap is below 1 MiB.
        """
        if len(space) != _SPACE_BYTES:
            raise ConfigError(f"space must have {_SPACE_BYTES} bytes, not {len(space)}")
        root = disk_cache_root(directory)
        files = files or Files()
        key = os.path.realpath(root / space.hex())
        with _stores_lock:
            shared = _stores.get(key)
            if shared is None:
                store = _opened(
                    root, space, max_bytes, description, files, clock, sealer or Sealer()
                )
                shared = _stores[key] = _Shared(store)
            elif max_bytes is not None:
                shared.store.room.limit(max_bytes)
            shared.users += 1
            return cls(shared.store)

    @property
    def directory(self) -> Path | None:
        """Directory of the space, or None without a store."""
        return None if self._store is None else self._store.directory.path

    def begin(self) -> None:
        """Do nothing, because `open` has already checked the directory."""

    def holds(self, prefix_hash: bytes) -> bool:
        """Return whether the block is stored. Its contents are not verified."""
        return self._store is not None and prefix_hash in self._store.index

    def ask(self, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Return whether each block is stored. This only does I/O if another process writes."""
        if self._store is not None and not self._store.directory.owned:
            self._store.tend()
        return [self.holds(prefix_hash) for prefix_hash in prefix_hashes]

    def known(self) -> list[bytes]:
        """Return the prefix hashes of all stored blocks."""
        return [] if self._store is None else self._store.index.hashes()

    def dropped(self, prefix_hash: bytes) -> bool:
        """Return whether the block was dropped since the directory was opened."""
        index = None if self._store is None else self._store.index
        return index is not None and prefix_hash in index.dropped and prefix_hash not in index

    def touch(self, prefix_hashes: Sequence[bytes]) -> None:
        """Record a use of these blocks and of all their ancestors."""
        if self._store is not None:
            self._store.index.renew(prefix_hashes, proven=True)

    def read(self, blocks: Sequence[BlockAddress], into: Sequence[memoryview]) -> int:
        """Fill `into` with verified payloads, and return how many were read. See `Tier.read`."""
        return 0 if self._store is None else self._store.read(blocks, into, self._counts)

    def write(self, blocks: Sequence[BlockAddress], payloads: Sequence[memoryview]) -> int:
        """Store the blocks that are missing, and return how many of `blocks` are then stored."""
        return 0 if self._store is None else self._store.write(blocks, payloads, self._counts)

    def drop(self, prefix_hashes: Sequence[bytes]) -> None:
        """Drop these blocks. They may reappear after a crash."""
        if self._store is not None:
            self._store.drop(prefix_hashes)

    @property
    def tend_seconds(self) -> float:
        """Longest time between two calls of `tend`."""
        return math.inf if self._store is None else self._store.tend_seconds

    def tend(self) -> None:
        """Release the directory if it was deleted, moved or replaced, or follow its owner."""
        if self._store is not None:
            self._store.tend()

    def stat(self) -> TierStats:
        """Return this tier's counters, with the sizes, evictions and state of its store.

        The store may be shared by several engines in this process.
        """
        store = self._store
        counts = self._counts
        if store is None:
            return TierStats(**counts, writable=False, state=self._state)
        refused = counts["refused"] + store.cleaner.refused
        return TierStats(
            **{**counts, "refused": refused},
            blocks=len(store.index),
            bytes=store.index.nbytes,
            max_bytes=store.room.max_bytes,
            evicted=store.cleaner.evicted,
            writable=store.writable,
            state="closed" if store.closed else store.state,
        )

    def close(self) -> None:
        """Close the tier. A second call does nothing.

        Closing the last tier of a store also flushes pending data and closes the store.
        """
        with _stores_lock:
            store = self._store
            self._store = None
            for key, shared in list(_stores.items()):
                if shared.store is store:
                    shared.users -= 1
                    if shared.users == 0:
                        del _stores[key]
                        shared.store.close()


def _opened(
    root: Path,
    space: bytes,
    max_bytes: int | None,
    description: Mapping[str, Any] | None,
    files: Files,
    clock: Callable[[], float],
    sealer: Sealer,
) -> Store:
    open_space = functools.partial(open_directory, root, space, description, files)
    try:
        return Store(open_space, space, files, max_bytes, clock, sealer)
    except OSError as error:
        raise ConfigError(f"disk_cache_dir {str(root)!r} cannot be read: {error}") from error


def _after_fork() -> None:
    """Close all stores in a forked child, which holds no lock and must not write."""
    global _stores_lock  # noqa: PLW0603 - one lock of the process
    _stores_lock = threading.Lock()
    for shared in _stores.values():
        shared.store.after_fork()
    _stores.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
