"""Chunk stores: in this process's memory, or in an offload tier.

A tier stores each chunk as two blocks. The block at the chunk's own address holds its shape. The
bytes are in a second block, whose address includes the shape. Bytes are therefore never read with a
wrong shape, even if another process replaces the chunk meanwhile.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvboost_edge.compat.lmcache.chunk_arrays import SHAPE_BYTES, ChunkShape, decode_shape
from kvboost_edge.kvcache.hashing import TOKEN_BYTES, BlockAddress
from kvboost_edge.tiers.base import Tier, TierStats

__all__ = ["ChunkStore", "MemoryStore", "StoredChunk", "TierStore"]

_LOG = logging.getLogger(__name__)


class StoredChunk(NamedTuple):
    """The KV of one chunk.

    Attributes:
        address: address of the chunk.
        shape: shape and type of the arrays.
        data: bytes of the arrays. They belong to the stores and must not be changed.
    """

    address: BlockAddress
    shape: ChunkShape
    data: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        return self.data.nbytes + len(self.address.tokens)


class ChunkStore(Protocol):
    """Interface of a chunk store. Safe to use from any thread.

    `addresses` always means consecutive chunks of a sequence.
    """

    name: str

    def holds(self, addresses: Sequence[BlockAddress]) -> int:
        """Return the length of the longest run of stored chunks, starting at the first."""
        ...

    def get(self, addresses: Sequence[BlockAddress]) -> list[StoredChunk]:
        """Return the longest run of stored chunks, starting at the first, and mark them as used."""
        ...

    def put(
        self, chunks: Sequence[StoredChunk], chain: Sequence[BlockAddress], *, replace: bool
    ) -> int:
        """Store chunks of a sequence, and return how many of them are stored afterwards.

        Args:
            chunks: the chunks.
            chain: addresses of the sequence's chunks, from the first one to the last of `chunks`.
            replace: whether to replace existing chunks.
        """
        ...

    def drop(self, addresses: Sequence[BlockAddress]) -> int:
        """Drop these chunks, and return the number of dropped chunks, as far as it is known."""
        ...

    def stat(self) -> TierStats:
        """Return counters and sizes."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class MemoryStore:
    """A chunk store in memory, limited in bytes.

    The least recently used chains are evicted first, beginning at their tails. A warning is logged
    for the first sequence that does not fit and for the first eviction.
    """

    name = "memory"

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._chunks: OrderedDict[bytes, StoredChunk] = OrderedDict()
        self._pins: Counter[bytes] = Counter()
        self._bytes = 0
        self._counts: Counter[str] = Counter()
        self._logged: set[str] = set()

    def holds(self, addresses: Sequence[BlockAddress]) -> int:
        """See ChunkStore."""
        with self._lock:
            return self._num_held(addresses)

    def get(self, addresses: Sequence[BlockAddress]) -> list[StoredChunk]:
        """See ChunkStore."""
        with self._lock:
            found = [self._chunks[a.prefix_hash] for a in addresses[: self._num_held(addresses)]]
            self._touch(addresses[: len(found)])
            self._counts.update(
                read_blocks=len(found), read_bytes=sum(chunk.nbytes for chunk in found)
            )
            self._counts["missing"] += len(found) < len(addresses)
            return found

    def put(
        self, chunks: Sequence[StoredChunk], chain: Sequence[BlockAddress], *, replace: bool
    ) -> int:
        """See ChunkStore.

        Making room for a chunk never evicts pinned chunks or chunks of its own chain. A chunk that
        does not fit is not stored.
        """
        kept = {address.prefix_hash for address in chain}
        there = 0
        lost: list[bytes] = []
        with self._lock:
            evicted = self._counts["evicted"]
            for chunk in chunks:
                key = chunk.address.prefix_hash
                if replace or key not in self._chunks:
                    self._remove(key)
                    if not self._make_room(chunk.nbytes, kept):
                        self._counts["not_written"] += 1
                        lost.append(key)
                        continue
                    self._chunks[key] = chunk
                    self._bytes += chunk.nbytes
                    self._counts.update(written_blocks=1, written_bytes=chunk.nbytes)
                there += 1
            self._touch(chain)
            evicted = self._counts["evicted"] - evicted
        if lost:
            start = _num_tokens(itertools.takewhile(lambda a: a.prefix_hash != lost[0], chain))
            self._log_once(
                "cut", f"a sequence is stored up to token {start}; the rest does not fit"
            )
        if evicted:
            self._log_once("evicted", "least recently used chunks are evicted from now on")
        return there

    def drop(self, addresses: Sequence[BlockAddress]) -> int:
        """See ChunkStore. Pins are dropped with their chunks."""
        with self._lock:
            for address in addresses:
                self._pins.pop(address.prefix_hash, None)
            return sum(self._remove(address.prefix_hash) for address in addresses)

    def clear(self) -> int:
        """Drop all chunks and pins; return the number of chunks."""
        with self._lock:
            count = len(self._chunks)
            self._chunks.clear()
            self._pins.clear()
            self._bytes = 0
            return count

    def pin(self, addresses: Sequence[BlockAddress]) -> list[bytes]:
        """Protect the stored chunks from eviction, and return their keys for `unpin`."""
        with self._lock:
            pinned = [
                address.prefix_hash for address in addresses if address.prefix_hash in self._chunks
            ]
            self._pins.update(pinned)
            return pinned

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Release one pin per key."""
        with self._lock:
            for key in keys:
                self._pins[key] -= 1
                if self._pins[key] <= 0:
                    del self._pins[key]

    def stat(self) -> TierStats:
        """See ChunkStore."""
        with self._lock:
            counts: dict[str, Any] = dict(self._counts)
            return TierStats(
                **counts, blocks=len(self._chunks), bytes=self._bytes, max_bytes=self._max_bytes
            )

    def close(self) -> None:
        """See ChunkStore."""
        self.clear()

    def _log_once(self, kind: str, effect: str) -> None:
        with self._lock:
            is_first = kind not in self._logged
            self._logged.add(kind)
        if is_first:
            _LOG.warning(
                "LMCache's memory backend has reached max_memory_bytes=%d: %s; raise "
                "max_memory_bytes (max_local_cpu_size in from_defaults, in GiB), or add a file:// "
                "backend after it",
                self._max_bytes,
                effect,
            )

    def _num_held(self, addresses: Sequence[BlockAddress]) -> int:
        for index, address in enumerate(addresses):
            chunk = self._chunks.get(address.prefix_hash)
            if chunk is None or chunk.address != address:
                return index
        return len(addresses)

    def _touch(self, addresses: Sequence[BlockAddress]) -> None:
        for address in reversed(addresses):
            if address.prefix_hash in self._chunks:
                self._chunks.move_to_end(address.prefix_hash)

    def _remove(self, key: bytes) -> bool:
        chunk = self._chunks.pop(key, None)
        self._bytes -= 0 if chunk is None else chunk.nbytes
        return chunk is not None

    def _make_room(self, nbytes: int, kept: set[bytes]) -> bool:
        missing = self._bytes + nbytes - self._max_bytes
        going: list[bytes] = []
        for key, chunk in self._chunks.items():
            if missing <= 0:
                break
            if key not in kept and key not in self._pins:
                going.append(key)
                missing -= chunk.nbytes
        if missing > 0:
            return False
        self._counts["evicted"] += sum(self._remove(key) for key in going)
        return True


class TierStore:
    """A chunk store in an offload tier."""

    def __init__(self, tier: Tier) -> None:
        self.name = tier.name
        self._tier = tier
        self._lock = threading.Lock()  # A tier may be used by one thread at a time.

    def holds(self, addresses: Sequence[BlockAddress]) -> int:
        """See ChunkStore."""
        with self._lock:
            shapes = self._shapes(addresses)
            there = self._tier.ask(
                [_data_address(a, s).prefix_hash for a, s in zip(addresses, shapes, strict=False)]
            )
            return (*there, False).index(False)

    def get(self, addresses: Sequence[BlockAddress]) -> list[StoredChunk]:
        """See ChunkStore."""
        with self._lock:
            shapes = self._shapes(addresses)
            places = [_data_address(a, s) for a, s in zip(addresses, shapes, strict=False)]
            try:
                data = [np.empty(shape.nbytes, np.uint8) for shape in shapes]
            except (MemoryError, ValueError):  # from a corrupt shape
                return []
            count = self._tier.read(places, [array.data for array in data])
            self._tier.touch(
                [
                    a.prefix_hash
                    for pair in zip(addresses[:count], places, strict=False)
                    for a in pair
                ]
            )
        return [StoredChunk(*parts) for parts in zip(addresses[:count], shapes, data, strict=False)]

    def put(
        self, chunks: Sequence[StoredChunk], chain: Sequence[BlockAddress], *, replace: bool
    ) -> int:
        """See ChunkStore. The bytes are written before the shape, so no shape lacks its bytes."""
        if replace:
            self.drop([chunk.address for chunk in chunks])
        with self._lock:
            places = [_data_address(chunk.address, chunk.shape) for chunk in chunks]
            self._tier.write(places, [chunk.data.data for chunk in chunks])
            shapes = [memoryview(chunk.shape.encode()) for chunk in chunks]
            return self._tier.write([chunk.address for chunk in chunks], shapes)

    def drop(self, addresses: Sequence[BlockAddress]) -> int:
        """See ChunkStore."""
        with self._lock:
            there: list[bytes] = []
            for address in addresses:
                for shape in self._shapes([address]):
                    there += [address.prefix_hash, _data_address(address, shape).prefix_hash]
            self._tier.drop(there)
            return len(there) // 2

    def stat(self) -> TierStats:
        """See ChunkStore."""
        return self._tier.stat()

    def close(self) -> None:
        """See ChunkStore."""
        with self._lock:
            self._tier.close()

    def _shapes(self, addresses: Sequence[BlockAddress]) -> list[ChunkShape]:
        buffers = [bytearray(SHAPE_BYTES) for _ in addresses]
        count = self._tier.read(addresses, [memoryview(buffer) for buffer in buffers])
        shapes: list[ChunkShape] = []
        for address, buffer in zip(addresses[:count], buffers, strict=False):
            shape = decode_shape(bytes(buffer), len(address.tokens) // TOKEN_BYTES)
            if shape is None:
                break
            shapes.append(shape)
        return shapes


def _num_tokens(addresses: Iterable[BlockAddress]) -> int:
    return sum(len(address.tokens) // TOKEN_BYTES for address in addresses)


def _data_address(address: BlockAddress, shape: ChunkShape) -> BlockAddress:
    return BlockAddress(
        hashlib.sha256(address.prefix_hash + shape.encode()).digest(), address.prefix_hash, b""
    )
