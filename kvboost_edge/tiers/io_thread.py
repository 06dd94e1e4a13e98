"""I/O thread that moves blocks between tiers and memory, so the engine never waits for I/O.

The thread works with bytes and addresses. Blocks that were read and verified stay in staging
buffers until the engine has copied them into the pool. Blocks to write have already been copied out
of the pool. Both directions have bounded buffers. If the staging buffers are full, reading waits.
If the write queue is full, no more blocks are accepted.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.kvcache.events import CacheEvents
from kvboost_edge.kvcache.hashing import BlockAddress
from kvboost_edge.tiers.base import Tier, TierStats
from kvboost_edge.tiers.tier_events import Holdings

__all__ = ["IOChunk", "IOThread"]

_LOG = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]

_CHUNK_BYTES = 8 << 20  # per chunk of a read, which takes 1-2 ms to copy within a step of 20 ms
_STAGING_BYTES = 64 << 20
_QUEUE_BYTES = 64 << 20
_ASKED_AT_ONCE = 1000  # states looked up per round trip, enough for 16,000 tokens
_MOST_STATES_TRIED = 3  # per load, because each lost or damaged state costs a useless read
_TEND_SECONDS = 10.0  # between maintenance calls while idle, or less if a tier wants that
_LAST_SECONDS = 10.0  # extra time for an operation that is still running at `close`


class IOChunk(NamedTuple):
    """Blocks or recurrent state read by a load.

    The receiver must release the buffer with `IOThread.release`.

    Attributes:
        ticket: identifies the load.
        data: verified payloads, uint8 [count, bytes_per_block], in the order of the addresses. For
            a state, uint8 [1, state_bytes].
        tier: name of the tier that the data was read from.
        is_last: whether the load is complete.
        num_blocks_before: None for blocks. For a state, the number of blocks that it covers,
            including those in the pool. 0 means that no state was found. Blocks after the state may
            have arrived earlier.
        places: None for consecutive blocks. For `IOThread.load_each`, the indices of the records
            that were read.
    """

    ticket: int
    data: Bytes
    tier: str
    is_last: bool
    num_blocks_before: int | None = None
    places: tuple[int, ...] | None = None


class _Load(NamedTuple):
    ticket: int
    addresses: Sequence[BlockAddress]
    states: Mapping[int, BlockAddress]
    num_in_pool: int


class _LoadEach(NamedTuple):
    ticket: int
    addresses: Sequence[BlockAddress]
    record_bytes: int


class _Store(NamedTuple):
    addresses: Sequence[BlockAddress]
    data: Bytes


class IOThread:
    """I/O thread that serves one or more tiers, nearest first.

    Args:
        tiers: the tiers.
        block_bytes: payload size of a block, in bytes.
        state_bytes: size of a recurrent state in bytes, or 0 for models without recurrent layers.
    """

    def __init__(self, tiers: Sequence[Tier], block_bytes: int, state_bytes: int = 0) -> None:
        self._tiers = list(tiers)
        self._block_bytes = block_bytes
        self._state_bytes = state_bytes
        self._deliver: Callable[[IOChunk], None] = self.release
        self._broken: set[str] = set()
        self._reported_broken: set[str] = set()
        self._holdings = {tier.name: Holdings(tier) for tier in tiers}
        self._changed = threading.Condition()
        self._loads: deque[_Load] = deque()
        self._later_loads: deque[_LoadEach] = deque()
        self._stores: deque[_Store] = deque()
        self._cancelled: set[int] = set()
        self._staged = self._queued = self._not_queued = 0
        self._closing = False
        self._deadline = 0.0
        self._tended_at: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="kvboost-edge-tiers", daemon=True)

    def start(self, deliver: Callable[[IOChunk], None]) -> None:
        """Start the thread, which passes each chunk to `deliver`. That function must not block."""
        self._deliver = deliver
        self._thread.start()

    # Methods called by the engine. None of them blocks.

    def may_hold(self, prefix_hash: bytes) -> bool:
        """Return whether some tier has the block or might have it."""
        return any(tier.holds(prefix_hash) is not False for tier in self._working())

    def holds(self, prefix_hash: bytes) -> bool:
        """Return whether some tier is known to have the block."""
        return any(tier.holds(prefix_hash) is True for tier in self._working())

    def dropped_from(self, prefix_hash: bytes) -> list[str]:
        """Return the names of the tiers that once stored the block and dropped it."""
        return [tier.name for tier in self._working() if tier.dropped(prefix_hash)]

    @property
    def stores(self) -> bool:
        """True if some tier currently stores blocks."""
        return bool(self._storing())

    def lacking(self, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Return whether each block is missing from some tier that currently stores blocks."""
        tiers = self._storing()
        return [
            any(tier.holds(prefix_hash) is not True for tier in tiers)
            for prefix_hash in prefix_hashes
        ]

    def touch(self, prefix_hashes: Sequence[bytes]) -> None:
        """Record a use of these blocks, which are in the order of their chain."""
        for tier in self._working():
            tier.touch(prefix_hashes)

    def load(
        self,
        ticket: int,
        addresses: Sequence[BlockAddress],
        states: Mapping[int, BlockAddress] | None = None,
        num_in_pool: int = 0,
    ) -> None:
        """Start loading consecutive blocks of a chain, up to the first that no tier has.

        The results arrive as chunks, the last of which is marked. For a hybrid model, blocks are
        read up to the deepest recurrent state that a tier has, followed by that state. If the state
        or a block before it turns out to be lost, a shallower state is tried, up to three states in
        total.

        Args:
            ticket: identifies the load.
            addresses: addresses of the blocks to load, in order.
            states: addresses of the states that a tier may have, by the number of blocks that each
                state covers.
            num_in_pool: number of blocks before the first address, which are already in the pool.
        """
        with self._changed:
            self._loads.append(_Load(ticket, addresses, states or {}, num_in_pool))
            self._changed.notify_all()

    def load_each(self, ticket: int, addresses: Sequence[BlockAddress], record_bytes: int) -> None:
        """Start loading each of some records that a tier has, after all other loads.

        The result is one chunk. Damaged records are skipped.

        Args:
            ticket: identifies the load. It must be negative.
            addresses: addresses of the records, in any order.
            record_bytes: payload size of a record, in bytes.
        """
        with self._changed:
            self._later_loads.append(_LoadEach(ticket, addresses, record_bytes))
            self._changed.notify_all()

    def cancel(self, ticket: int) -> None:
        """Cancel a load. Chunks already being read and the final chunk are still delivered."""
        with self._changed:
            self._cancelled.add(ticket)
            self._changed.notify_all()

    def release(self, chunk: IOChunk) -> None:
        """Release the buffer of a chunk that was copied or is no longer needed."""
        with self._changed:
            self._staged -= chunk.data.nbytes
            if chunk.is_last:
                self._cancelled.discard(chunk.ticket)
            self._changed.notify_all()

    def room_for(self, record_bytes: int) -> int:
        """Return how many records with payloads of this size `store` would accept now.

        An empty queue accepts one of any size.
        """
        least = 0 if self._queued else 1
        return max(least, (_QUEUE_BYTES - self._queued) // record_bytes)

    def store(self, addresses: Sequence[BlockAddress], data: Bytes) -> None:
        """Queue blocks or states for every tier that lacks them.

        The caller must first check that there is room, and must not modify the array afterwards.

        Args:
            addresses: addresses of the blocks or states.
            data: their payloads, uint8 [len(addresses), bytes].
        """
        with self._changed:
            self._stores.append(_Store(addresses, data))
            self._queued += data.nbytes
            self._changed.notify_all()

    def note_lost(self, count: int) -> None:
        """Count blocks that could not be queued for writing."""
        self._not_queued += count

    def stats(self) -> dict[str, TierStats]:
        """Return the statistics of all tiers, by tier name."""
        return {tier.name: self._stat(tier) for tier in self._tiers}

    def _stat(self, tier: Tier) -> TierStats:
        if tier.name not in self._broken:
            return tier.stat()
        state = "disabled after an internal error, which the log describes; load the engine again"
        return dataclasses.replace(tier.stat(), writable=False, state=state)

    def take_held(self, whole: bool = False) -> dict[str, CacheEvents]:
        """Return the changes of each working tier's contents, by tier name.

        The result is for a single reader, see `Holdings`. A failed tier is reported once, as empty.
        """
        working = self._working()
        held = {tier.name: self._holdings[tier.name].take(whole) for tier in working}
        failed = {tier.name for tier in self._tiers} - held.keys() - self._reported_broken
        self._reported_broken |= failed
        return held | dict.fromkeys(failed, CacheEvents(True, (), ()))

    @property
    def num_lost(self) -> int:
        """Number of evicted blocks that could not be queued for writing."""
        return self._not_queued

    @property
    def staging_bytes(self) -> int:
        """Size of all data being read or waiting to be written, in bytes."""
        return self._staged + self._queued

    def close(self, seconds: float = 10.0) -> None:
        """Write queued blocks for at most `seconds`, stop the thread and close the tiers.

        Pending loads are abandoned.
        """
        with self._changed:
            self._closing = True
            self._deadline = time.monotonic() + seconds
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(seconds + _LAST_SECONDS)
            if self._thread.is_alive():
                _LOG.warning(
                    "a tier does not respond; its I/O thread and unwritten blocks are abandoned"
                )
                return
        for tier in self._tiers:
            tier.close()

    # Methods called by the I/O thread.

    def _working(self) -> list[Tier]:
        return [tier for tier in self._tiers if tier.name not in self._broken]

    def _storing(self) -> list[Tier]:
        return [tier for tier in self._working() if tier.stat().writable]

    def _run(self) -> None:
        for tier in self._tiers:
            try:
                tier.begin()
            except Exception as error:
                self._failed(tier, error)
        while True:
            with self._changed:
                is_at_rest = not self._changed.wait_for(self._is_wanted, self._tend_pause())
                job = self._next()
                if job is None and not is_at_rest:
                    return
                if self._closing and time.monotonic() > self._deadline:
                    self._stores.clear()
                    continue
            if job is None:
                self._tend()
            else:
                self._do(job)

    def _next(self) -> _Load | _LoadEach | _Store | None:
        """Remove and return the next job, or None if there is none."""
        queue = next((one for one in (self._loads, self._later_loads, self._stores) if one), None)
        return None if queue is None else queue.popleft()

    def _do(self, job: _Load | _LoadEach | _Store) -> None:
        if isinstance(job, _Load):
            self._read(job)
        elif isinstance(job, _LoadEach):
            self._read_each(job)
        else:
            self._write(job)

    def _is_wanted(self) -> bool:
        return bool(self._loads or self._later_loads or self._stores or self._closing)

    def _tend_pause(self) -> float:
        return min((_pause_of(tier) for tier in self._working()), default=_TEND_SECONDS)

    def _tend(self) -> None:
        for tier in self._working():
            now = time.monotonic()
            if now - self._tended_at.get(tier.name, -math.inf) < _pause_of(tier):
                continue
            self._tended_at[tier.name] = now
            try:
                tier.tend()
            except Exception as error:
                self._failed(tier, error)

    def _read(self, load: _Load) -> None:
        """Deliver all chunks of a load."""
        if not load.states:
            self._read_blocks(load.ticket, load.addresses, is_all=True)
            return
        ends = self._ends(load)
        deepest = next(ends, 0)
        wanted = load.addresses[: max(0, deepest - load.num_in_pool)]
        count = load.num_in_pool + self._read_blocks(load.ticket, wanted, is_all=False)
        usable = (end for end in itertools.chain([deepest], ends) if 0 < end <= count)
        for end in itertools.islice(usable, _MOST_STATES_TRIED):
            room = self._stage(load.ticket, 1, self._state_bytes)
            if not len(room):
                break  # the load was cancelled, or out of memory
            if self._read_state(load, end, room):
                return
        self._deliver(
            IOChunk(
                load.ticket,
                self._allocated(0, self._state_bytes),
                "",
                is_last=True,
                num_blocks_before=0,
            )
        )

    def _ends(self, load: _Load) -> Iterator[int]:
        """Lazily yield how many blocks each state that a tier reports covers, deepest first.

        The deepest one may be yielded twice.
        """
        ends = sorted(load.states, reverse=True)
        heads = [one.prefix_hash for one in load.addresses[:1]]
        if self.holds(load.states[ends[0]].prefix_hash):
            yield ends[0]
        while ends and not self._is_unwanted(load.ticket):
            asked = ends[:_ASKED_AT_ONCE]
            ends = ends[_ASKED_AT_ONCE:]
            found = self._ask([*heads, *(load.states[end].prefix_hash for end in asked)])
            reach = max(asked) if all(found[: len(heads)]) else load.num_in_pool
            yield from (
                end for end in itertools.compress(asked, found[len(heads) :]) if end <= reach
            )
            # A state is useless without the blocks that it covers.
            ends = [end for end in ends if end <= reach]

    def _ask(self, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Return whether each block or state is stored in some tier."""
        found = [False] * len(prefix_hashes)
        for tier in self._working():
            try:
                found = [
                    one or other for one, other in zip(found, tier.ask(prefix_hashes), strict=True)
                ]
            except Exception as error:
                self._failed(tier, error)
        return found

    def _read_blocks(self, ticket: int, addresses: Sequence[BlockAddress], *, is_all: bool) -> int:
        """Deliver chunks until no tier has the next block, and return the number of blocks.

        If `is_all` is true, the last chunk completes the load.
        """
        at = 0
        per_chunk = max(1, _CHUNK_BYTES // self._block_bytes)
        while at < len(addresses):
            wanted = addresses[at : at + per_chunk]
            data = self._stage(ticket, len(wanted), self._block_bytes)
            tier, count = self._read_some(wanted, data)
            at += count
            with self._changed:
                self._staged -= data[count:].nbytes
            is_end = count == 0 or at == len(addresses) or self._is_unwanted(ticket)
            self._deliver(IOChunk(ticket, data[:count], tier, is_last=is_all and is_end))
            if is_end:
                break
        return at

    def _read_state(self, load: _Load, end: int, data: Bytes) -> bool:
        """Read the state after `end` blocks and deliver it as the last chunk; return success."""
        tier, count = self._read_some([load.states[end]], data)
        with self._changed:
            self._staged -= data[count:].nbytes
        if count:
            self._deliver(
                IOChunk(load.ticket, data[:count], tier, is_last=True, num_blocks_before=end)
            )
        return count == 1

    def _read_each(self, load: _LoadEach) -> None:
        """Deliver the chunk of a load of single records."""
        # Ask first. Trying to read each record that a server lacks would take a round trip each.
        hashes = [one.prefix_hash for one in load.addresses]
        found = [] if self._is_unwanted(load.ticket) else self._ask(hashes)
        places = list(itertools.compress(range(len(found)), found))
        data = self._stage(load.ticket, len(places), load.record_bytes)
        read: list[int] = []
        at = 0
        while at < len(data):
            done = len(read)
            wanted = [load.addresses[place] for place in places[at:]]
            _, count = self._read_some(wanted, data[done : done + len(wanted)])
            read += places[at : at + count]
            at += max(1, count)  # skip a record that could not be read
        with self._changed:
            self._staged -= data[len(read) :].nbytes
        self._deliver(IOChunk(load.ticket, data[: len(read)], "", is_last=True, places=tuple(read)))

    def _is_unwanted(self, ticket: int) -> bool:
        """Return whether a load was cancelled or the thread is closing."""
        return self._closing or ticket in self._cancelled

    def _stage(self, ticket: int, count: int, row_bytes: int) -> Bytes:
        """Wait for room and return a staging buffer, uint8 [count, row_bytes].

        The result is empty if the load was cancelled or memory ran out.
        """
        nbytes = count * row_bytes
        with self._changed:
            while (
                self._staged
                and self._staged + nbytes > _STAGING_BYTES
                and not self._is_unwanted(ticket)
            ):
                self._changed.wait()
            data = self._allocated(0 if self._is_unwanted(ticket) else count, row_bytes)
            self._staged += data.nbytes
        return data

    def _allocated(self, count: int, row_bytes: int) -> Bytes:
        try:
            return np.empty((count, row_bytes), dtype=np.uint8)
        except MemoryError:
            _LOG.warning(
                "not enough memory to load %d blocks from a tier; they are computed instead", count
            )
            return np.empty((0, row_bytes), dtype=np.uint8)

    def _read_some(self, addresses: Sequence[BlockAddress], data: Bytes) -> tuple[str, int]:
        """Read blocks from the nearest tier that has the first one.

        Returns:
            name of the tier, and the number of blocks that were read.
        """
        if not len(data):
            return "", 0
        rows = [memoryview(row) for row in data]
        for tier in self._working():
            try:
                if tier.holds(addresses[0].prefix_hash) is False:
                    continue
                count = tier.read(addresses, rows)
            except Exception as error:
                self._failed(tier, error)
                continue
            self._holdings[tier.name].note(
                address.prefix_hash for address in addresses[: count + 1]
            )
            if count:
                return tier.name, count
        return "", 0

    def _write(self, store: _Store) -> None:
        for tier in self._working():
            try:
                lacking = [
                    i
                    for i, address in enumerate(store.addresses)
                    if tier.holds(address.prefix_hash) is not True
                ]
                if lacking:
                    tier.write(
                        [store.addresses[i] for i in lacking],
                        [memoryview(store.data[i]) for i in lacking],
                    )
                    self._holdings[tier.name].note(store.addresses[i].prefix_hash for i in lacking)
            except Exception as error:
                self._failed(tier, error)
        with self._changed:
            self._queued -= store.data.nbytes
            self._changed.notify_all()

    def _failed(self, tier: Tier, error: Exception) -> None:
        """Disable a tier that raised an exception, so requests do not fail because of it."""
        # Tiers report device failures in their state, so an exception is a bug. Running out of
        # memory is not. The blocks are then recomputed, and the tier stays in use.
        if isinstance(error, MemoryError):
            _LOG.warning(
                "tier %s ran out of memory; the blocks that it was moving are computed instead",
                tier.name,
            )
            return
        self._broken.add(tier.name)
        _LOG.error("tier %s failed and is disabled", tier.name, exc_info=error)


def _pause_of(tier: Tier) -> float:
    return min(_TEND_SECONDS, tier.tend_seconds)
