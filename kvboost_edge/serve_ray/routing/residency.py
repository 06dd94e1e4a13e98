"""Believed content of each replica: a bounded map from keys of blocks to the replicas that have
them.

Replicas are numbers here, their slots. The holders of a block are one integer with a bit for each
slot. So the holders of all blocks up to here are an `and` of two integers, for any number of
replicas.

Beliefs come from the replicas' events, in order and without gaps, or from prompts sent there, and
then expire. After a gap, all reported content becomes such a belief until the replica has reported
everything again. A wrong belief costs only time.

Recurrent states have their own keys next to those of the blocks before them (`hashing.state_hash`)
and are held likewise.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvboost_edge.errors import ConfigError
from kvboost_edge.serve_ray.routing.cache_records import (
    KEY_BYTES,
    NOTHING_KNOWN,
    Cursor,
    EventBatch,
)

__all__ = ["MOST_LEVELS", "Level", "Residency"]

_TOLD = math.inf  # when a belief expires that a replica told
MOST_LEVELS = 32


class Level(NamedTuple):
    """The replicas whose bits are set in `holders` hold the first `num_blocks` blocks of a
    chain.
    """

    num_blocks: int
    holders: int


class _Known:
    """Knowledge about one replica.

    Attributes:
        until: keys that it is believed to hold, with the time of expiry.
        cursor: the last batch applied or seen.
        is_synced: whether no batch is missing.
    """

    __slots__ = ("cursor", "is_synced", "until")

    def __init__(self) -> None:
        self.until: dict[int, float] = {}
        self.cursor = NOTHING_KNOWN
        self.is_synced = False


class _Expiry(NamedTuple):
    """Expiry at time `at` of the beliefs in `keys` that were not renewed; None: of all content that
    the replica did not report since.
    """

    at: float
    slot: int
    known: _Known
    keys: tuple[int, ...] | None


class Residency:
    """Beliefs about the replicas in slots 0, 1, ... Not thread-safe.

    Attributes:
        max_entries: most (replica, block) pairs. Beyond it, only blocks whose key has one more zero
            bit at its end are kept: half of them, the same ones for all replicas. So matches lose
            precision, and no beginning of a prompt is forgotten. The others are dropped gradually;
            states, of which 8 bits are zero, when one block in 256 is left.
        believed_seconds: lifetime of a belief that no replica reported.
    """

    def __init__(self, max_entries: int, believed_seconds: float) -> None:
        if max_entries < 1:
            raise ConfigError(f"max_entries={max_entries!r} must be at least 1")
        if not (math.isfinite(believed_seconds) and believed_seconds > 0):
            raise ConfigError(f"believed_seconds={believed_seconds!r} must be finite and above 0")
        self._max_entries = max_entries
        self._believed_seconds = believed_seconds
        self._holders: dict[int, int] = {}
        self._known: dict[int, _Known] = {}
        self._expiries: deque[_Expiry] = deque()  # in order: all last equally long
        self._coarse = 0  # a key is kept if these low bits of it are 0
        self._unswept: list[int] = []  # slots that may hold other keys
        self.num_entries = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks with a believed holder."""
        return len(self._holders)

    def open(self, slot: int) -> None:
        """Add a replica that holds nothing, in a free slot."""
        self._known[slot] = _Known()

    def close(self, slot: int) -> None:
        """Remove a replica and all beliefs about it."""
        self._forget(slot)
        del self._known[slot]

    def cursor(self, slot: int) -> Cursor:
        """Return the position in the replica's events from which to poll; NOTHING_KNOWN if batches
        are missing.
        """
        known = self._known[slot]
        return known.cursor if known.is_synced else NOTHING_KNOWN

    def apply(self, slot: int, batch: EventBatch, now: float) -> bool:
        """Apply a batch; return False if earlier ones are missing. Repeated and late ones change
        nothing.
        """
        known = self._known[slot]
        if (
            batch.epoch != known.cursor.epoch
        ):  # another process: nothing of the old one's cache is left
            self._forget(slot)
            known = self._known[slot]
            known.is_synced = not batch.is_whole and batch.serial == 0
        elif batch.serial < known.cursor.serial or (
            batch.serial == known.cursor.serial and not batch.is_whole
        ):
            return known.is_synced
        elif known.is_synced and not batch.is_whole and batch.serial != known.cursor.serial + 1:
            self._doubt(slot, now)
        known.cursor = Cursor(batch.epoch, batch.serial)
        if batch.is_whole:
            known.is_synced = True
            told = _keys(batch.published)
            self._drop(slot, known.until.keys() - told)
            self._hold(slot, told, _TOLD)
        else:
            self._drop(slot, _keys(batch.evicted))
            self._hold(
                slot,
                _keys(batch.published),
                _TOLD if known.is_synced else self._expire_at(slot, batch, now),
            )
        self._bound()
        return known.is_synced

    def _expire_at(self, slot: int, batch: EventBatch, now: float) -> float:
        """Let a batch's content expire while batches are missing: it is true now, and no later
        batch may tell when it ends.
        """
        at = now + self._believed_seconds
        self._expiries.append(_Expiry(at, slot, self._known[slot], tuple(_keys(batch.published))))
        return at

    def _doubt(self, slot: int, now: float) -> None:
        """Let earlier content expire unless it is reported again, because batches are missing."""
        known = self._known[slot]
        known.is_synced = False
        at = now + self._believed_seconds
        for key, until in known.until.items():
            if until == _TOLD:
                known.until[key] = at
        self._expiries.append(_Expiry(at, slot, known, None))

    def believe(self, slot: int, keys: Sequence[int], num_matched: int, now: float) -> None:
        """Believe that these blocks of a prompt sent there will exist.

        `num_matched` of them were believed already: they are renewed only if the last one is about
        to expire.
        """
        until = self._known[slot].until
        at = now + self._believed_seconds
        renewed_before = now + 0.75 * self._believed_seconds
        if num_matched and until.get(keys[num_matched - 1], 0.0) >= renewed_before:
            keys = keys[num_matched:]
        new = tuple(key for key in self._kept(keys) if until.get(key, 0.0) < renewed_before)
        if new:
            self._hold(slot, new, at)
            self._expiries.append(_Expiry(at, slot, self._known[slot], new))
        self._bound()

    def expire(self, now: float) -> None:
        """Remove expired beliefs."""
        while self._expiries and self._expiries[0].at <= now:
            _, slot, known, keys = self._expiries.popleft()
            if self._known.get(slot) is known:
                until = known.until
                self._drop(
                    slot,
                    [
                        key
                        for key in (until if keys is None else keys)
                        if until.get(key, _TOLD) <= now
                    ],
                )

    def levels(self, keys: Sequence[int], most: int = MOST_LEVELS) -> list[Level]:
        """Return the holders of a chain by length, from its beginning: ever more blocks, ever fewer
        holders.

        Returns [] without holders, and at most `most` levels: finer differences are ignored. Blocks
        are looked up by bisection, as if a replica that holds a block held all earlier ones.
        """
        places = self._places(keys)
        found: list[Level] = []
        get = self._holders.get
        last = len(places) - 1
        first = 0
        step = -(-len(places) // most)
        holders = get(keys[places[0]], 0) if places else 0
        while holders:
            low = first
            high = last
            if get(keys[places[last]], 0) & holders == holders:
                low = last
            while high - low > 1:
                middle = (low + high) // 2
                if get(keys[places[middle]], 0) & holders == holders:
                    low = middle
                else:
                    high = middle
            found.append(Level(places[low] + 1, holders))
            if low == last:
                break
            first = min(low + step, last)
            holders &= get(keys[places[first]], 0)
        return found

    def deepest(self, keys: Sequence[int], most: int = MOST_LEVELS) -> list[Level]:
        """Return the last state along a chain that each replica has, like `levels`.

        Earlier states need not exist. The deepest of all is exact; others in the same of `most`
        parts of the chain count as the first one there.
        """
        found: list[Level] = []
        seen = 0
        step = max(1, -(-len(keys) // most))
        for start in reversed(range(0, len(keys), step)):
            some = enumerate(map(self._holders.get, keys[start : start + step]), start + 1)
            there = [(end, holders) for end, holders in some if holders]
            if there and not found:
                end, seen = there.pop()
                found.append(Level(end, seen))
            before = seen
            for _, holders in there:
                seen |= holders
            if seen != before:
                found.append(Level(there[0][0], seen))
        return found[::-1]

    def _places(self, keys: Sequence[int]) -> Sequence[int]:
        """Return the indices of keys that are remembered if reported."""
        return (
            range(len(keys))
            if not self._coarse
            else [i for i, key in enumerate(keys) if not key & self._coarse]
        )

    def reach(self, keys: Sequence[int]) -> int:
        """Count the blocks of a chain, from its beginning, that any replica reported; by bisection
        as in `levels`.
        """
        places = self._places(keys)
        holders = self._holders
        held = bisect.bisect_left(places, True, key=lambda index: keys[index] not in holders)
        return places[held - 1] + 1 if held else 0

    def keys_of(self, slot: int) -> dict[int, bool]:
        """Return the keys that a replica is believed to hold, and whether it reported each."""
        return {
            key: until == _TOLD
            for key, until in self._known[slot].until.items()
            if not key & self._coarse
        }

    def num_bytes(self) -> int:
        """Compute the memory of beliefs and expiries, object by object: walks through all of it."""
        tables: list[Mapping[int, object]] = [
            self._holders,
            *(known.until for known in self._known.values()),
        ]
        parts: list[object] = [*(one for table in tables for one in table), *self._holders.values()]
        parts += [expiry.keys for expiry in self._expiries if expiry.keys is not None]
        sizes = {id(one): sys.getsizeof(one) for one in parts}
        return sum(map(sys.getsizeof, tables)) + sum(sizes.values())

    def check(self) -> None:
        """Recompute the map from the knowledge about each replica; raise AssertionError on any
        difference.
        """
        holders: dict[int, int] = {}
        for slot, known in self._known.items():
            for key in known.until:
                holders[key] = holders.get(key, 0) | 1 << slot
        assert holders == self._holders
        assert self.num_entries == sum(len(known.until) for known in self._known.values())

    def _kept(self, keys: Iterable[int]) -> Iterator[int]:
        coarse = self._coarse
        return (key for key in keys if not key & coarse)

    def _hold(self, slot: int, keys: Iterable[int], until: float) -> None:
        bit = 1 << slot
        held = self._known[slot].until
        holders = self._holders
        before = len(held)
        for key in self._kept(keys):
            if key not in held:
                others = holders.get(key)
                holders[key] = bit if others is None else others | bit
            held[key] = until
        self.num_entries += len(held) - before

    def _drop(self, slot: int, keys: Iterable[int]) -> None:
        bit = 1 << slot
        held = self._known[slot].until
        holders = self._holders
        before = len(held)
        for key in keys:
            if held.pop(key, None) is not None:
                others = holders[key] ^ bit
                if others:
                    holders[key] = others
                else:
                    del holders[key]
        self.num_entries -= before - len(held)

    def _forget(self, slot: int) -> None:
        self._drop(slot, list(self._known[slot].until))
        self._known[slot] = _Known()

    def _bound(self) -> None:
        """Keep within `max_entries`, one slot at a time."""
        if self._unswept:
            slot = self._unswept.pop()
            if slot in self._known:
                self._drop(slot, [key for key in self._known[slot].until if key & self._coarse])
        elif self.num_entries > self._max_entries:
            self._coarse = 2 * self._coarse + 1
            self._unswept = list(self._known)


def _keys(data: bytes) -> list[int]:
    if len(data) % KEY_BYTES:
        raise ConfigError(f"{len(data)} bytes are no keys of {KEY_BYTES} bytes each")
    keys: list[int] = np.frombuffer(data, dtype="<u8").tolist()
    return keys
