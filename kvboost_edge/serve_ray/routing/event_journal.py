"""A replica's journal of cache events. Several routers poll it, each at its own pace.

Events are stored in numbered batches for a while. A router that is too late receives the whole
content instead.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable

from kvboost_edge.kvcache.events import CacheEvents
from kvboost_edge.serve_ray.routing.cache_records import (
    KEY_BYTES,
    OUTSIDE_MASK,
    Cursor,
    EventBatch,
    Place,
)

__all__ = ["Journal"]


class Journal:
    """The event batches of one replica process. Not thread-safe.

    Args:
        max_changes: Maximum number of keys in stored batches.
        epoch: Number that identifies the process, never 0. None chooses a random number.
    """

    def __init__(self, max_changes: int = 100_000, epoch: int | None = None) -> None:
        self._epoch = epoch if epoch is not None else secrets.randbits(62) + 1
        self._max_changes = max_changes
        self._batches: deque[EventBatch] = deque()
        self._num_changes = 0
        self._serial = -1
        self._held: dict[Place, set[bytes]] = {place: set() for place in Place}

    def add(self, events: CacheEvents, place: Place = Place.POOL) -> EventBatch | None:
        """Add events from the engine's `take_cache_events`, or from `take_tier_events` for a tier.

        Returns the new batch, or None if nothing changed.
        """
        held = self._held[place]
        published = _keys(events.published, place)
        if events.is_whole:
            evicted = held - published
        else:
            # If an added and an evicted block share a key, the key is kept, because a false belief
            # only costs time.
            evicted = (_keys(events.evicted, place) - published) & held
        published -= held
        if not published and not evicted and self._serial >= 0:
            return None
        held |= published
        held -= evicted
        self._serial += 1
        batch = EventBatch(self._epoch, self._serial, False, b"".join(published), b"".join(evicted))
        self._batches.append(batch)
        self._num_changes += len(published) + len(evicted)
        while self._num_changes > self._max_changes:
            gone = self._batches.popleft()
            self._num_changes -= (len(gone.published) + len(gone.evicted)) // KEY_BYTES
        return batch

    def since(self, cursor: Cursor) -> list[EventBatch]:
        """Return the batches after a cursor, in order.

        Returns a single batch with the whole content if they are no longer stored, or if the cursor
        has another epoch.
        """
        if self._serial < 0:
            return []
        missing = self._serial - cursor.serial if cursor.epoch == self._epoch else -1
        if missing == 0:
            return []
        if 0 < missing <= len(self._batches):
            return list(self._batches)[-missing:]
        held = b"".join(key for keys in self._held.values() for key in keys)
        return [EventBatch(self._epoch, self._serial, True, held, b"")]


def _keys(prefix_hashes: Iterable[bytes], place: Place) -> set[bytes]:
    """Return the keys of the hashes that are reported for a place."""
    start = place * KEY_BYTES
    keys = {prefix_hash[start : start + KEY_BYTES] for prefix_hash in prefix_hashes}
    return keys if place is Place.POOL else {key for key in keys if not key[0] & OUTSIDE_MASK}
