"""What each replica is believed to hold: a bounded map from keys of blocks to the replicas that
have them.

Replicas are numbers here, their slots. The holders of a block are one integer with a bit for each
slot, so that "who holds all blocks up to here" is an `and` of two integers, however many replicas
there are.

Beliefs come from the replicas' events, in order and without gaps, or from what was sent there and
expires. After a gap all that a replica told becomes such a belief, until it has told everything
anew. A wrong belief costs time only.

States have keys beside those of the blocks they are behind (`hashing.state_hash`), and are held as
these are.
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
from kvboost_edge.serve_ray.routing.records import KEY_BYTES, NOTHING_KNOWN, Cursor, EventBatch

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
    """Of one replica.

    until       keys it is believed to hold -> until when
    cursor      the last batch that was applied, or seen
    is_synced   no batch is missing
    """

    __slots__ = ("cursor", "is_synced", "until")

    def __init__(self) -> None:
        self.until: dict[int, float] = {}
        self.cursor = NOTHING_KNOWN
        self.is_synced = False


class _Expiry(NamedTuple):
    """At `at` the beliefs in `keys` end that were not renewed; None: all of that replica that it
    did not tell since.
    """

    at: float
    slot: int
    known: _Known
    keys: tuple[int, ...] | None


class Residency:
    """Beliefs about the replicas in slots 0, 1, ... Not for several threads at once.

    max_entries        most (replica, block) pairs. With more, blocks whose key has one more zero
                       bit at its end are kept alone: half of them, the same ones for all replicas,
                       so that matches lose precision and nothing is forgotten from a prompt's
                       beginning. The others go little by little; states, of which 8 bits are zero,
                       when one block in 256 is left
    believed_seconds   so long a belief lasts that no replica told
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
        """Blocks that somebody is believed to hold."""
        return len(self._holders)

    def open(self, slot: int) -> None:
        """A replica that holds nothing, in a free slot."""
        self._known[slot] = _Known()

    def close(self, slot: int) -> None:
        """A replica is gone, and all that was believed of it."""
        self._forget(slot)
        del self._known[slot]

    def cursor(self, slot: int) -> Cursor:
        """From where to ask the replica on; NOTHING_KNOWN where batches are missing."""
        known = self._known[slot]
        return known.cursor if known.is_synced else NOTHING_KNOWN

    def apply(self, slot: int, batch: EventBatch, now: float) -> bool:
        """Believe a batch; False where others are missing before it. Repeated and late ones change
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
        """What a replica tells while batches are missing is true now, and no later batch may say
        when it ends.
        """
        at = now + self._believed_seconds
        self._expiries.append(_Expiry(at, slot, self._known[slot], tuple(_keys(batch.published))))
        return at

    def _doubt(self, slot: int, now: float) -> None:
        """Batches are missing: what was told before them expires unless it is told again."""
        known = self._known[slot]
        known.is_synced = False
        at = now + self._believed_seconds
        for key, until in known.until.items():
            if until == _TOLD:
                known.until[key] = at
        self._expiries.append(_Expiry(at, slot, known, None))

    def believe(self, slot: int, keys: Sequence[int], num_matched: int, now: float) -> None:
        """These blocks of a prompt are about to be there: it was sent there. `num_matched` were
        believed to be: they are looked at only if the last of them is about to expire.
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
        """End the beliefs whose time is over."""
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
        """Who holds how much of a chain, from its beginning: ever more blocks, ever fewer holders;
        [] if nobody does. At most `most` levels: finer differences between replicas are that part
        of the chain.

        Blocks are looked up by halving, as if a replica that holds a block held all before it.
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
        """Of the states behind a chain's blocks, which is the last that each replica has: as
        `levels`, where nobody need have those before it. The deepest of all is exact; others in the
        same of `most` parts of the chain count as the first one there.
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
        """Which of some keys are remembered if anybody told of them."""
        return (
            range(len(keys))
            if not self._coarse
            else [i for i, key in enumerate(keys) if not key & self._coarse]
        )

    def reach(self, keys: Sequence[int]) -> int:
        """How many blocks of a chain somebody told of, whoever it was, from its beginning; looked
        up as `levels`.
        """
        places = self._places(keys)
        holders = self._holders
        held = bisect.bisect_left(places, True, key=lambda index: keys[index] not in holders)
        return places[held - 1] + 1 if held else 0

    def keys_of(self, slot: int) -> dict[int, bool]:
        """What a replica is believed to hold, and whether it told so."""
        return {
            key: until == _TOLD
            for key, until in self._known[slot].until.items()
            if not key & self._coarse
        }

    def num_bytes(self) -> int:
        """Memory of what is believed and of what expires, object by object: walks through all of
        it.
        """
        tables: list[Mapping[int, object]] = [
            self._holders,
            *(known.until for known in self._known.values()),
        ]
        parts: list[object] = [*(one for table in tables for one in table), *self._holders.values()]
        parts += [expiry.keys for expiry in self._expiries if expiry.keys is not None]
        sizes = {id(one): sys.getsizeof(one) for one in parts}
        return sum(map(sys.getsizeof, tables)) + sum(sizes.values())

    def check(self) -> None:
        """Recompute the map from what is known of each replica; AssertionError on any
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
        """Keep to `max_entries`: one slot's worth of work at a time."""
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
