"""Prefix index: published full blocks by prefix hash, verified by tokens and parent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from kvboost_edge.errors import CacheCorruption
from kvboost_edge.kvcache.block_table import PrefixEntry
from kvboost_edge.kvcache.hashing import TOKEN_BYTES, HashFn, known_hash

__all__ = ["ROOT_SERIAL", "PrefixIndex", "PrefixMatch", "Watcher"]

ROOT_SERIAL = 0  # parent of every first block, whose `tokens` begin with the root itself


class PrefixMatch(NamedTuple):
    """Longest published prefix of a prompt.

    Attributes:
        block_ids: blocks of the prefix, in order.
        prefix_hash: chain hash at the end of the prefix, or the root if it is empty.
        serial: serial of the last block, or `ROOT_SERIAL` if the prefix is empty.
        next_hash: hash of the next full block, or None if the prompt ends before.
        beyond: number of published blocks after the prefix that cannot be shared for lack of a
            snapshot.
    """

    block_ids: list[int]
    prefix_hash: bytes
    serial: int
    next_hash: bytes | None
    beyond: int = 0


class Watcher(Protocol):
    """Observer of the index, called synchronously in the thread that changes it."""

    def entered(self, block_id: int, entry: PrefixEntry) -> None: ...

    def left(self, block_id: int) -> None: ...


class PrefixIndex:
    """Hash table of the entries of published blocks.

    A lookup compares hash, tokens and parent serial. By induction over the chain, this verifies the
    whole prefix, including the root. A hash collision therefore never serves wrong KV.

    Args:
        num_blocks: number of blocks in the pool.
        block_size: tokens per block.
        hash_fn: chain hash function.

    Attributes:
        block_bytes: size of one block's encoded tokens, in bytes.
    """

    __slots__ = ("_buckets", "_entries", "_hash_fn", "_next_serial", "_watchers", "block_bytes")

    def __init__(self, num_blocks: int, block_size: int, hash_fn: HashFn) -> None:
        self.block_bytes = block_size * TOKEN_BYTES
        self._hash_fn = hash_fn
        self._entries: list[PrefixEntry | None] = [None] * num_blocks
        # Block ids by hash. Nearly all buckets hold a single block, and a tuple takes half the
        # memory of a list.
        self._buckets: dict[bytes, tuple[int, ...]] = {}
        self._next_serial = ROOT_SERIAL + 1
        self._watchers: list[Watcher] = []

    def watch(self, watcher: Watcher) -> None:
        """Report all existing entries to a watcher, then every later change."""
        for block_id, entry in self.entries().items():
            watcher.entered(block_id, entry)
        self._watchers.append(watcher)

    def __len__(self) -> int:
        return sum(entry is not None for entry in self._entries)

    def __contains__(self, prefix_hash: object) -> bool:
        """Return whether a block with this hash is published."""
        return prefix_hash in self._buckets

    def hashes(self) -> Iterable[bytes]:
        """Return the distinct hashes of all published blocks."""
        return self._buckets.keys()

    def entry(self, block_id: int) -> PrefixEntry | None:
        """Return the entry of a published block, or None."""
        return self._entries[block_id]

    def entries(self) -> dict[int, PrefixEntry]:
        """Return all entries by block id."""
        return {
            block_id: entry for block_id, entry in enumerate(self._entries) if entry is not None
        }

    def find(self, prefix_hash: bytes, tokens: bytes, parent_serial: int) -> int | None:
        """Return the published block that holds exactly this prefix, or None."""
        for block_id in self._buckets.get(prefix_hash, ()):
            entry = self._entries[block_id]
            if (
                entry is not None
                and entry.parent_serial == parent_serial
                and entry.tokens == tokens
            ):
                return block_id
        return None

    def match(self, data: bytes, root: bytes, known: bytes = b"") -> PrefixMatch:
        """Return the longest prefix of `data` whose full blocks are all published.

        Args:
            data: encoded tokens.
            root: root hash of the chain.
            known: hashes of the first blocks, which save hashing (see `known_hash`). A wrong hash
                ends the match early, because tokens and parent are compared too.
        """
        entries = self._entries
        find = self.find
        hash_fn = self._hash_fn
        block_bytes = self.block_bytes
        block_ids: list[int] = []
        prefix_hash = root
        serial = ROOT_SERIAL
        head = root
        for index in range(len(data) // block_bytes):
            tokens = data[index * block_bytes : (index + 1) * block_bytes]
            next_hash = known_hash(known, index) or hash_fn(prefix_hash, tokens)
            block_id = find(next_hash, head + tokens, serial)
            entry = None if block_id is None else entries[block_id]
            if block_id is None or entry is None:
                return PrefixMatch(block_ids, prefix_hash, serial, next_hash)
            block_ids.append(block_id)
            prefix_hash = next_hash
            serial = entry.serial
            head = b""
        return PrefixMatch(block_ids, prefix_hash, serial, None)

    def rest(self, data: bytes, match: PrefixMatch, known: bytes = b"") -> Iterator[bytes]:
        """Yield the hashes of the full blocks of `data` after a match, in order.

        Args:
            data: encoded tokens.
            match: longest published prefix of `data`.
            known: precomputed hashes of the first blocks, see `match`.
        """
        prefix_hash = match.next_hash
        if prefix_hash is None:
            return
        yield prefix_hash
        hash_fn = self._hash_fn
        block_bytes = self.block_bytes
        for index in range(len(match.block_ids) + 1, len(data) // block_bytes):
            prefix_hash = known_hash(known, index) or hash_fn(
                prefix_hash, data[index * block_bytes : (index + 1) * block_bytes]
            )
            yield prefix_hash

    def named(self, data: bytes, match: PrefixMatch) -> PrefixMatch:
        """Return a match with its `next_hash` recomputed instead of taken from `known`."""
        if match.next_hash is None:
            return match
        start = len(match.block_ids) * self.block_bytes
        return match._replace(
            next_hash=self._hash_fn(match.prefix_hash, data[start : start + self.block_bytes])
        )

    def publish(
        self, block_id: int, prefix_hash: bytes, tokens: bytes, parent_serial: int, *place: Any
    ) -> int:
        """Publish a full block under a new serial, and return that serial.

        `place` holds the remaining fields of the `PrefixEntry`, from `parent_hash` on.
        """
        serial = self._next_serial
        self._next_serial += 1
        self.restore(block_id, PrefixEntry(prefix_hash, tokens, parent_serial, serial, *place))
        return serial

    def restore(self, block_id: int, entry: PrefixEntry) -> None:
        """Publish a withdrawn block again under its previous entry.

        Raises:
            CacheCorruption: the block is already published.
        """
        if self._entries[block_id] is not None:
            raise CacheCorruption(f"block {block_id} is already published")
        self._entries[block_id] = entry
        self._buckets[entry.prefix_hash] = (*self._buckets.get(entry.prefix_hash, ()), block_id)
        for watcher in self._watchers:
            watcher.entered(block_id, entry)

    def withdraw(self, block_id: int) -> PrefixEntry:
        """Remove a published block from the index, and return its entry.

        Raises:
            CacheCorruption: the block is not published.
        """
        entry = self._entries[block_id]
        if entry is None:
            raise CacheCorruption(f"block {block_id} is not published")
        self._entries[block_id] = None
        rest = tuple(other for other in self._buckets[entry.prefix_hash] if other != block_id)
        if rest:
            self._buckets[entry.prefix_hash] = rest
        else:
            del self._buckets[entry.prefix_hash]
        for watcher in self._watchers:
            watcher.left(block_id)
        return entry

    def check(self) -> None:
        """Compare entries, buckets and serials, and raise CacheCorruption on any mismatch."""
        listed = sorted(block_id for bucket in self._buckets.values() for block_id in bucket)
        published = [block_id for block_id, entry in enumerate(self._entries) if entry is not None]
        if listed != published:
            raise CacheCorruption(
                f"the hash buckets list blocks {listed}, but entries exist for blocks {published}"
            )
        for prefix_hash, bucket in self._buckets.items():
            for block_id in bucket:
                entry = self._entries[block_id]
                if entry is None or entry.prefix_hash != prefix_hash:
                    raise CacheCorruption(f"block {block_id} is in the bucket of a different hash")
        entries = [entry for entry in self._entries if entry is not None]
        serials = {entry.serial for entry in entries}
        if len(serials) != len(entries) or not all(
            ROOT_SERIAL < serial < self._next_serial for serial in serials
        ):
            raise CacheCorruption("serials of published blocks repeat or were never assigned")
        if any(not ROOT_SERIAL <= entry.parent_serial < entry.serial for entry in entries):
            raise CacheCorruption("a published block has a lower serial than its parent")
        prefixes = {(entry.parent_serial, entry.tokens) for entry in entries}
        if len(prefixes) != len(entries):
            raise CacheCorruption("two blocks are published for the same prefix")
