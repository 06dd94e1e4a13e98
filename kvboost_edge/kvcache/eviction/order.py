"""In which order cached things are given up, whatever they are: blocks of the pool, records of a
tier.

One rule: the least recently used goes first, and of what was used once only a share is kept. Two
lines make it, both oldest first: what was used once, and what was used again. While the first is
longer than its share its oldest entry goes, else the oldest of both. The share is learnt, between a
tenth of the capacity, where it begins, and all of it (plain LRU): it grows when something is missed
that was given up after one use, and shrinks when something is missed that had been used again, in
steps that weigh up how often each kind is given up. So what is read once and never again flushes
nothing, not even at first, and where all comes again later it is LRU soon.

A third line holds what is retained: it goes after all else of its owner, again the least recently
used first. An owner retains no more entries than its floor (below), the others count as used again:
so retaining decides which of an owner's entries are the last to go and takes nothing from those
that others are sure of.

An order may have a recency window: the entries of an owner that were put or used last, at most so
many, go like what is retained. One that leaves the window counts as used just then, once or again
as before.

Entries of one chain are put tail first, and whatever uses an entry uses all before it in its chain:
so an ancestor is never given up before its descendants.

Owners share the capacity: half of it is divided evenly among those that have entries, and below
that floor nobody's entries go to others while there are more. Where all are at their floors age
decides, whoever retains. The time to put, use or give up an entry does not grow with their number,
and by the logarithm with that of the owners; an owner's first entry, and its last, costs a look at
every owner, and so does giving up what is retained.
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
"""What an entry is: used once, used again, or retained."""

K = TypeVar("K", bound=Hashable)

_NEVER = sys.maxsize
_LEAST_SHARE = (
    10  # a tenth of the capacity stays for what was used once, so that a second use can come
)


class _Queue(OrderedDict[K, int]):
    """One owner's entries of one line: key -> when it was used, oldest first."""

    def __init__(self, line: _Line[K], owner: bytes) -> None:
        super().__init__()
        self.line = line
        self.owner = owner

    @property
    def first(self) -> int:
        """When its oldest entry was used."""
        return next(iter(self.values()))


class _Line(Generic[K]):
    """The queues of all owners, of what was used once, of what was used again or of what is
    retained.

    Attributes:
        heap: for each listed owner the time of its oldest entry, or an earlier one, which is
            corrected as it comes up.
        listed: the owners in the heap; one that has no more than the floor falls out, `enlist`
            brings it back.
    """

    __slots__ = ("heap", "length", "listed", "queues")

    def __init__(self) -> None:
        self.queues: dict[bytes, _Queue[K]] = {}
        self.heap: list[tuple[int, bytes]] = []
        self.listed: set[bytes] = set()
        self.length = 0

    def enlist(self, owner: bytes) -> None:
        """Let what the owner has here be found by `oldest`."""
        queue = self.queues.get(owner)
        if queue and owner not in self.listed:
            self.listed.add(owner)
            heapq.heappush(self.heap, (queue.first, owner))

    def oldest(self, counts: dict[bytes, int], floor: int) -> _Queue[K] | None:
        """Of the listed owners that have more than `floor` entries in all, the queue with the
        oldest one.
        """
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

    def behind_first(self) -> int:
        """A time before which no owner but the first of the heap has an entry here."""
        return min([stamp for stamp, _ in self.heap[1:3]], default=_NEVER)


_Run = tuple[_Queue[K], int, int]
"""What may be given up without asking again: of a queue, what was used before a time, at most so
many entries.
"""


class CachedOrder(Generic[K]):
    """Entries of several owners, see the head of the file.

    Example, capacity 12, owners a and b have 5 entries each, all used once: the floor is 12 // 2 //
    2 = 3. If c takes 6 it gets the oldest ones, but no more than two of either; of the last two it
    needs nobody is above the floor, so they are the oldest of all.

    Attributes:
        once_share: entries used once that are kept; the others go before anything that was used
            again.
        window: entries of each owner in its recency window, of which at most its floor go last.
    """

    __slots__ = (
        "_again",
        "_capacity",
        "_counts",
        "_floor",
        "_given_up",
        "_kept",
        "_lines",
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
        # Of each owner the entries in the window, oldest first: ONCE or AGAIN, for when they leave.
        self._recent: dict[bytes, OrderedDict[K, int]] = {}
        self._once: _Line[K] = _Line()
        self._again: _Line[K] = _Line()
        self._retained: _Line[K] = (
            _Line()
        )  # its heap is not used: there are few to look at, and seldom
        self._lines = (self._once, self._again, self._retained)
        self._where: dict[K, _Queue[K]] = {}
        self._counts: dict[bytes, int] = {}  # entries of each owner that has any
        self._floor = capacity // 2
        self._kept = 0  # entries of all owners up to their floors
        self._given_up = [0, 0]  # lately, after one use and after more
        self._stamps = itertools.count()

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def put(self, key: K, owner: bytes, *, again: int = ONCE) -> None:
        """An entry that is not there was used just now, for the first time (ONCE) or not (AGAIN),
        or is RETAINED.
        """
        if self._window and again != RETAINED:
            self._recent.setdefault(owner, OrderedDict())[key] = again
            again = RETAINED
        line = self._lines[again]
        queue = self._append(line, key, owner)
        count = self._counts[owner] = self._counts.get(owner, 0) + 1
        if count == 1:
            self._divide()
        elif count <= self._floor:
            self._kept += 1
        if count == self._floor + 1:  # its other queue may have fallen out of the list before
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
        """Release the least recently used entries that an owner retains beyond its floor, and those
        beyond its recency window.
        """
        while len(queue) > self._floor:
            self._settle(next(iter(queue)))
        recent = self._recent.get(queue.owner, ())
        while len(recent) > self._window:
            self._settle(next(iter(recent)))

    def demote(self, key: K) -> None:
        """An entry that is retained counts as used again just now; any other stays what and where
        it is.
        """
        queue = self._where[key]
        if queue.line is self._retained and key not in self._recent.get(queue.owner, ()):
            self._settle(key)

    def _settle(self, key: K) -> None:
        """Let an entry that is retained, or in the window, count as used just now."""
        owner = self._where[key].owner
        line = self._lines[self._leave_window(owner, key)]
        del self._where[key][key]
        self._retained.length -= 1
        self._append(line, key, owner)
        if self._counts[owner] > self._floor:
            line.enlist(owner)

    def _leave_window(self, owner: bytes, key: K) -> int:
        """Take an entry out of the window; return what it is without it, ONCE or AGAIN."""
        recent = self._recent.get(owner)
        return AGAIN if recent is None else recent.pop(key, AGAIN)

    def remove(self, key: K) -> None:
        """An entry leaves, for use or for good; KeyError if it is not there."""
        queue = self._where.pop(key)
        del queue[key]
        self._leave_window(queue.owner, key)
        self._left(queue, 1)

    def refresh(self, key: K) -> None:
        """An entry counts as used just now; KeyError if it is not there."""
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
        """Give up `count` entries for an owner, those to go first; no more than there are."""
        count = min(count, len(self._where))
        if len(self._counts) == 1 and owner in self._counts:
            return self._take_own(count, owner)
        taken: list[K] = []
        for floor in (self._floor, 0):
            if len(taken) == count:
                break
            if not floor:  # nobody has more than the floor: all are found again
                self._enlist_all()
            while len(taken) < count and (run := self._next_run(owner, floor)) is not None:
                taken += self._give_up(run, count - len(taken))
        return taken

    def missed(self, *, once: int, again: int) -> None:
        """So many entries were wanted that are gone, given up after one use or after more.

        What is seldom given up, and then wanted, counts for more: by the root of how many times
        more seldom. By the whole ratio (the rule of ARC) the share follows a few misses too far:
        1.4% fewer hits than LRU's on a trace in which what was used once comes again later; without
        it a scan is not noticed in a small pool (3% more hits than LRU's instead of 20%).
        """
        of_once, of_again = (max(1, number) for number in self._given_up)
        step = once * max(1.0, (of_again / of_once) ** 0.5) - again * max(
            1.0, (of_once / of_again) ** 0.5
        )
        least = self._capacity // _LEAST_SHARE
        self.once_share = min(self._capacity, max(least, self.once_share + round(step)))

    def protected(self, owner: bytes) -> int:
        """Entries that this owner gets only when there are no others: those of the others up to
        their floors.
        """
        return self._kept - min(self._counts.get(owner, 0), self._floor)

    def oldest_first(self) -> list[K]:
        """The order in which all would go if nobody had a floor and nothing came meanwhile."""
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
        """The same where all is the owner's: the usual case, with nobody to compare with."""
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
            self._gave_up(queue, length - len(queue))
        return taken

    def _next_run(self, owner: bytes, floor: int) -> _Run[K] | None:
        """Whose oldest entries go next: of those above the floor, or the asking owner's own."""
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
        """The same of one line."""
        if not line.length:
            return None
        own = line.queues.get(owner)
        found = line.oldest(self._counts, floor)
        if own and (found is None or own is found or own.first < found.first):
            until = (
                line.behind_first() if own is found else _NEVER if found is None else found.first
            )
            return own, until, len(own)
        if found is None:
            return None
        until = min(line.behind_first(), own.first) if own else line.behind_first()
        return found, until, self._counts[found.owner] - floor

    def _last_run(self, runs: list[_Run[K]], owner: bytes, floor: int) -> _Run[K] | None:
        """The same where what is retained may go: of owners that have nothing else. `runs` are
        those of the others.
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

    def _give_up(self, run: _Run[K], most: int) -> list[K]:
        queue, until, number = run
        keys: list[K] = []
        for key, stamp in itertools.islice(queue.items(), min(number, most)):
            if stamp >= until:
                break
            keys.append(key)
        for key in keys:
            del queue[key], self._where[key]
            self._leave_window(queue.owner, key)
        self._gave_up(queue, len(keys))
        return keys

    def _gave_up(self, queue: _Queue[K], number: int) -> None:
        if not number:
            return
        given_up = self._given_up
        given_up[queue.line is not self._once] += number
        if given_up[0] + given_up[1] > self._capacity:  # what was long ago counts for less and less
            given_up[:] = [given_up[0] // 2, given_up[1] // 2]
        self._left(queue, number)

    def _left(self, queue: _Queue[K], number: int) -> None:
        """So many entries of a queue are gone."""
        owner = queue.owner
        floor = self._floor
        queue.line.length -= number
        before = self._counts[owner]
        if number < before:
            self._counts[owner] = before - number
            self._kept -= min(before, floor) - min(before - number, floor)
            return
        del self._counts[owner]
        for line in self._lines:
            line.queues.pop(owner, None)
        self._recent.pop(owner, None)
        self._divide()

    def _divide(self) -> None:
        """The number of owners changed, and so the floor."""
        floor = self._capacity // 2 // max(1, len(self._counts))
        self._kept = sum(min(count, floor) for count in self._counts.values())
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
