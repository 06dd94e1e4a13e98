"""`LMCacheEngine`: a KV store that is looked up by the longest stored token prefix."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvboost_edge.compat.lmcache.chunk_addresses import (
    chunk_addresses,
    mask_like,
    num_skipped,
    token_bytes,
)
from kvboost_edge.compat.lmcache.chunk_arrays import ChunkShape, KeysAndValues, assemble, read_kv
from kvboost_edge.compat.lmcache.config import LMCacheEngineConfig, Metadata
from kvboost_edge.compat.lmcache.stores import ChunkStore, MemoryStore, StoredChunk, TierStore
from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.hashing import TOKEN_BYTES, BlockAddress
from kvboost_edge.tiers.base import TierStats
from kvboost_edge.tiers.disk.tier import DiskTier
from kvboost_edge.tiers.redis.tier import RedisTier

__all__ = ["LMCacheEngine", "open_stores"]

_BATCH_BYTES = 32 << 20  # chunks copied and written together
_MOST_PENDING_BYTES = 256 << 20  # written in the background


class LMCacheEngine:
    """A cache of KV in chunks of `chunk_size` tokens. Safe to use from any thread.

    Tokens are one row of integers of any type: a list, NumPy array or torch tensor. Masks are
    returned as tensors if the tokens are a tensor. KV is returned as CPU copies with the stored
    library, type and bits. A failure of a device, file or server counts as a miss and raises no
    error.

    Invalid arguments raise RequestError, a ValueError, and change nothing.
    """

    def __init__(self, config: LMCacheEngineConfig, metadata: Metadata) -> None:
        self.config = config
        self.metadata = metadata
        self.chunk_size = config.chunk_size
        self.save_decode_cache = config.save_decode_cache
        self.hit_tokens_count = 0
        self.miss_tokens_count = 0
        self._fmt = metadata.fmt
        self._space = metadata.space
        self._stores = open_stores(config, self._space)
        self._lock = threading.Lock()
        self._writer: ThreadPoolExecutor | None = None
        self._pending_bytes = 0
        self._closed = False

    @property
    def hit_rate(self) -> float:
        """Share of requested tokens that `retrieve` found; 0.0 before the first call."""
        with self._lock:
            asked = self.hit_tokens_count + self.miss_tokens_count
            return self.hit_tokens_count / asked if asked else 0.0

    def store(
        self,
        tokens: Any,
        kv_tensors_raw: Any,
        kv_tensors_mask: Any = None,
        skip_existing: bool = True,
        blocking: bool = True,
    ) -> None:
        """Store the KV of a sequence.

        Data that cannot be stored is dropped, and counted in `stats`.

        Args:
            tokens: [num_tokens], the whole sequence from its first token on.
            kv_tensors_raw: KV of the tokens where the mask is True, as (k, v) of each layer or as
                one blob [num_layers, 2, …].
            kv_tensors_mask: booleans, False for the skipped leading tokens and True for all others.
                The number of skipped tokens is a multiple of chunk_size.
            skip_existing: whether to keep existing chunks; False replaces them.
            blocking: if False, the data is copied here, and a thread of the engine writes it to
                disk and Redis. The call then waits only while more than 256 MiB are pending.
        """
        self._check_open()
        ids, num_tokens = self._tokens(tokens)
        start = num_skipped("kv_tensors_mask", kv_tensors_mask, num_tokens)
        if start % self.chunk_size:
            raise RequestError(
                f"kv_tensors_mask skips {start} tokens, which is not a multiple of "
                f"chunk_size={self.chunk_size}"
            )
        kv = read_kv(kv_tensors_raw, self._fmt)
        if kv.shape.num_tokens != num_tokens - start:
            raise RequestError(
                f"got KV for {kv.shape.num_tokens} tokens, expected {num_tokens - start}: "
                f"{num_tokens} tokens minus {start} skipped by the mask"
            )
        addresses = chunk_addresses(self._space, ids, self.chunk_size)
        if num_tokens % self.chunk_size and not self.config.save_unfull_chunk:
            addresses = addresses[:-1]
        for first, chunks in self._cut(
            kv, addresses, start // self.chunk_size, replace=not skip_existing
        ):
            chain = addresses[: first + len(chunks)]
            for store in self._stores:
                if isinstance(store, MemoryStore):
                    store.put(chunks, chain, replace=not skip_existing)
                else:
                    self._put(store, chunks, chain, replace=not skip_existing, wait=blocking)

    def retrieve(self, tokens: Any, mask: Any = None, return_tuple: bool = True) -> tuple[Any, Any]:
        """Return the KV of the longest stored prefix, without the tokens that the mask skips.

        Requested tokens that are not found count as misses.

        Args:
            tokens: [num_tokens], the whole sequence.
            mask: booleans, False for any number of skipped leading tokens and True for all others.
                None requests all tokens.
            return_tuple: whether to return (k, v) of each layer; False returns one blob
                [num_layers, 2, …].

        Returns:
            The KV, and a mask [num_tokens] that is True for its tokens. If nothing is found, the KV
                is () and the mask is all False.
        """
        self._check_open()
        ids, num_tokens = self._tokens(tokens)
        start = num_skipped("mask", mask, num_tokens)
        first = start // self.chunk_size
        found = (
            self._find(chunk_addresses(self._space, ids, self.chunk_size)[first:])
            if start < num_tokens
            else []
        )
        end = first * self.chunk_size + sum(chunk.shape.num_tokens for chunk in found)
        kv: Any = ()
        if end > start:
            blob = assemble(
                [(chunk.shape, chunk.data) for chunk in found],
                start - first * self.chunk_size,
                self._fmt,
            )
            kv = (
                tuple((blob[layer, 0], blob[layer, 1]) for layer in range(blob.shape[0]))
                if return_tuple
                else blob
            )
        end = max(start, end)
        with self._lock:
            self.hit_tokens_count += end - start
            self.miss_tokens_count += num_tokens - end
        return kv, mask_like(tokens, start, end, num_tokens)

    def lookup(self, tokens: Any) -> int:
        """Return the length of the longest stored prefix, in tokens.

        The lookup counts neither as a hit nor as a miss.
        """
        return self.find_prefix(tokens, None)

    def find_prefix(
        self, tokens: Any, kinds: Sequence[str] | None, pin: list[bytes] | None = None
    ) -> int:
        """Return the length in tokens of the longest prefix in the given kinds of stores.

        The prefix may be spread over several stores.

        Args:
            tokens: [num_tokens], the whole sequence.
            kinds: any of "memory", "disk" and "redis"; None for all.
            pin: if given, chunks in memory are pinned and their keys are added to this list.
        """
        self._check_open()
        ids, num_tokens = self._tokens(tokens)
        addresses = chunk_addresses(self._space, ids, self.chunk_size)
        stores = [store for store in self._stores if kinds is None or store.name in kinds]
        held = 0
        before = -1
        while before < held < len(addresses):
            before = held
            for store in stores:
                held += store.holds(addresses[held:])
        if pin is not None:
            for store in self._stores:
                if isinstance(store, MemoryStore):
                    pin += store.pin(addresses[:held])
        return min(held * self.chunk_size, num_tokens)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Release pins, given by the keys from `find_prefix`."""
        for store in self._stores:
            if isinstance(store, MemoryStore):
                store.unpin(keys)

    def forget(self, tokens: Any, kinds: Sequence[str] | None) -> int:
        """Drop the chunks of a sequence, and return the number of dropped chunks.

        Args:
            tokens: the sequence; None for all chunks in memory.
            kinds: kinds of stores; None for all.
        """
        self._check_open()
        stores = [store for store in self._stores if kinds is None or store.name in kinds]
        if tokens is None:
            other = [store.name for store in stores if not isinstance(store, MemoryStore)]
            if other:
                raise RequestError(
                    f"{', '.join(other)} cannot be cleared as a whole; pass the tokens to drop"
                )
            return sum(store.clear() for store in stores if isinstance(store, MemoryStore))
        ids, _ = self._tokens(tokens)
        addresses = chunk_addresses(self._space, ids, self.chunk_size)
        return sum(store.drop(addresses) for store in stores)

    def stats(self) -> dict[str, TierStats]:
        """Return statistics for each kind of store.

        In memory, a block is one chunk. On disk and in Redis, a chunk takes two blocks.
        """
        return {store.name: store.stat() for store in self._stores}

    def close(self) -> None:
        """Finish pending writes, and release memory, files and connections.

        A second call has no effect.
        """
        with self._lock:
            was_closed = self._closed
            self._closed = True
            writer = self._writer
        if was_closed:
            return
        if writer is not None:
            writer.shutdown(wait=True)
        for store in self._stores:
            store.close()

    # ---- chunks

    def _tokens(self, tokens: Any) -> tuple[bytes, int]:
        ids = token_bytes(tokens)
        return ids, len(ids) // TOKEN_BYTES

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this engine is closed; create a new one")

    def _cut(
        self, kv: KeysAndValues, addresses: Sequence[BlockAddress], first: int, *, replace: bool
    ) -> Iterator[tuple[int, list[StoredChunk]]]:
        """Copy the chunks that a store lacks, and yield them in batches with their first index.

        Args:
            kv: KV of the chunks from index `first` on.
            addresses: addresses of all chunks.
            first: index of the first chunk to store.
            replace: whether to yield existing chunks too.
        """
        here = addresses[first:]
        held = 0 if replace else min((store.holds(here) for store in self._stores), default=0)
        batch: list[StoredChunk] = []
        for index in range(first + held, len(addresses)):
            start = (index - first) * self.chunk_size
            shape, data = kv.chunk(
                start, start + len(addresses[index].tokens) // TOKEN_BYTES, self._fmt
            )
            batch.append(StoredChunk(addresses[index], shape, data))
            if len(batch) * data.nbytes >= _BATCH_BYTES:
                yield index + 1 - len(batch), batch
                batch = []
        if batch:
            yield len(addresses) - len(batch), batch

    def _find(self, addresses: Sequence[BlockAddress]) -> list[StoredChunk]:
        """Read the longest run of stored chunks, and copy it to memory.

        Each chunk comes from the nearest store that has it. The run ends where the shape or type of
        the chunks changes.
        """
        found: list[StoredChunk] = []
        before = -1
        while before < len(found) < len(addresses):
            before = len(found)
            for store in self._stores:
                more = store.get(addresses[len(found) :])
                if (
                    more
                    and store is not self._stores[0]
                    and isinstance(self._stores[0], MemoryStore)
                ):
                    self._stores[0].put(more, addresses[: len(found) + len(more)], replace=False)
                found += more
        kinds = [_kind(chunk.shape) == _kind(found[0].shape) for chunk in found]
        return found[: kinds.index(False)] if False in kinds else found

    def _put(
        self,
        store: ChunkStore,
        chunks: list[StoredChunk],
        chain: list[BlockAddress],
        *,
        replace: bool,
        wait: bool,
    ) -> None:
        """Write chunks to a store, keeping the order of the calls.

        After the first call that does not wait, all writes go through the writer thread.
        """
        nbytes = sum(chunk.nbytes for chunk in chunks)
        with self._lock:
            self._check_open()
            direct = wait and self._writer is None
            if not direct:
                self._writer = self._writer or ThreadPoolExecutor(
                    1, thread_name_prefix="kvboost-lmcache"
                )
                self._pending_bytes += nbytes
                wait = wait or self._pending_bytes > _MOST_PENDING_BYTES
                done = self._writer.submit(self._put_pending, store, chunks, chain, replace, nbytes)
        if direct:
            store.put(chunks, chain, replace=replace)
        elif wait:
            done.result()

    def _put_pending(
        self,
        store: ChunkStore,
        chunks: list[StoredChunk],
        chain: list[BlockAddress],
        replace: bool,
        nbytes: int,
    ) -> None:
        """Write chunks in the writer thread."""
        try:
            store.put(chunks, chain, replace=replace)
        finally:
            with self._lock:
                self._pending_bytes -= nbytes


def open_stores(config: LMCacheEngineConfig, space: bytes) -> list[ChunkStore]:
    """Open the stores of a configuration, nearest first.

    Raises:
        ConfigError: an option is invalid.
        BackendUnavailable: a store cannot be opened.
    """
    stores: list[ChunkStore] = []
    try:
        for kind, place in config.places:
            if kind == "memory":
                stores.append(MemoryStore(int(config.max_memory_bytes)))
            elif kind == "disk":
                cap = None if config.max_disk_bytes is None else int(config.max_disk_bytes)
                stores.append(TierStore(DiskTier.open(place, space, max_bytes=cap)))
            else:
                options = {
                    "secret": config.redis_secret,
                    "trust": config.redis_trust,
                    "ttl_s": config.redis_ttl_s,
                }
                tier = RedisTier(place, space, **options)  # type: ignore[arg-type]
                stores.append(TierStore(tier))
    except BaseException:
        for store in stores:
            store.close()
        raise
    return stores


def _kind(shape: ChunkShape) -> ChunkShape:
    """Return the part of a shape that all chunks of one blob share."""
    return shape._replace(num_tokens=0)
