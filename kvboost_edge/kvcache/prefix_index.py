"""Which full blocks can be matched, by prefix hash; a hash finds candidates, tokens and parent
decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from kvboost_edge.errors import CacheCorruption
from kvboost_edge.kvcache.block_table import PrefixEntry
from kvboost_edge.kvcache.hashing import HashFn, known_hash

__all__ = ["ROOT_SERIAL", "PrefixIndex", "PrefixMatch", "Watcher", "rest_hashes"]

ROOT_SERIAL = 0  # parent of every first block; the root itself stands in that block's `tokens`


class PrefixMatch(NamedTuple):
    """The longest published prefix of some tokens: its blocks, its end of chain, the hash of the
    block after it.

    Attributes:
        beyond: blocks behind it that are published too, and cannot be shared because no state was
            kept behind them.
    """

    block_ids: list[int]
    prefix_hash: bytes
    serial: int
    next_hash: bytes | None
    beyond: int = 0


class Watcher(Protocol):
    """Who is told of every entry that comes and goes, at once, in the thread that changes the
    index.
    """

    def entered(self, block_id: int, entry: PrefixEntry) -> None: ...

    def left(self, block_id: int) -> None: ...


def rest_hashes(
    data: bytes, match: PrefixMatch, block_bytes: int, hash_fn: HashFn, known: bytes = b""
) -> Iterator[bytes]:
    """The hashes of the full blocks of `data` after its match, in order. `known`: see
    `PrefixIndex.match`.
    """
    prefix_hash = match.next_hash
    if prefix_hash is None:
        return
    yield prefix_hash
    for index in range(len(match.block_ids) + 1, len(data) // block_bytes):
        prefix_hash = known_hash(known, index) or hash_fn(
            prefix_hash, data[index * block_bytes : (index + 1) * block_bytes]
        )
        yield prefix_hash


class PrefixIndex:
    """Entries of published blocks, and buckets from hash to blocks. A bucket may hold several
    blocks: hashes collide.

    An entry is found only if its hash, its own tokens and the serial of its parent are all equal.
    By induction over the chain the whole prefix, root included, is then equal: a collision can
    never serve wrong KV.
    """

    __slots__ = ("_buckets", "_entries", "_next_serial", "_watchers")

    def __init__(self, num_blocks: int) -> None:
        self._entries: list[PrefixEntry | None] = [None] * num_blocks
        # Tuples, not lists: nearly all hold one block, and a tuple is the smaller by half.
        self._buckets: dict[bytes, tuple[int, ...]] = {}
        self._next_serial = ROOT_SERIAL + 1
        self._watchers: list[Watcher] = []

    def watch(self, watcher: Watcher) -> None:
        """Tell it of all entries there are, and of every change from here on."""
        for block_id, entry in self.entries().items():
            watcher.entered(block_id, entry)
        self._watchers.append(watcher)

    def __len__(self) -> int:
        return sum(entry is not None for entry in self._entries)

    def __contains__(self, prefix_hash: object) -> bool:
        """Whether a block of this hash is published."""
        return prefix_hash in self._buckets

    def hashes(self) -> Iterable[bytes]:
        """The hashes of all published blocks, each once."""
        return self._buckets.keys()

    def entry(self, block_id: int) -> PrefixEntry | None:
        """The entry of a published block, None for any other."""
        return self._entries[block_id]

    def entries(self) -> dict[int, PrefixEntry]:
        """All entries, by block id."""
        return {
            block_id: entry for block_id, entry in enumerate(self._entries) if entry is not None
        }

    def find(self, prefix_hash: bytes, tokens: bytes, parent_serial: int) -> int | None:
        """The block that holds exactly this prefix, or None."""
        for block_id in self._buckets.get(prefix_hash, ()):
            entry = self._entries[block_id]
            if (
                entry is not None
                and entry.parent_serial == parent_serial
                and entry.tokens == tokens
            ):
                return block_id
        return None

    def match(
        self, data: bytes, root: bytes, block_bytes: int, hash_fn: HashFn, known: bytes = b""
    ) -> PrefixMatch:
        """Follow the chain of full blocks of `data` (encoded tokens, `block_bytes` a block) as far
        as it is published.

        `next_hash` is None where `data` has no full block beyond the match. `known`: hashes of its
        first blocks, taken as they are in place of hashing (`hashing.known_hash`); a wrong one ends
        the match, as tokens and parent decide.
        """
        entries = self._entries
        find = self.find
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

    def publish(
        self, block_id: int, prefix_hash: bytes, tokens: bytes, parent_serial: int, *place: Any
    ) -> int:
        """Make a full block matchable under a new serial, which is returned. `place`: what else a
        `PrefixEntry` says, its fields from `parent_hash` on.
        """
        serial = self._next_serial
        self._next_serial += 1
        self.restore(block_id, PrefixEntry(prefix_hash, tokens, parent_serial, serial, *place))
        return serial

    def restore(self, block_id: int, entry: PrefixEntry) -> None:
        """Make a block matchable under an entry it had before; CacheCorruption if it is published
        already.
        """
        if self._entries[block_id] is not None:
            raise CacheCorruption(f"block {block_id} is published already")
        self._entries[block_id] = entry
        self._buckets[entry.prefix_hash] = (*self._buckets.get(entry.prefix_hash, ()), block_id)
        for watcher in self._watchers:
            watcher.entered(block_id, entry)

    def withdraw(self, block_id: int) -> PrefixEntry:
        """Make a published block unmatchable and return its entry; CacheCorruption if it is not
        published.
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
        """Compare entries and buckets both ways and the serials; CacheCorruption on any
        difference.
        """
        listed = sorted(block_id for bucket in self._buckets.values() for block_id in bucket)
        published = [block_id for block_id, entry in enumerate(self._entries) if entry is not None]
        if listed != published:
            raise CacheCorruption(f"buckets list blocks {listed}, entries exist for {published}")
        for prefix_hash, bucket in self._buckets.items():
            for block_id in bucket:
                entry = self._entries[block_id]
                if entry is None or entry.prefix_hash != prefix_hash:
                    raise CacheCorruption(f"block {block_id} stands in a bucket of another hash")
        entries = [entry for entry in self._entries if entry is not None]
        serials = {entry.serial for entry in entries}
        if len(serials) != len(entries) or not all(
            ROOT_SERIAL < serial < self._next_serial for serial in serials
        ):
            raise CacheCorruption("serials of published blocks repeat or were never given out")
        if any(not ROOT_SERIAL <= entry.parent_serial < entry.serial for entry in entries):
            raise CacheCorruption("a published block is older than its parent")
        prefixes = {(entry.parent_serial, entry.tokens) for entry in entries}
        if len(prefixes) != len(entries):
            raise CacheCorruption("one prefix is published by two blocks")
