"""Beliefs about each replica's cache: a bounded map from block keys to replicas that hold them.

Replicas are numbered by slots. The holders of a block are stored as an integer with one bit per
slot. An AND of two integers thus finds the common holders, for any number of replicas.

Beliefs come from the replicas' events, which arrive in order. Prompts sent to a replica add beliefs
that expire. If events are missing, all reported content gets an expiry too, until the replica has
reported everything again. A wrong belief only costs time.

Recurrent states have their own keys (`hashing.state_hash`), and are stored in the same way.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
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

_TOLD = math.inf  # Reported content does not expire.
MOST_LEVELS = 32
_ROOM = 4  # The map keeps one more bit of keys if it could hold four times its entries.


class Level(NamedTuple):
    """A prefix of a chain and its holders.

    Attributes:
        num_blocks: Length of the prefix in blocks.
        holders: Integer with the bits of the slots that hold the prefix.
    """

    num_blocks: int
    holders: int


class _Known:
    """Knowledge about one replica.

    Attributes:
        until: Expiry of each key that the replica is believed to hold.
        cursor: Last batch that was applied or seen.
        is_synced: True if no batch is missing.
        is_complete: False if keys that were not kept must be reported again.
    """

    __slots__ = ("cursor", "is_complete", "is_synced", "until")

    def __init__(self) -> None:
        self.until: dict[int, float] = {}
        self.cursor = NOTHING_KNOWN
        self.is_synced = False
        self.is_complete = True


class _Expiry(NamedTuple):
    """A time at which beliefs end unless they were renewed.

    Attributes:
        at: Time of the expiry.
        slot: Slot of the replica.
        known: Knowledge about the replica.
        keys: The keys; None for everything that the replica has not reported again.
    """

    at: float
    slot: int
    known: _Known
    keys: tuple[int, ...] | None


class Residency:
    """Beliefs about the replicas in slots 0, 1, ... Not thread-safe.

    Args:
        max_entries: Most (replica, block) pairs. Above this number, the map keeps only blocks whose
            keys end with one more zero bit. That is half of the blocks, the same ones for all
            replicas, and the others are dropped gradually. Matches become less precise, but no
            prefix is forgotten. Keys of states end with 8 zero bits, so states are dropped only
            after 255 of 256 blocks. Below a quarter of this number, it keeps twice as many blocks
            again, and asks all replicas for their content.
        believed_seconds: Lifetime of a belief that the replica has not reported.
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
        self._expiries: deque[_Expiry] = deque()  # ordered, because all lifetimes are equal
        self._coarse = 0  # Keys with any of these bits are not looked up.
        # Keys with any of these bits are dropped. It has one bit less than `_coarse` until all
        # replicas have reported their content again.
        self._dropped = 0
        self._unswept: list[int] = []  # slots that may still hold such keys
        self.num_entries = 0

    def open(self, slot: int) -> None:
        """Add a replica that holds nothing, in a free slot."""
        self._known[slot] = _Known()

    def close(self, slot: int) -> None:
        """Remove a replica and all beliefs about it."""
        self._forget(slot)
        del self._known[slot]

    def cursor(self, slot: int) -> Cursor:
        """Return the position from which to poll events; NOTHING_KNOWN if content is missing."""
        known = self._known[slot]
        return known.cursor if known.is_synced and known.is_complete else NOTHING_KNOWN

    def apply(self, slot: int, batch: EventBatch, now: float) -> bool:
        """Apply a batch; return False if earlier batches are missing. Old batches are ignored."""
        known = self._known[slot]
        if batch.epoch != known.cursor.epoch:  # A new process has an empty cache.
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
            known.is_synced = known.is_complete = True
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
        """Let a batch's content expire, because batches are missing; return its expiry."""
        # The content is true now, but a missing later batch may have evicted it.
        at = now + self._believed_seconds
        self._expiries.append(_Expiry(at, slot, self._known[slot], tuple(_keys(batch.published))))
        return at

    def _doubt(self, slot: int, now: float) -> None:
        """Let reported content expire unless it is reported again, because batches are missing."""
        known = self._known[slot]
        known.is_synced = False
        at = now + self._believed_seconds
        for key, until in known.until.items():
            if until == _TOLD:
                known.until[key] = at
        self._expiries.append(_Expiry(at, slot, known, None))

    def believe(self, slot: int, keys: Sequence[int], num_matched: int, now: float) -> None:
        """Record that a replica will hold the blocks of a prompt sent to it.

        Args:
            slot: Slot of the replica.
            keys: Keys of the prompt's blocks.
            num_matched: Number of leading blocks that were believed before. They are renewed only
                if the last one will expire soon.
            now: Monotonic time in seconds.
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
        """Return prefixes of a chain with their holders, each longer and with fewer holders.

        Returns [] if no replica holds the first block. There are at most `most` levels, so small
        differences between replicas are ignored. The search is a bisection. It assumes that a
        replica with a block has all earlier ones.
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
        """Return the last recurrent state on a chain that each replica holds, like `levels`.

        Earlier states need not be held. The position of the deepest state is exact. The chain is
        divided into `most` parts, and in each part all other states count at the position of the
        first held one.
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
        """Return the indices of the keys that are looked up."""
        return (
            range(len(keys))
            if not self._coarse
            else [i for i, key in enumerate(keys) if not key & self._coarse]
        )

    def reach(self, keys: Sequence[int]) -> int:
        """Return the length in blocks of the longest prefix that any replica holds."""
        places = self._places(keys)
        holders = self._holders
        held = bisect.bisect_left(places, True, key=lambda index: keys[index] not in holders)
        return places[held - 1] + 1 if held else 0

    def _kept(self, keys: Iterable[int]) -> Iterator[int]:
        dropped = self._dropped
        return (key for key in keys if not key & dropped)

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
        """Shrink the map towards `max_entries`, one slot per call, or let it grow again."""
        if self._unswept:
            slot = self._unswept.pop()
            if slot in self._known:
                self._drop(slot, [key for key in self._known[slot].until if key & self._dropped])
        elif self.num_entries > self._max_entries:
            if self._dropped == self._coarse:
                self._coarse = 2 * self._coarse + 1
            self._dropped = self._coarse
            self._unswept = list(self._known)
        elif self._dropped != self._coarse:
            if all(known.is_complete for known in self._known.values()):
                self._coarse = self._dropped
        elif self._coarse and _ROOM * self.num_entries < self._max_entries:
            self._dropped = self._coarse >> 1
            for known in self._known.values():
                known.is_complete = False


def _keys(data: bytes) -> list[int]:
    if len(data) % KEY_BYTES:
        raise ConfigError(
            f"{len(data)} bytes of keys must be a multiple of the key size, {KEY_BYTES}"
        )
    keys: list[int] = np.frombuffer(data, dtype="<u8").tolist()
    return keys
