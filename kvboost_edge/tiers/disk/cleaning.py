"""Cleaner of the disk tier, which makes room for new segments.

It evicts the least recently used blocks, copies the remaining blocks of the emptiest segment to the
active one, and deletes the emptied file. A segment is copied only if at most half of it is live,
and each new segment causes at most half a segment of copies. Copies therefore never exceed the
space gained, and total writes are at most twice the stored bytes.
"""

from __future__ import annotations

from kvboost_edge.tiers.disk.capacity import Room
from kvboost_edge.tiers.disk.index import Index, IndexEntry
from kvboost_edge.tiers.disk.segment_files import SegmentFile, SegmentFiles
from kvboost_edge.tiers.disk.system_calls import passes
from kvboost_edge.tiers.record import decode_header, is_intact

__all__ = ["Cleaner"]

_SLACK = 4
"""Spare room, in segments: one for this segment, one for the next, and two being emptied.

With this spare room, blocks close to eviction are evicted before their segment is copied. A stream
of new prompts then needs no copies at all. Without the spare room, it writes 1.8 bytes per stored
byte.
"""


class Cleaner:
    """Frees room in the segments of one space. All methods may raise OSError.

    Attributes:
        evicted: number of blocks evicted since the start.
        refused: number of damaged blocks dropped since the start.
        copied_bytes: number of bytes copied since the start.
    """

    def __init__(self, index: Index, segments: SegmentFiles, room: Room) -> None:
        self._index = index
        self._segments = segments
        self._room = room
        self.evicted = 0
        self.refused = 0
        self.copied_bytes = 0

    def make_room(self, nbytes: int) -> bool:
        """Delete segments until a new segment of `nbytes` fits, and return whether it does."""
        while self._excess(nbytes) > 0:
            if not self.shrink():
                return False
        return True

    def shrink(self) -> bool:
        """Delete a segment, the emptiest one of this space if no other space has one to spare.

        Returns:
            False if no segment could be deleted.
        """
        if self._room.take_from_others():
            return True
        victim = self._emptiest()
        if victim is None:
            return False
        self._delete(victim)
        return True

    def keep_room(self, nbytes: int, *, copies: int) -> None:
        """Free space for the next segment of `nbytes`, copying at most `copies` bytes."""
        while (excess := self._excess(nbytes)) > 0:
            if self._room.take_from_others():
                continue
            allowed = self._segments.nbytes + nbytes - excess
            while self._index.nbytes > allowed - _SLACK * nbytes and self._evict() is not None:
                pass
            victim = self._emptiest()
            if victim is None:
                return
            victim = self._evict_down_to(min(victim.nbytes // 2, copies), victim)
            copies -= self._index.live[victim.number]
            self._copy(victim)
            self._delete(victim)

    def _excess(self, nbytes: int) -> int:
        own = self._segments.nbytes
        return own + nbytes - self._room.allowed(own)

    def _emptiest(self) -> SegmentFile | None:
        """Return the settled segment with the fewest live bytes, or the oldest of several."""
        return min(
            self._segments.settled(),
            key=lambda segment: self._index.live[segment.number],
            default=None,
        )

    def _evict_down_to(self, nbytes: int, victim: SegmentFile) -> SegmentFile:
        """Evict blocks until some settled segment has at most `nbytes` live bytes.

        Returns:
            that segment, or the emptiest one if all blocks have been evicted.
        """
        live = self._index.live
        settled = {segment.number: segment for segment in self._segments.settled()}
        while live[victim.number] > nbytes and (entry := self._evict()) is not None:
            emptier = settled.get(entry.segment, victim)
            if live[emptier.number] < live[victim.number]:
                victim = emptier
        return victim

    def _evict(self) -> IndexEntry | None:
        entry = self._index.oldest(self._room.max_bytes)
        if entry is not None:
            self._index.drop(entry.prefix_hash)
            self.evicted += 1
        return entry

    def _delete(self, victim: SegmentFile) -> None:
        self.evicted += self._index.drop_segment(victim.number)
        self._segments.remove(victim.number)

    def _copy(self, victim: SegmentFile) -> None:
        """Copy the live records of a segment to the active one, and drop damaged records."""
        for record in self._segments.records(victim.number):
            entry = self._index.get(record.prefix_hash)
            if entry is not None and (entry.segment, entry.offset) == (
                victim.number,
                record.offset,
            ):
                self._copy_record(entry)

    def _copy_record(self, entry: IndexEntry) -> None:
        active = self._segments.active
        if active is None or active.nbytes - active.end < entry.nbytes:
            return
        data = memoryview(bytearray(entry.header_bytes + entry.payload_bytes))
        header = data[: entry.header_bytes]
        payload = data[entry.header_bytes :]
        try:
            done = self._segments.read(entry.segment, [data], entry.offset)
        except OSError as error:
            if passes(error):
                raise
            done = 0
        if done != data.nbytes or not _is_sound(header, payload):
            self._index.drop(entry.prefix_hash)
            self.refused += 1
            return
        record = self._segments.append(header, payload, entry.prefix_hash, entry.parent_hash)
        self._index.move(entry, active.number, record.offset)
        self.copied_bytes += entry.nbytes


def _is_sound(header: memoryview, payload: memoryview) -> bool:
    found = decode_header(header)
    return found is not None and is_intact(found, payload)
