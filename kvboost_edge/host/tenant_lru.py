"""Bounded LRU cache for several tenants. No tenant can evict another tenant's values."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

__all__ = ["TenantLRU"]

_MAX_ROOT_BYTES = 1 << 20
_MAX_BYTES = 64 << 20
_MAX_OWNERS = 4096
_ROOT_BYTES = 1000  # approximate size of the Python objects of a root

V = TypeVar("V")


class _Entry(NamedTuple, Generic[V]):
    value: V
    size: int


class _Root(Generic[V]):
    """Values of a root by key, with their sizes, least recently used first."""

    def __init__(self, owner: Hashable) -> None:
        self.owner = owner
        self.entries: OrderedDict[Hashable, _Entry[V]] = OrderedDict()
        self.num_bytes = 0


class _Owner:
    """Roots of a tenant, least recently used first."""

    def __init__(self) -> None:
        self.roots: OrderedDict[Hashable, None] = OrderedDict()
        self.num_bytes = 0


class TenantLRU(Generic[V]):
    """LRU cache of values by root and key. Thread-safe.

    A root belongs to a tenant (its owner) and a salt. A value is found only under its root.

    Evicts:

    - values stored more than `seconds` ago, even if they were used since;
    - the oldest values of a root that exceeds `max_root_bytes` or `max_root_values`;
    - if all values exceed `max_bytes`, the oldest values of the owner with the most bytes. An owner
      within its equal share loses nothing, however many salts others use;
    - beyond `max_owners`, all values of the least recently used owner.

    Args:
        max_root_bytes: Maximum bytes of a root.
        max_bytes: Maximum bytes of all values.
        max_root_values: Maximum number of values of a root; None for no limit.
        max_owners: Maximum number of tenants.
        root_bytes: Bytes counted for each root in addition to its values.
        seconds: Lifetime of a value; None for no limit.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        max_root_bytes: int = _MAX_ROOT_BYTES,
        max_bytes: int = _MAX_BYTES,
        *,
        max_root_values: int | None = None,
        max_owners: int = _MAX_OWNERS,
        root_bytes: int = _ROOT_BYTES,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_root_bytes = max_root_bytes
        self.seconds = seconds
        self._max_bytes = max_bytes
        self._max_root_values = max_root_values
        self._max_owners = max_owners
        self._root_bytes = root_bytes
        self._clock = clock
        self._roots: dict[Hashable, _Root[V]] = {}
        self._owners: OrderedDict[Hashable, _Owner] = OrderedDict()
        self._kept_at: dict[tuple[Hashable, Hashable], float] = {}  # by root and key, oldest first
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Approximate size of all values in bytes."""
        return self._num_bytes

    def keep(self, owner: Hashable, root: Hashable, key: Hashable, value: V, size: int) -> bool:
        """Store a value of `size` bytes, replacing a value with the same key.

        Returns False, without storing the value, if it is too large for a root. The owner of a root
        must always be the same.
        """
        if size + self._root_bytes > min(self.max_root_bytes, self._max_bytes):
            return False
        with self._lock:
            self._expire()
            if root not in self._roots:
                self._roots[root] = _Root(owner)
                self._owners.setdefault(owner, _Owner())
                self._grow(self._roots[root], self._root_bytes)
            found = self._used(root)
            old = found.entries.pop(key, None)
            found.entries[key] = _Entry(value, size)
            self._kept_at.pop((root, key), None)
            self._kept_at[root, key] = self._clock()
            self._grow(found, size - (0 if old is None else old.size))
            self._evict(root)
            return True

    def resize(self, root: Hashable, key: Hashable, size: int) -> None:
        """Set the size of a value that has changed, if it is still stored."""
        with self._lock:
            found = self._roots.get(root)
            if found is not None and key in found.entries:
                old = found.entries[key]
                found.entries[key] = old._replace(size=size)
                self._grow(found, size - old.size)
                self._evict(root)

    def find(self, root: Hashable, key: Hashable) -> V | None:
        """Return the value of a key and mark it as used, or return None if it is not stored."""
        with self._lock:
            self._expire()
            found = None if root not in self._roots else self._roots[root].entries.get(key)
            if found is None:
                return None
            self._used(root).entries.move_to_end(key)
            return found.value

    def peek(self, root: Hashable, key: Hashable) -> V | None:
        """Return the value of a key without marking it as used, or None if it is not stored."""
        with self._lock:
            self._expire()
            found = None if root not in self._roots else self._roots[root].entries.get(key)
            return None if found is None else found.value

    def values(self, root: Hashable) -> list[V]:
        """Return the values of a root, least recently used first."""
        with self._lock:
            self._expire()
            found = self._roots.get(root)
            return [] if found is None else [entry.value for entry in found.entries.values()]

    def drop(self, root: Hashable, key: Hashable) -> bool:
        """Remove the value of a key, and return whether it was stored."""
        with self._lock:
            self._expire()
            if root not in self._roots or key not in self._roots[root].entries:
                return False
            self._drop(root, key)
            return True

    def forget(self, *roots: Hashable) -> None:
        """Remove all values of these roots."""
        with self._lock:
            for root in roots:
                if root in self._roots:
                    self._forget(root)

    def clear(self) -> None:
        """Remove all values."""
        with self._lock:
            for root in list(self._roots):
                self._forget(root)

    def expire(self) -> None:
        """Remove expired values. Reading and storing values does this too."""
        with self._lock:
            self._expire()

    def _expire(self) -> None:
        if self.seconds is None:
            return
        before = self._clock() - self.seconds
        while self._kept_at and next(iter(self._kept_at.values())) < before:
            self._drop(*next(iter(self._kept_at)))

    def _evict(self, root: Hashable) -> None:
        """Evict values until all limits hold, after a root has grown."""
        found = self._roots[root]
        most = self._max_root_values
        while found.num_bytes > self.max_root_bytes or (most and len(found.entries) > most):
            self._drop_oldest(root)
        while self._num_bytes > self._max_bytes:
            largest = max(self._owners.values(), key=lambda one: one.num_bytes)
            self._drop_oldest(next(iter(largest.roots)))
        while len(self._owners) > self._max_owners:
            for one in list(next(iter(self._owners.values())).roots):
                self._forget(one)

    def _used(self, root: Hashable) -> _Root[V]:
        found = self._roots[root]
        owner = self._owners[found.owner]
        owner.roots[root] = None
        owner.roots.move_to_end(root)
        self._owners.move_to_end(found.owner)
        return found

    def _grow(self, root: _Root[V], num_bytes: int) -> None:
        root.num_bytes += num_bytes
        self._owners[root.owner].num_bytes += num_bytes
        self._num_bytes += num_bytes

    def _drop_oldest(self, root: Hashable) -> None:
        self._drop(root, next(iter(self._roots[root].entries)))

    def _drop(self, root: Hashable, key: Hashable) -> None:
        found = self._roots[root]
        self._grow(found, -found.entries.pop(key).size)
        del self._kept_at[root, key]
        if not found.entries:
            self._forget(root)

    def _forget(self, root: Hashable) -> None:
        found = self._roots.pop(root)
        for key in found.entries:
            del self._kept_at[root, key]
        owner = self._owners[found.owner]
        owner.roots.pop(root, None)
        owner.num_bytes -= found.num_bytes
        self._num_bytes -= found.num_bytes
        if not owner.roots:
            del self._owners[found.owner]
