"""The one thread that moves blocks between tiers and memory, so that the engine's never waits for a
disk or a network.

It knows bytes and addresses. What it reads and verifies lies in staging buffers until the engine
has copied it into the pool; what is to be written was copied out of the pool before. Both are
bounded in bytes: reading waits for room, and what finds no room to be written is not taken.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.kvcache.hashing import BlockAddress
from kvboost_edge.tiers.base import OffloadStore, Tier, TierStats
from kvboost_edge.tiers.holdings import Held, Holdings

__all__ = ["IOChunk", "Mover"]

_LOG = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]

_PIECE_BYTES = 8 << 20  # of a read: a step of 20 ms copies that in 1-2 ms
_STAGING_BYTES = 64 << 20
_QUEUE_BYTES = 64 << 20
_ASKED_AT_ONCE = 1000  # states of a load that tiers are asked for: one round trip for 16,000 tokens
_MOST_STATES_TRIED = 3  # of a load: each that turns out to be lost or damaged was read for nothing
_TEND_SECONDS = 10.0  # at rest, between looks after the tiers
_LAST_SECONDS = 10.0  # for the operation under way when the mover is closed


class IOChunk(NamedTuple):
    """Blocks of a load that arrived.

    Attributes:
        ticket: whose they are.
        data: uint8 [count, bytes_per_block], verified, in the order they were asked for; to be
            given back by `release`.
        tier: where they were.
        is_last: nothing more comes.
        behind: it is the state behind so many of the load's blocks, uint8 [1, its bytes], those in
            the pool among them; none at all where that is 0. Blocks behind it may have come before
            it. None: these are blocks.
    """

    ticket: int
    data: Bytes
    tier: str
    is_last: bool
    behind: int | None = None


class _Load(NamedTuple):
    ticket: int
    addresses: Sequence[BlockAddress]
    states: Mapping[int, BlockAddress]
    num_there: int


class _Store(NamedTuple):
    addresses: Sequence[BlockAddress]
    data: Bytes


class Mover(OffloadStore):
    """Reads and writes blocks of `block_bytes` bytes over tiers, the nearest first; and states of
    `state_bytes`.
    """

    def __init__(self, tiers: Sequence[Tier], block_bytes: int, state_bytes: int = 0) -> None:
        self._tiers = list(tiers)
        self._block_bytes = block_bytes
        self._state_bytes = state_bytes
        self._deliver: Callable[[IOChunk], None] = self.release
        self._broken: set[str] = set()
        self._told_broken: set[str] = set()
        self._holdings = {tier.name: Holdings(tier) for tier in tiers}
        self._changed = threading.Condition()
        self._loads: deque[_Load] = deque()
        self._stores: deque[_Store] = deque()
        self._cancelled: set[int] = set()
        self._staged = self._queued = self._not_queued = 0
        self._closing = False
        self._deadline = 0.0
        self._thread = threading.Thread(target=self._run, name="kvboost-edge-tiers", daemon=True)

    def start(self, deliver: Callable[[IOChunk], None]) -> None:
        """Begin; `deliver` is called from the mover's thread with each piece, and must not wait."""
        self._deliver = deliver
        self._thread.start()

    # The engine's side: none of these waits.

    @property
    def has_tiers(self) -> bool:
        return bool(self._tiers)

    def may_hold(self, prefix_hash: bytes) -> bool:
        return any(tier.holds(prefix_hash) is not False for tier in self._working())

    def holds(self, prefix_hash: bytes) -> bool:
        return any(tier.holds(prefix_hash) is True for tier in self._working())

    def dropped_from(self, prefix_hash: bytes) -> list[str]:
        return [tier.name for tier in self._working() if tier.dropped(prefix_hash)]

    @property
    def stores(self) -> bool:
        """Whether a tier stores at the moment."""
        return bool(self._storing())

    def lacking(self, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Of each block, whether a tier that stores at the moment does not have it."""
        tiers = self._storing()
        return [
            any(tier.holds(prefix_hash) is not True for tier in tiers)
            for prefix_hash in prefix_hashes
        ]

    def touch(self, prefix_hashes: Sequence[bytes]) -> None:
        for tier in self._working():
            tier.touch(prefix_hashes)

    def load(
        self,
        ticket: int,
        addresses: Sequence[BlockAddress],
        states: Mapping[int, BlockAddress] | None = None,
        num_there: int = 0,
    ) -> None:
        with self._changed:
            self._loads.append(_Load(ticket, addresses, states or {}, num_there))
            self._changed.notify_all()

    def cancel(self, ticket: int) -> None:
        with self._changed:
            self._cancelled.add(ticket)
            self._changed.notify_all()

    def release(self, piece: IOChunk) -> None:
        """The piece was copied, or is not wanted."""
        with self._changed:
            self._staged -= piece.data.nbytes
            if piece.is_last:
                self._cancelled.discard(piece.ticket)
            self._changed.notify_all()

    @property
    def room(self) -> int:
        """Blocks that `store` would take now."""
        return max(0, (_QUEUE_BYTES - self._queued) // self._block_bytes)

    @property
    def has_state_room(self) -> bool:
        """Whether `store` would take a state now; one that is larger than all that may wait is
        taken alone.
        """
        return not self._queued or self._queued + self._state_bytes <= _QUEUE_BYTES

    def store(self, addresses: Sequence[BlockAddress], data: Bytes) -> None:
        """Write blocks, uint8 [len(addresses), bytes_per_block], or states, to every tier that
        lacks them. The caller asked for room, and does not change the array any more.
        """
        with self._changed:
            self._stores.append(_Store(addresses, data))
            self._queued += data.nbytes
            self._changed.notify_all()

    def note_lost(self, count: int) -> None:
        """So many blocks could not be queued."""
        self._not_queued += count

    def stats(self) -> dict[str, TierStats]:
        """Of each tier, by name."""
        return {tier.name: tier.stat() for tier in self._tiers}

    def take_held(self, whole: bool = False) -> dict[str, Held]:
        """What is known of each working tier that was not told before, by name; see `Holdings`. Of
        one that failed it is told once that it holds nothing. For one asker.
        """
        working = self._working()
        held = {tier.name: self._holdings[tier.name].take(whole) for tier in working}
        failed = {tier.name for tier in self._tiers} - held.keys() - self._told_broken
        self._told_broken |= failed
        return held | dict.fromkeys(failed, Held(True, (), ()))

    @property
    def num_lost(self) -> int:
        """Blocks that were evicted before they could be queued."""
        return self._not_queued

    @property
    def staging_bytes(self) -> int:
        """Bytes of blocks on their way, in both directions."""
        return self._staged + self._queued

    def close(self, seconds: float = 10.0) -> None:
        """Write what is queued, for so long at most; end the thread, then close the tiers. Loads
        end unread.
        """
        with self._changed:
            self._closing = True
            self._deadline = time.monotonic() + seconds
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(seconds + _LAST_SECONDS)
            if self._thread.is_alive():
                _LOG.warning("a tier hangs; its thread and what it was to store are left behind")
                return
        for tier in self._tiers:
            tier.close()

    # The thread's side.

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
                is_at_rest = not self._changed.wait_for(self._is_wanted, _TEND_SECONDS)
                load = self._loads.popleft() if self._loads else None
                store = self._stores.popleft() if load is None and self._stores else None
                if load is None and store is None and not is_at_rest:
                    return
                if self._closing and time.monotonic() > self._deadline:
                    self._stores.clear()
                    continue
            if load is not None:
                self._read(load)
            elif store is not None:
                self._write(store)
            else:
                self._tend()

    def _is_wanted(self) -> bool:
        return bool(self._loads or self._stores or self._closing)

    def _tend(self) -> None:
        for tier in self._working():
            try:
                tier.tend()
            except Exception as error:
                self._failed(tier, error)

    def _read(self, load: _Load) -> None:
        """All pieces of a load."""
        if not load.states:
            self._read_blocks(load.ticket, load.addresses, is_all=True)
            return
        ends = self._ends(load)
        deepest = next(ends, 0)
        wanted = load.addresses[: max(0, deepest - load.num_there)]
        count = load.num_there + self._read_blocks(load.ticket, wanted, is_all=False)
        usable = (end for end in itertools.chain([deepest], ends) if 0 < end <= count)
        for end in itertools.islice(usable, _MOST_STATES_TRIED):
            room = self._stage(load.ticket, 1, self._state_bytes)
            if not len(room):
                break  # nobody waits for it any more, or there is no memory for the next one either
            if self._read_state(load, end, room):
                return
        self._deliver(
            IOChunk(load.ticket, self._allocated(0, self._state_bytes), "", is_last=True, behind=0)
        )

    def _ends(self, load: _Load) -> Iterator[int]:
        """Behind how many blocks of a load there are states, as far as tiers say without reading
        them; the deepest first, and one of them perhaps twice. They are asked no further than
        somebody looks.
        """
        ends = sorted(load.states, reverse=True)
        heads = [one.prefix_hash for one in load.addresses[:1]]
        if self.holds(load.states[ends[0]].prefix_hash):
            yield ends[0]
        while ends and not self._is_unwanted(load.ticket):
            asked = ends[:_ASKED_AT_ONCE]
            ends = ends[_ASKED_AT_ONCE:]
            found = self._ask([*heads, *(load.states[end].prefix_hash for end in asked)])
            reach = max(asked) if all(found[: len(heads)]) else load.num_there
            yield from (
                end for end in itertools.compress(asked, found[len(heads) :]) if end <= reach
            )
            ends = [
                end for end in ends if end <= reach
            ]  # states are of no use without their blocks

    def _ask(self, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Of each of these blocks and states, whether a tier says that it has it."""
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
        """Pieces until nobody has the next block; how many came. `is_all`: nothing else comes
        behind them.
        """
        at = 0
        per_piece = max(1, _PIECE_BYTES // self._block_bytes)
        while at < len(addresses):
            wanted = addresses[at : at + per_piece]
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
        """The state behind so many blocks into `data`, if a tier has it indeed: the last piece
        then.
        """
        tier, count = self._read_some([load.states[end]], data)
        with self._changed:
            self._staged -= data[count:].nbytes
        if count:
            self._deliver(IOChunk(load.ticket, data[:count], tier, is_last=True, behind=end))
        return count == 1

    def _is_unwanted(self, ticket: int) -> bool:
        """Whether nobody waits for a load any more."""
        return self._closing or ticket in self._cancelled

    def _stage(self, ticket: int, count: int, row_bytes: int) -> Bytes:
        """Room for so many blocks or states, waited for; none where nobody wants them any more, or
        where memory is refused.
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
            _LOG.warning("no memory to load %d blocks; they are computed", count)
            return np.empty((0, row_bytes), dtype=np.uint8)

    def _read_some(self, addresses: Sequence[BlockAddress], data: Bytes) -> tuple[str, int]:
        """The nearest tier that has the first blocks, and how many of them it has."""
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
        """A tier says what is wrong in its state; one that raises has a fault, and must not take
        requests along. Memory that the system refuses is nobody's fault: what was to be moved is
        computed again, and the tier stays.
        """
        if isinstance(error, MemoryError):
            _LOG.warning(
                "tier %s was refused memory; the blocks it was about to move are computed instead",
                tier.name,
            )
            return
        self._broken.add(tier.name)
        _LOG.error("tier %s failed and is not used any more", tier.name, exc_info=error)
