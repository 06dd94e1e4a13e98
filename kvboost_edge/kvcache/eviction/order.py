"""Eviction order of cached entries: a segmented LRU with an adaptive share.

The adaptation follows ARC (Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
FAST 2003). An entry is a block in the pool or a record in a tier. Entries are in one of three
queues, ordered from least to most recently used:

- Entries used once. While this queue is longer than its share, its oldest entry is evicted first.
- Entries used again. If the first queue is within its share, the oldest entry of both queues is
  evicted.
- Retained entries. An owner's retained entries are evicted after its other entries. An owner can
  retain at most as many entries as its floor. Any excess counts as used again.

The share starts at a tenth of the capacity and can grow to all of it, which is plain LRU. It grows
when a missed entry had been evicted after a single use. It shrinks when a missed entry had been
evicted after repeated use. Data that is read only once therefore never flushes the cache. Workloads
that return to all their data quickly converge to plain LRU.

An optional recency window treats each owner's most recent entries like retained ones. An entry that
leaves the window joins the queue of its rank as if used at that moment.

Half of the capacity is divided evenly among all owners with entries. Each owner's part is its
floor. Entries within a floor are not evicted for other owners while any owner exceeds its floor. If
no owner does, the oldest entry is evicted, retained or not.

Entries of a chain are added from tail to head, and each use of an entry also uses its ancestors. An
ancestor is therefore never evicted before its descendants.

Adding, using or evicting an entry takes O(log owners). An owner's first and last entry and the
eviction of retained entries take O(owners).
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["AGAIN", "ONCE", "RETAINED", "CachedOrder"]

ONCE, AGAIN, RETAINED = range(3)
"""Usage rank of an entry: used once, used again, or retained."""

K = TypeVar("K", bound=Hashable)

_NEVER = sys.maxsize
# At least a tenth of the capacity is kept for entries used once, to give them time for a second
# use.
_LEAST_SHARE = 10


class _Queue(OrderedDict[K, int]):
    """Entries of one owner and rank: key -> time of the last use, oldest first."""

    def __init__(self, line: _Line[K], owner: bytes) -> None:
        super().__init__()
        self.line = line
        self.owner = owner

    @property
    def first(self) -> int:
        """Time of the oldest entry's last use."""
        return next(iter(self.values()))


class _Line(Generic[K]):
    """Queues of all owners for one usage rank.

    Attributes:
        heap: (time, owner) for each listed owner. The time is a lower bound on the last use of its
            oldest entry, corrected when it reaches the top.
        listed: owners in the heap. Owners within their floor are removed, and `enlist` adds them
            back.
        length: number of entries in all queues.
        queues: queues by owner.
    """

    __slots__ = ("heap", "length", "listed", "queues")

    def __init__(self) -> None:
        self.queues: dict[bytes, _Queue[K]] = {}
        self.heap: list[tuple[int, bytes]] = []
        self.listed: set[bytes] = set()
        self.length = 0

    def enlist(self, owner: bytes) -> None:
        """Add an owner to the heap if it has entries."""
        queue = self.queues.get(owner)
        if queue and owner not in self.listed:
            self.listed.add(owner)
            heapq.heappush(self.heap, (queue.first, owner))

    def oldest(self, counts: dict[bytes, int], floor: int) -> _Queue[K] | None:
        """Return the queue with the oldest entry among owners with more than `floor` entries."""
        heap = self.heap
        while heap:
            stamp, owner = heap[0]
            queue = self.queues.get(owner)
            if not queue or counts[owner] <= floor:
                heapq.heappop(heap)
                self.listed.remove(owner)
                continue
            first = queue.first
            if first == stamp:
                return queue
            heapq.heapreplace(heap, (first, owner))
        return None

    def second_oldest(self) -> int:
        """Return a lower bound on the oldest entry of all owners but the first in the heap."""
        return min([stamp for stamp, _ in self.heap[1:3]], default=_NEVER)


_Run = tuple[_Queue[K], int, int]
"""Entries to evict together: (queue, exclusive bound on the last use, maximum number)."""


class CachedOrder(Generic[K]):
    """Eviction order of entries from several owners, as described in the module docstring.

    Example with capacity 12: owners a and b have 5 entries each, all used once. The floor is 12 //
    2 // 2 = 3. If c takes 6 entries, the first four are the two oldest entries of a and of b, which
    are then at their floors. The last two are the oldest remaining entries of any owner.

    Args:
        capacity: maximum number of entries.
        window: number of entries in each owner's recency window, effectively at most its floor. 0
            disables the window.

    Attributes:
        once_share: target number of entries used once. Any excess is evicted before all other
            entries.
    """

    __slots__ = (
        "_again",
        "_capacity",
        "_counts",
        "_evicted",
        "_floor",
        "_lines",
        "_num_guarded",
        "_once",
        "_recent",
        "_retained",
        "_stamps",
        "_where",
        "_window",
        "once_share",
    )

    def __init__(self, capacity: int, window: int = 0) -> None:
        self._capacity = capacity
        self.once_share = capacity // _LEAST_SHARE
        self._window = window
        # Recency window of each owner, oldest entry first: key -> rank of the entry outside the
        # window.
        self._recent: dict[bytes, OrderedDict[K, int]] = {}
        self._once: _Line[K] = _Line()
        self._again: _Line[K] = _Line()
        # The heap of this line is not used, because evictions of retained entries are rare.
        self._retained: _Line[K] = _Line()
        self._lines = (self._once, self._again, self._retained)
        self._where: dict[K, _Queue[K]] = {}
        # Number of entries by owner. Owners without entries are not listed.
        self._counts: dict[bytes, int] = {}
        self._floor = capacity // 2
        self._num_guarded = 0  # number of entries within their owners' floors
        self._evicted = [0, 0]  # recent evictions after a single use, and after repeated use
        self._stamps = itertools.count()

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def put(self, key: K, owner: bytes, *, again: int = ONCE) -> None:
        """Add an entry used now. `again` is its rank: ONCE, AGAIN or RETAINED."""
        if self._window and again != RETAINED:
            self._recent.setdefault(owner, OrderedDict())[key] = again
            again = RETAINED
        line = self._lines[again]
        queue = self._append(line, key, owner)
        count = self._counts[owner] = self._counts.get(owner, 0) + 1
        if count == 1:
            self._update_floor()
        elif count <= self._floor:
            self._num_guarded += 1
        if count == self._floor + 1:  # the owner may have left the heaps while within its floor
            self._once.enlist(owner)
            self._again.enlist(owner)
        elif count > self._floor and again != RETAINED and owner not in line.listed:
            line.enlist(owner)
        if again == RETAINED:
            self._trim(queue)

    def _append(self, line: _Line[K], key: K, owner: bytes) -> _Queue[K]:
        queue = line.queues.get(owner)
        if queue is None:
            queue = line.queues[owner] = _Queue(line, owner)
        queue[key] = next(self._stamps)
        self._where[key] = queue
        line.length += 1
        return queue

    def _trim(self, queue: _Queue[K]) -> None:
        """Settle an owner's oldest retained entries that exceed its floor or its recency window."""
        while len(queue) > self._floor:
            self._settle(next(iter(queue)))
        recent = self._recent.get(queue.owner, ())
        while len(recent) > self._window:
            self._settle(next(iter(recent)))

    def demote(self, key: K) -> None:
        """Turn a retained entry into one used again now. Does nothing to other entries."""
        queue = self._where[key]
        if queue.line is self._retained and key not in self._recent.get(queue.owner, ()):
            self._settle(key)

    def _settle(self, key: K) -> None:
        """Move a retained or windowed entry to the line of its rank, as if used now."""
        owner = self._where[key].owner
        line = self._lines[self._leave_window(owner, key)]
        del self._where[key][key]
        self._retained.length -= 1
        self._append(line, key, owner)
        if self._counts[owner] > self._floor:
            line.enlist(owner)

    def _leave_window(self, owner: bytes, key: K) -> int:
        """Remove an entry from the window, and return its rank outside it, ONCE or AGAIN."""
        recent = self._recent.get(owner)
        return AGAIN if recent is None else recent.pop(key, AGAIN)

    def remove(self, key: K) -> None:
        """Remove an entry; raise KeyError for an unknown key."""
        queue = self._where.pop(key)
        del queue[key]
        self._leave_window(queue.owner, key)
        self._record_removed(queue, 1)

    def refresh(self, key: K) -> None:
        """Mark an entry as used now; raise KeyError for an unknown key."""
        queue = self._where[key]
        if self._window and queue.line is not self._retained:
            del queue[key]
            queue.line.length -= 1
            recent = self._recent.setdefault(queue.owner, OrderedDict())
            recent[key] = self._lines.index(queue.line)
            self._trim(self._append(self._retained, key, queue.owner))
            return
        queue[key] = next(self._stamps)
        queue.move_to_end(key)
        recent = self._recent.get(queue.owner, OrderedDict())
        if key in recent:
            recent.move_to_end(key)

    def take(self, count: int, owner: bytes) -> list[K]:
        """Evict up to `count` entries for an owner, and return them in eviction order."""
        count = min(count, len(self._where))
        if len(self._counts) == 1 and owner in self._counts:
            return self._take_own(count, owner)
        taken: list[K] = []
        for floor in (self._floor, 0):
            if len(taken) == count:
                break
            if not floor:  # no owner exceeds its floor any more, so the heaps are empty
                self._enlist_all()
            while len(taken) < count and (run := self._next_run(owner, floor)) is not None:
                taken += self._evict_run(run, count - len(taken))
        return taken

    def missed(self, *, once: int, again: int) -> None:
        """Adapt the share to the misses of evicted entries.

        Args:
            once: number of misses of entries evicted after a single use.
            again: number of misses of entries evicted after repeated use.
        """
        # A miss has more weight if evictions of its kind are rarer, by the square root of their
        # ratio. ARC uses the full ratio, which overreacts to a few misses. On a trace whose
        # once-used entries return later, it gets 1.4% fewer hits than LRU. Without any ratio, a
        # small pool does not adapt to a scan (3% more hits than LRU instead of 20%).
        of_once, of_again = (max(1, number) for number in self._evicted)
        step = once * max(1.0, (of_again / of_once) ** 0.5) - again * max(
            1.0, (of_once / of_again) ** 0.5
        )
        least = self._capacity // _LEAST_SHARE
        self.once_share = min(self._capacity, max(least, self.once_share + round(step)))

    def protected(self, owner: bytes) -> int:
        """Return how many entries of other owners are protected by their floors.

        They are evicted for this owner only as a last resort.
        """
        return self._num_guarded - min(self._counts.get(owner, 0), self._floor)

    def oldest_first(self) -> list[K]:
        """Return all entries in eviction order, ignoring floors and later uses."""
        once, again, retained = (
            sorted(
                ((stamp, key) for queue in line.queues.values() for key, stamp in queue.items()),
                reverse=True,
            )
            for line in self._lines
        )
        found: list[K] = []
        while once or again:
            from_once = once and (
                not again or len(once) > self.once_share or once[-1][0] < again[-1][0]
            )
            found.append((once if from_once else again).pop()[1])
        return found + [key for _, key in reversed(retained)]

    def _take_own(self, count: int, owner: bytes) -> list[K]:
        """Evict entries for the only owner. This common case needs no comparison of owners."""
        once, again, retained = (
            line.queues.get(owner) or _Queue(line, owner) for line in self._lines
        )
        taken: list[K] = []
        before = len(once), len(again), len(retained)
        for _ in range(count):
            from_once = once and (
                not again or len(once) > self.once_share or once.first < again.first
            )
            taken.append((once if from_once else again or retained).popitem(last=False)[0])
        for key in taken:
            del self._where[key]
            self._leave_window(owner, key)
        for queue, length in zip((once, again, retained), before, strict=True):
            self._count_evictions(queue, length - len(queue))
        return taken

    def _next_run(self, owner: bytes, floor: int) -> _Run[K] | None:
        """Return the next entries to evict from the owner itself or from owners above the floor."""
        once = self._oldest(self._once, owner, floor)
        if once is not None and self._once.length > self.once_share:
            queue, until, number = once
            return queue, until, min(number, self._once.length - self.once_share)
        again = self._oldest(self._again, owner, floor)
        if self._retained.length and (not floor or once is again is None):
            return self._last_run([run for run in (once, again) if run is not None], owner, floor)
        if once is None or again is None:
            return again if once is None else once
        if once[0].first < again[0].first:
            return once[0], min(once[1], again[0].first), once[2]
        return again[0], min(again[1], once[0].first), again[2]

    def _oldest(self, line: _Line[K], owner: bytes, floor: int) -> _Run[K] | None:
        """Return the next entries to evict from a line, or None."""
        if not line.length:
            return None
        own = line.queues.get(owner)
        found = line.oldest(self._counts, floor)
        if own and (found is None or own is found or own.first < found.first):
            until = (
                line.second_oldest() if own is found else _NEVER if found is None else found.first
            )
            return own, until, len(own)
        if found is None:
            return None
        until = min(line.second_oldest(), own.first) if own else line.second_oldest()
        return found, until, self._counts[found.owner] - floor

    def _last_run(self, runs: list[_Run[K]], owner: bytes, floor: int) -> _Run[K] | None:
        """Return the next entries to evict, which may be retained ones.

        An owner's retained entries qualify once it has no other entries. `runs` holds the
        candidates from the other lines.
        """
        for queue in self._retained.queues.values():
            count = self._counts[queue.owner]
            if queue and count == len(queue) and (count > floor or queue.owner == owner):
                runs.append((queue, _NEVER, count if queue.owner == owner else count - floor))
        if not runs:
            return None
        runs.sort(key=lambda run: run[0].first)
        queue, until, number = runs[0]
        return queue, min([until, *(other[0].first for other in runs[1:2])]), number

    def _evict_run(self, run: _Run[K], most: int) -> list[K]:
        queue, until, number = run
        keys: list[K] = []
        for key, stamp in itertools.islice(queue.items(), min(number, most)):
            if stamp >= until:
                break
            keys.append(key)
        for key in keys:
            del queue[key], self._where[key]
            self._leave_window(queue.owner, key)
        self._count_evictions(queue, len(keys))
        return keys

    def _count_evictions(self, queue: _Queue[K], number: int) -> None:
        if not number:
            return
        evicted = self._evicted
        evicted[queue.line is not self._once] += number
        if evicted[0] + evicted[1] > self._capacity:  # give less weight to older evictions
            evicted[:] = [evicted[0] // 2, evicted[1] // 2]
        self._record_removed(queue, number)

    def _record_removed(self, queue: _Queue[K], number: int) -> None:
        """Update counts and floors for `number` entries that left a queue."""
        owner = queue.owner
        floor = self._floor
        queue.line.length -= number
        before = self._counts[owner]
        if number < before:
            self._counts[owner] = before - number
            self._num_guarded -= min(before, floor) - min(before - number, floor)
            return
        del self._counts[owner]
        for line in self._lines:
            line.queues.pop(owner, None)
        self._recent.pop(owner, None)
        self._update_floor()

    def _update_floor(self) -> None:
        """Recompute the floor after the number of owners changed."""
        floor = self._capacity // 2 // max(1, len(self._counts))
        self._num_guarded = sum(min(count, floor) for count in self._counts.values())
        if floor < self._floor:
            self._floor = floor
            for queue in self._retained.queues.values():
                self._trim(queue)
            self._enlist_all()
        self._floor = floor

    def _enlist_all(self) -> None:
        for line in (self._once, self._again):
            for owner in line.queues:
                line.enlist(owner)
