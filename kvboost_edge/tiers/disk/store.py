"""Store of one space on disk, shared by all tiers in this process that use its directory.

`_lock` serializes reading, writing and cleaning. `holds`, `touch` and `stat` never wait for the
disk.

If another process owns the directory, the store follows it: every `FOLLOW_S`, it looks for new and
deleted segments and for new records, or becomes the owner if there is none. Becoming the owner is
the same as opening the directory, recovery included.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from kvboost_edge.errors import ConfigError
from kvboost_edge.host.memory import paused_garbage_collection
from kvboost_edge.kvcache.hashing import BlockAddress
from kvboost_edge.tiers.disk.capacity import Room
from kvboost_edge.tiers.disk.cleaning import Cleaner
from kvboost_edge.tiers.disk.directory import SpaceDirectory
from kvboost_edge.tiers.disk.file_names import ORDER
from kvboost_edge.tiers.disk.index import Index, IndexEntry
from kvboost_edge.tiers.disk.manifest import decode_manifest, encode_manifest
from kvboost_edge.tiers.disk.segment_files import SegmentFile, SegmentFiles
from kvboost_edge.tiers.disk.segment_sealing import Sealer
from kvboost_edge.tiers.disk.sidecar import padded
from kvboost_edge.tiers.disk.system_calls import Files, is_full, passes, read_file, write_whole
from kvboost_edge.tiers.record import decode_header, encode_header, header_bytes, is_intact

__all__ = ["FOLLOW_S", "SEGMENT_BYTES", "Store"]

_LOG = logging.getLogger(__name__)
SEGMENT_BYTES = 64 << 20
FOLLOW_S = 0.5
"""Shortest time between two looks at what the owner of the directory did, in seconds."""
_RETRY_S = 30.0
"""Pause in writing after a failed write, in seconds."""
_GONE = "was deleted or replaced while it was open"
_SEGMENTS_AT_LEAST = 32
"""Minimum number of segments that fit under the cap, so the cleaner always has some to empty."""


class Store:
    """On-disk store of the blocks of one space.

    If the directory is deleted, moved or replaced, the next read, write or `tend` releases it. When
    the next block is written, `open_space` creates or opens the directory again.

    Args:
        open_space: function that opens the directory.
        space: 32-byte id of the space.
        files: system calls to use.
        max_bytes: cap over all spaces, in bytes. None means `default_cap`.
        clock: function that returns monotonic time in seconds.
        sealer: runs the background jobs that seal segments.

    Raises:
        ConfigError: the directory cannot be used, or the cap is too small.
        OSError: the directory cannot be read.
    """

    def __init__(
        self,
        open_space: Callable[[], SpaceDirectory],
        space: bytes,
        files: Files,
        max_bytes: int | None,
        clock: Callable[[], float],
        sealer: Sealer,
    ) -> None:
        self._open_space = open_space
        self._space = space
        self._files = files
        self._clock = clock
        self._sealer = sealer
        self._lock = threading.Lock()
        self._problem = self._read_problem = self._follow_problem = ""
        self._retry_at = 0.0
        self._follow_at = 0.0
        self._unsaved_bytes = 0
        self._gone = self.closed = False
        self.directory = open_space()
        try:
            self.room = Room(self.directory.path, files, max_bytes)
            self._load()
        except BaseException:
            self.directory.close()
            raise

    def _load(self) -> None:
        """Load the contents of the directory. May raise OSError."""
        self._follow_at = self._clock() + FOLLOW_S
        path = self.directory.path
        # Read it first. If the owner changes meanwhile, everything is then loaded once more.
        generation = self.directory.generation
        segments = SegmentFiles(path, self._space, self._files, owned=self.directory.owned)
        index = Index()
        uses, frontier = decode_manifest(read_file(self._files, path / ORDER) or b"", self._space)
        with paused_garbage_collection():
            index.load(segments.load(frontier[0]), uses, frontier)
        self._generation = generation
        self._follow_problem = ""
        self._segments = segments
        self.index = index
        self.cleaner = Cleaner(index, segments, self.room)
        for segment in segments.unsealed:
            self._seal_later(segment)

    @property
    def state(self) -> str:
        """One line that says why blocks are not stored or could not be read. "" if all is well."""
        gone = (
            f"{self.directory.path} {_GONE}; it is recreated when the next block is stored"
            if self._gone
            else ""
        )
        why_not = "" if self._gone else self._follow_problem or self.directory.why_not
        return why_not or self._problem or gone or self._read_problem

    @property
    def writable(self) -> bool:
        """True if the store would try to write a block now."""
        # This must be True after the pause that follows a failure, or writing would never resume.
        # It must be True without a directory, which only the next block recreates.
        return (self.directory.owned or self._gone) and not self.closed and not self._is_paused

    @property
    def _is_paused(self) -> bool:
        return bool(self._problem) and self._clock() < self._retry_at

    def read(
        self, blocks: Sequence[BlockAddress], into: Sequence[memoryview], counts: Counter[str]
    ) -> int:
        """Read blocks as described in `Tier.read`.

        The results are counted in `counts`, by the field names of `TierStats`.
        """
        done = 0
        with self._lock:
            self._check_directory()
            for address, payload in zip(blocks, into, strict=True):
                entry = None if self.closed else self.index.get(address.prefix_hash)
                if entry is None:
                    counts["missing"] += 1
                    break
                if not self._read(entry, address, payload, counts):
                    break
                counts["read_blocks"] += 1
                counts["read_bytes"] += entry.nbytes
                done += 1
            if not self.directory.owned:
                self._segments.close()
        self.index.renew([address.prefix_hash for address in blocks[:done]], proven=True)
        return done

    def write(
        self, blocks: Sequence[BlockAddress], payloads: Sequence[memoryview], counts: Counter[str]
    ) -> int:
        """Write blocks as described in `Tier.write`.

        The results are counted in `counts`, by the field names of `TierStats`.
        """
        wanted = list(zip(blocks, payloads, strict=True))
        with self._lock:
            self._check_directory()
            if self._gone and not self.closed and not self._is_paused:
                self._reopen()
            # Try twice, because making room for some of the blocks may have evicted others.
            for _ in range(2):
                self.index.renew(
                    [one.prefix_hash for one in blocks if one.prefix_hash in self.index],
                    proven=False,
                )
                lacking = [
                    (one, payload) for one, payload in wanted if one.prefix_hash not in self.index
                ]
                written = [self._write(one, payload, counts) for one, payload in lacking]
                if not all(written):
                    break
            there = [one.prefix_hash for one in blocks if one.prefix_hash in self.index]
            counts["not_written"] += len(blocks) - len(there)
        self.index.renew(there, proven=False)
        return len(there)

    def drop(self, prefix_hashes: Sequence[bytes]) -> None:
        """Drop blocks as described in `Tier.drop`."""
        for prefix_hash in prefix_hashes:
            self.index.drop(prefix_hash)

    def tend(self) -> None:
        """Release the directory if it was deleted, moved or replaced, or follow its owner."""
        with self._lock:
            self._check_directory()

    @property
    def tend_seconds(self) -> float:
        """Longest time between two calls of `tend`, so new blocks are seen within a second."""
        return math.inf if self.directory.owned or self._gone else FOLLOW_S / 2

    def close(self) -> None:
        """Seal the active segment, save the LRU order and release the directory.

        A second call does nothing.
        """
        with self._lock:
            if self.closed:
                return
            self.closed = True
            if self.directory.owned and not self._gone and not self.directory.is_lost:
                self._retire()
                self._sealer.join()
                self._save_order()
            self._release()

    def after_fork(self) -> None:
        """Close the store in a forked child without writing."""
        self._lock = threading.Lock()
        self.index = Index()
        self.closed = True
        self._segments.close()
        self.directory.close()

    def _check_directory(self) -> None:
        """Release everything if the directory was deleted, moved or replaced.

        Otherwise follow the owner if it is another process and it is time to.
        """
        if self.closed or self._gone:
            return
        if not self.directory.is_lost:
            if not self.directory.owned and self._clock() >= self._follow_at:
                self._follow()
            return
        _LOG.warning("%s %s; the disk tier starts empty", self.directory.path, _GONE)
        self._sealer.join()  # pending jobs belong to the old directory
        self._release()
        self._gone = True
        self._problem = ""

    def _follow(self) -> None:
        """Look at what the owner did since the last time, or become the owner if there is none."""
        self._follow_at = self._clock() + FOLLOW_S
        problem = ""
        try:
            if self.directory.take() or self.directory.generation != self._generation:
                self._segments.close()
                self._load()
                if self.directory.owned:
                    _LOG.info("the disk tier stores blocks in %s now", self.directory.path)
            else:
                for segment, records in self._segments.follow():
                    if records is None:
                        self.index.drop_segment(segment)
                    else:
                        self.index.follow(segment, records)
                self._segments.close()
        except (OSError, MemoryError) as error:
            problem = f"{self.directory.path} cannot be read: {error}"
            if self.directory.owned:
                self.directory.give_up(problem)  # an owner must know what it owns
            self._segments.close()
            if not self._follow_problem:
                _LOG.warning("the disk tier cannot see new blocks at the moment: %s", error)
        self._follow_problem = problem

    def _reopen(self) -> None:
        """Reopen the directory, once there is a block to store."""
        # Not earlier, because the user may still be deleting the directory.
        try:
            self.directory = self._open_space()
            self._load()
            self._gone = False
            self._problem = ""
        except (ConfigError, OSError) as error:
            self.directory.close()
            self._pause(f"{self.directory.path} {_GONE}, and cannot be reopened: {error}")

    def _release(self) -> None:
        self._segments.close()
        self.directory.close()
        self.index.clear()

    def _read(
        self, entry: IndexEntry, address: BlockAddress, payload: memoryview, counts: Counter[str]
    ) -> bool:
        """Read one block into `payload`, and return whether it was read and verified.

        A block that fails verification is dropped.
        """
        if (header_bytes(len(address.tokens) // 4), payload.nbytes) == (
            entry.header_bytes,
            entry.payload_bytes,
        ):
            header = memoryview(bytearray(entry.header_bytes))
            try:
                done = self._segments.read(entry.segment, [header, payload], entry.offset)
            except FileNotFoundError:
                # The owner may have copied the block before it deleted the segment.
                self.index.drop_segment(entry.segment)
                self._segments.forget(entry.segment)
                if not self.directory.owned:
                    self._follow()
                moved = self.index.get(address.prefix_hash)
                if moved is not None:
                    return self._read(moved, address, payload, counts)
                counts["missing"] += 1
                return False
            except OSError as error:
                counts["errors"] += 1
                if not passes(error):
                    self.index.drop(entry.prefix_hash)
                if not self._read_problem:
                    _LOG.warning("blocks of the disk tier cannot be read: %s", error)
                self._read_problem = f"{self.directory.path} cannot be read: {error}"
                return False
            self._read_problem = ""
            found = decode_header(header) if done == header.nbytes + payload.nbytes else None
            if (
                found is not None
                and (found.space, found.address) == (self._space, address)
                and is_intact(found, payload)
            ):
                return True
        counts["refused"] += 1
        self.index.drop(entry.prefix_hash)
        return False

    def _write(self, address: BlockAddress, payload: memoryview, counts: Counter[str]) -> bool:
        """Append one block, and return whether it was stored."""
        if not self.writable or self._gone:
            return False
        nbytes = padded(header_bytes(len(address.tokens) // 4) + payload.nbytes)
        if nbytes > self.room.max_bytes // 4:
            self._pause(
                f"a block of {nbytes} bytes takes more than a quarter of "
                f"max_disk_bytes={self.room.max_bytes}"
            )
            return False
        try:
            why_none = self._why_no_room(nbytes)
            if why_none:
                self._pause(why_none)
                return False
            header = memoryview(encode_header(self._space, address, payload))
            record = self._segments.append(
                header, payload, address.prefix_hash, address.parent_hash
            )
        except OSError as error:
            counts["errors"] += 1
            self._pause(f"{self.directory.path} cannot be written: {error}")
            self._retire()
            return False
        assert self._segments.active is not None
        self.index.add(IndexEntry(self._segments.active.number, record))
        counts["written_blocks"] += 1
        counts["written_bytes"] += nbytes
        if self._problem:
            _LOG.info("the disk tier in %s can store blocks again", self.directory.path)
            self._problem = ""
        return True

    def _why_no_room(self, nbytes: int) -> str:
        """Make room for a record of `nbytes`. Return "" on success, else one line with the reason.

        May raise OSError.
        """
        active = self._segments.active
        if active is not None and active.nbytes - active.end >= nbytes:
            return ""
        self._retire()
        size = max(nbytes, min(SEGMENT_BYTES, padded(self.room.max_bytes // _SEGMENTS_AT_LEAST)))
        with self.room.locked() as is_locked:
            if not is_locked:
                return f"another process is making room in {self.directory.path.parent}"
            if not self.cleaner.make_room(size):
                return self.room.why_none()
            try:
                self._segments.begin(size)
            except OSError as error:
                # The free space of the file system does not show a quota.
                if not is_full(error) or not self.cleaner.shrink():
                    raise
                self._segments.begin(size)
        self.cleaner.keep_room(size, copies=min(size // 2, size - nbytes))
        return ""

    def _retire(self) -> None:
        """Retire the active segment and seal it in the background."""
        segment = self._segments.retire()
        if segment is not None:
            self._seal_later(segment)

    def _seal_later(self, segment: SegmentFile) -> None:
        # Syncing 64 MiB to a slow device takes seconds, and reads must not wait for that.
        self._sealer.start(lambda: self._seal(segment))

    def _seal(self, segment: SegmentFile) -> None:
        """Seal a segment, and save the LRU order if enough bytes were written since the last save.

        This method runs on the sealing thread.
        """
        if self.directory.is_lost:
            return  # a new directory may belong to another process
        self._segments.seal(segment)
        self._unsaved_bytes += segment.nbytes
        if self._unsaved_bytes > 256 * len(self.index):
            self._save_order()

    def _save_order(self) -> None:
        try:
            data = encode_manifest(self._space, *self.index.snapshot())
            write_whole(self._files, self.directory.path / ORDER, data)
            self._unsaved_bytes = 0
        except OSError as error:
            _LOG.warning("the LRU order of the disk tier cannot be saved: %s", error)

    def _pause(self, problem: str) -> None:
        if not self._problem:
            _LOG.warning("the disk tier cannot store blocks at the moment: %s", problem)
        self._problem = problem
        self._retry_at = self._clock() + _RETRY_S
