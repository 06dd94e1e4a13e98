"""`DiskTier`: a block store on a local disk that outlives the process. May lose, never lies.

Engines of one process that name the same directory and space share one store; of several processes
the first owns it and writes, the others read what was there when they opened it, for as long as
they live.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvboost_edge.errors import ConfigError
from kvboost_edge.kvcache.hashing import BlockAddress
from kvboost_edge.tiers.base import TierStats
from kvboost_edge.tiers.disk.directory import open_directory
from kvboost_edge.tiers.disk.files import Files
from kvboost_edge.tiers.disk.sealing import Sealer
from kvboost_edge.tiers.disk.store import Store

__all__ = ["DiskTier"]

_SPACE_BYTES = 32


class _Shared:
    """A store and how many tiers use it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.users = 0


_stores: dict[str, _Shared] = {}
_stores_lock = threading.Lock()


class DiskTier:
    """A tier as in tiers/base.py, over a directory. Made by `open`."""

    name = "disk"

    def __init__(self, store: Store) -> None:
        self._store: Store | None = store
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
        """A tier of one space below a cache directory, which is made if it is not there.

        Args:
            space: 32 bytes that name all that shapes a block's bytes: model, KV format, numerics.
            max_bytes: cap over all spaces of the directory; None: the smaller of 16 GiB and a fifth
                of what is free. Of several tiers on one space the last one's holds.
            description: what the space is, for people, in space.json (no text of prompts); None: as
                it was.
            files, clock, sealer: the system, in tests another; of an open store the first tier's.

        Raises ConfigError for a directory that can be neither written nor read, and a cap below 1
        MiB.
        """
        if len(space) != _SPACE_BYTES:
            raise ConfigError(f"a space is named by {_SPACE_BYTES} bytes, not {len(space)}")
        root = _root_of(directory)
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
        """Where the space's files lie; None once closed."""
        return None if self._store is None else self._store.directory.path

    def begin(self) -> None:
        """Nothing is left to be found out: it was opened."""

    def holds(self, prefix_hash: bytes) -> bool:
        """Whether the block is there, unless it turns out to be damaged."""
        return self._store is not None and prefix_hash in self._store.index

    def ask(self, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """See Tier; no I/O."""
        return [self.holds(prefix_hash) for prefix_hash in prefix_hashes]

    def known(self) -> list[bytes]:
        """See Tier."""
        return [] if self._store is None else self._store.index.hashes()

    def dropped(self, prefix_hash: bytes) -> bool:
        """Whether it was there since the directory was opened, and went for room or as damaged."""
        index = None if self._store is None else self._store.index
        return index is not None and prefix_hash in index.dropped and prefix_hash not in index

    def touch(self, prefix_hashes: Sequence[bytes]) -> None:
        """These blocks of one chain, in its order, were used just now; so were the blocks before
        them.
        """
        if self._store is not None:
            self._store.index.renew(prefix_hashes, proven=True)

    def read(self, blocks: Sequence[BlockAddress], into: Sequence[memoryview]) -> int:
        """Fill `into` with verified payloads; how many from the first on. See Tier."""
        return 0 if self._store is None else self._store.read(blocks, into, self._counts)

    def write(self, blocks: Sequence[BlockAddress], payloads: Sequence[memoryview]) -> int:
        """Store blocks that are not there yet; how many of them are there afterwards. See Tier."""
        return 0 if self._store is None else self._store.write(blocks, payloads, self._counts)

    def drop(self, prefix_hashes: Sequence[bytes]) -> None:
        """Forget these blocks. After a crash they may be there again, as they were."""
        if self._store is not None:
            self._store.drop(prefix_hashes)

    def tend(self) -> None:
        """Let go of a directory that was deleted meanwhile. See Tier."""
        if self._store is not None:
            self._store.tend()

    def stat(self) -> TierStats:
        """This tier's counters; sizes, `evicted` and `state` are the store's, which engines of a
        process share.
        """
        store = self._store
        counts = self._counts
        if store is None:
            return TierStats(**counts, writable=False, state="closed")
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
        """Give up the store; the last of its tiers writes out what is pending. A second call does
        nothing.
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


def _root_of(directory: str | os.PathLike[str]) -> Path:
    try:
        root = Path(directory).expanduser().absolute()
        if b"\0" not in os.fsencode(root):
            return root
        why = "embedded null byte"
    except (
        RuntimeError,
        ValueError,
    ) as error:  # a user that is not known; characters that no file name has
        why = str(error)
    raise ConfigError(f"disk_cache_dir={os.fspath(directory)!r} can be no directory: {why}")


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
    """A child holds no lock and writes nothing: its tiers are empty and closed."""
    global _stores_lock  # noqa: PLW0603 - one lock of the process
    _stores_lock = threading.Lock()
    for shared in _stores.values():
        shared.store.after_fork()
    _stores.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
