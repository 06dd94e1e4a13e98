"""Index of the disk tier: stored blocks, their positions, and their eviction order.

The index is in memory, does no I/O and is thread-safe. A block is useless without its ancestors.
Using a block therefore also uses its ancestors, after the block itself. The least recently used
block is then always a leaf.

Blocks that were written but never requested are on probation. Once they exceed a share of the
capacity, they are evicted first, so a scan of one-time prompts does not evict blocks in use. The
small queue of S3-FIFO (Yang et al., 2023) serves the same purpose.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvboost_edge.kvcache.evicted_hashes import EvictedHashes
from kvboost_edge.tiers.disk.sidecar import SegmentRecord, padded

__all__ = ["Index", "IndexEntry", "Use"]

_ON_PROBATION = 0.1  # share of the capacity for blocks that have never been requested


class Use(NamedTuple):
    """Record as listed in the manifest.

    Attributes:
        segment: number of the record's segment.
        offset: position of the record in the segment, in bytes.
        proven: whether the record was requested since it was written.
    """

    segment: int
    offset: int
    proven: bool


class IndexEntry:
    """Stored block in the index.

    Attributes:
        segment: number of the block's segment.
        offset: position of its record in the segment, in bytes.
        header_bytes: length of the record's header.
        payload_bytes: length of the record's payload.
        prefix_hash: prefix hash of the block.
        parent_hash: prefix hash of the previous block.
        nbytes: size of the record on disk, including padding.
        last_use: serial number of the block's last use.
        proven: whether the block was requested since it was written.
    """

    __slots__ = (
        *(
            "header_bytes",
            "last_use",
            "nbytes",
            "offset",
            "parent_hash",
            "payload_bytes",
            "prefix_hash",
        ),
        *("proven", "segment"),
    )

    def __init__(self, segment: int, record: SegmentRecord) -> None:
        self.segment = segment
        self.offset, self.header_bytes, self.payload_bytes, self.prefix_hash, self.parent_hash = (
            record
        )
        self.nbytes = padded(self.header_bytes + self.payload_bytes)
        self.last_use = 0
        self.proven = False


class Index:
    """Stored blocks by prefix hash, with separate LRU orders for new and proven blocks.

    Attributes:
        nbytes: size of all records, in bytes.
        live: size of the live records in each segment, in bytes.
        dropped: hashes of recently dropped blocks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[bytes, IndexEntry] = {}
        self._orders: tuple[OrderedDict[bytes, IndexEntry], ...] = (OrderedDict(), OrderedDict())
        self._uses = 0
        self._frontier = (0, 0)
        self.nbytes = 0
        self._probation_bytes = 0
        self.live: Counter[int] = Counter()
        self.dropped = EvictedHashes()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, prefix_hash: object) -> bool:
        return prefix_hash in self._entries

    def get(self, prefix_hash: bytes) -> IndexEntry | None:
        return self._entries.get(prefix_hash)

    def hashes(self) -> list[bytes]:
        """Return the prefix hashes of all stored blocks."""
        with self._lock:
            return list(self._entries)

    def add(self, entry: IndexEntry) -> None:
        """Add a block that was just written, replacing any block with the same hash.

        If the replaced block was proven, so is the new one.
        """
        with self._lock:
            self._replace(entry)

    def follow(self, segment: int, records: Iterable[SegmentRecord]) -> None:
        """Add records that another process wrote, unless a later one of their hash is known."""
        with self._lock:
            for record in records:
                known = self._entries.get(record.prefix_hash)
                if known is None or (known.segment, known.offset) < (segment, record.offset):
                    self._replace(IndexEntry(segment, record))

    def move(self, entry: IndexEntry, segment: int, offset: int) -> None:
        """Record that a block was moved. Its place in the LRU order does not change."""
        with self._lock:
            if self._entries.get(entry.prefix_hash) is entry:
                self.live[entry.segment] -= entry.nbytes
                self.live[segment] += entry.nbytes
                entry.segment = segment
                entry.offset = offset
                self._frontier = max(self._frontier, (segment, offset))

    def drop(self, prefix_hash: bytes) -> IndexEntry | None:
        """Drop a block, and return its entry, or None if it is not stored."""
        with self._lock:
            self.dropped.add([prefix_hash] * (prefix_hash in self._entries))
            return self._remove(prefix_hash)

    def drop_segment(self, segment: int) -> int:
        """Drop all blocks in a segment, and return their number."""
        with self._lock:
            gone: list[bytes] = []
            if self.live[segment]:
                gone = [
                    prefix_hash
                    for prefix_hash, entry in self._entries.items()
                    if entry.segment == segment
                ]
            self.dropped.add(gone)
            for prefix_hash in gone:
                self._remove(prefix_hash)
            del self.live[segment]
            return len(gone)

    def clear(self) -> None:
        with self._lock:
            self.dropped.add(self._entries)
            self._entries.clear()
            self.live.clear()
            for order in self._orders:
                order.clear()
            self.nbytes = self._probation_bytes = 0

    def renew(self, prefix_hashes: Iterable[bytes], *, proven: bool) -> None:
        """Mark these blocks and all their ancestors as used now.

        If `proven` is true, a request asked for the blocks, which ends their probation.
        """
        with self._lock:
            for prefix_hash in reversed(self._most_recent_first(prefix_hashes)):
                self._renew(self._entries[prefix_hash], proven)

    def oldest(self, room: int) -> IndexEntry | None:
        """Return the block to evict next, or None if the index is empty.

        Args:
            room: capacity in bytes.
        """
        with self._lock:
            fronts = [next(iter(order.values()), None) for order in self._orders]
            probation, proven = fronts
            if probation is None or proven is None:
                return probation or proven
            if self._probation_bytes > _ON_PROBATION * room or probation.last_use < proven.last_use:
                return probation
            return proven

    def load(
        self,
        segments: Iterable[tuple[int, Sequence[SegmentRecord]]],
        uses: Sequence[Use],
        frontier: tuple[int, int],
    ) -> None:
        """Fill an empty index with the records of all segments.

        If several records have the same hash, the latest one wins. Records up to `frontier` are
        live only if `uses` lists them. Records after `frontier` are live and count as most recently
        used.

        Args:
            segments: number and records of each segment, in the order in which they were written.
            uses: records listed in the manifest, least recently used first.
            frontier: segment and offset of the last record before the manifest was written.
        """
        places: dict[int, dict[int, SegmentRecord]] = {}
        young: list[IndexEntry] = []
        for number, records in segments:
            last = (
                frontier[1] if number == frontier[0] else -1 if number > frontier[0] else math.inf
            )
            places[number] = {record[0]: record for record in records if record[0] <= last}
            young += [IndexEntry(number, record) for record in records if record[0] > last]
        with self._lock:
            self._fill(places, uses)
            for entry in young:
                self._replace(entry)
            for prefix_hash in reversed(
                self._most_recent_first(entry.prefix_hash for entry in young)
            ):
                self._renew(self._entries[prefix_hash], False)

    def _fill(self, places: Mapping[int, Mapping[int, SegmentRecord]], uses: Sequence[Use]) -> None:
        """Insert the records listed in the manifest, in bulk."""
        # Startup waits for this. Calling `_insert` for tens of thousands of records would be
        # slower.
        entries = self._entries
        uses_before = self._uses
        nothing = dict[int, SegmentRecord]()
        live = self.live
        probation = 0
        for segment, offset, proven in uses:
            record = places.get(segment, nothing).get(offset)
            if record is None or record[3] in entries:
                continue
            entry = IndexEntry(segment, record)
            entry.proven = proven
            uses_before += 1
            entry.last_use = uses_before
            entries[entry.prefix_hash] = entry
            live[segment] += entry.nbytes
            probation += 0 if proven else entry.nbytes
        # The dict is in insertion order, which is also the LRU order.
        for is_proven, order in enumerate(self._orders):
            order.update(
                (hash_, entry) for hash_, entry in entries.items() if entry.proven == is_proven
            )
        self._uses = uses_before
        self.nbytes = live.total()
        self._probation_bytes = probation
        self._frontier = max(
            [self._frontier, *((entry.segment, entry.offset) for entry in entries.values())]
        )

    def snapshot(self) -> tuple[list[Use], tuple[int, int]]:
        """Return the records and the frontier to save in the manifest."""
        with self._lock:  # later changes only add records after the frontier or remove records
            orders = [list(order.values()) for order in self._orders]
            frontier = self._frontier
        entries = heapq.merge(*orders, key=lambda entry: entry.last_use)
        return [Use(entry.segment, entry.offset, entry.proven) for entry in entries], frontier

    def _most_recent_first(self, prefix_hashes: Iterable[bytes]) -> list[bytes]:
        """Return these blocks and all their ancestors, each before its descendants.

        The last of the given blocks and its ancestors come first.
        """
        order: dict[bytes, None] = {}
        for prefix_hash in reversed(list(prefix_hashes)):
            path: list[bytes] = []
            while (
                prefix_hash not in order and (entry := self._entries.get(prefix_hash)) is not None
            ):
                path.append(entry.prefix_hash)
                prefix_hash = entry.parent_hash
                if len(path) > len(self._entries):
                    break  # a cycle of parents, which only a forged file can contain
            order.update(dict.fromkeys(reversed(path)))
        return list(order)

    def _renew(self, entry: IndexEntry, proven: bool) -> None:
        if proven and not entry.proven:
            del self._orders[False][entry.prefix_hash]
            self._probation_bytes -= entry.nbytes
            entry.proven = True
            self._orders[True][entry.prefix_hash] = entry
        self._orders[entry.proven].move_to_end(entry.prefix_hash)
        self._uses += 1
        entry.last_use = self._uses

    def _replace(self, entry: IndexEntry) -> None:
        if entry.prefix_hash in self._entries:
            before = self._remove(entry.prefix_hash)
            entry.proven |= before is not None and before.proven
        self._insert(entry)

    def _insert(self, entry: IndexEntry) -> None:
        self._uses += 1
        entry.last_use = self._uses
        self._entries[entry.prefix_hash] = entry
        self._orders[entry.proven][entry.prefix_hash] = entry
        nbytes = entry.nbytes
        self.nbytes += nbytes
        if not entry.proven:
            self._probation_bytes += nbytes
        self.live[entry.segment] += nbytes
        if (entry.segment, entry.offset) > self._frontier:
            self._frontier = (entry.segment, entry.offset)

    def _remove(self, prefix_hash: bytes) -> IndexEntry | None:
        entry = self._entries.pop(prefix_hash, None)
        if entry is not None:
            del self._orders[entry.proven][prefix_hash]
            self.nbytes -= entry.nbytes
            self._probation_bytes -= 0 if entry.proven else entry.nbytes
            self.live[entry.segment] -= entry.nbytes
        return entry
