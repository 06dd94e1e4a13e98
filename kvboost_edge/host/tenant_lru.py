"""A bounded LRU store of several tenants. No tenant can evict the values of another one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["TenantLRU"]

_MAX_ROOT_BYTES = 1 << 20
_MAX_BYTES = 64 << 20
_MAX_OWNERS = 4096
_ROOT_BYTES = 1000  # about what Python's objects take around the values of a root

V = TypeVar("V")


class _Root(Generic[V]):
    """Values by key with their sizes, the one that was not used for longest first."""

    def __init__(self, owner: bytes) -> None:
        self.owner = owner
        self.values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self.num_bytes = 0


class _Owner:
    """The roots of a tenant, the one that was not used for longest first."""

    def __init__(self) -> None:
        self.roots: OrderedDict[bytes, None] = OrderedDict()
        self.num_bytes = 0


class TenantLRU(Generic[V]):
    """Values by root and key, least recently used first. Safe to use from any thread.

    A root belongs to a tenant and a salt; its owner is the tenant. Values of one root cannot be
    found under another one.

    Evicted are:
    - the oldest values of a root that has more than `max_root_bytes`;
    - where all values take more than `max_bytes`, the oldest root of the owner with the most bytes.
      So an owner with no more than an equal part loses nothing, however many salts others use;
    - beyond 4096 owners, the owner that was used least recently.
    """

    def __init__(self, max_root_bytes: int = _MAX_ROOT_BYTES, max_bytes: int = _MAX_BYTES) -> None:
        self._max_root_bytes = max_root_bytes
        self._max_bytes = max_bytes
        self._roots: dict[bytes, _Root[V]] = {}
        self._owners: OrderedDict[bytes, _Owner] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes that all values take, approximately."""
        return self._num_bytes

    def keep(self, owner: bytes, root: bytes, key: Hashable, value: V, size: int) -> None:
        """Keep a value of `size` bytes in place of an older one of its key.

        A value that is too large for a root is not kept. A root has the same owner each time.
        """
        if size + _ROOT_BYTES > min(self._max_root_bytes, self._max_bytes):
            return
        with self._lock:
            if root not in self._roots:
                self._roots[root] = _Root(owner)
                self._owners.setdefault(owner, _Owner())
                self._grow(self._roots[root], _ROOT_BYTES)
            found = self._used(root)
            old = found.values.pop(key, None)
            found.values[key] = value, size
            self._grow(found, size - (0 if old is None else old[1]))
            while found.num_bytes > self._max_root_bytes:
                self._drop_oldest(root)
            while self._num_bytes > self._max_bytes:
                most = max(self._owners.values(), key=lambda one: one.num_bytes)
                self._drop_oldest(next(iter(most.roots)))
            while len(self._owners) > _MAX_OWNERS:
                for one in list(next(iter(self._owners.values())).roots):
                    self._forget(one)

    def find(self, root: bytes, key: Hashable) -> V | None:
        """Return the value of a key, which counts as used now; None if there is none."""
        with self._lock:
            found = None if root not in self._roots else self._roots[root].values.get(key)
            if found is None:
                return None
            self._used(root).values.move_to_end(key)
            return found[0]

    def forget(self, *roots: bytes) -> None:
        """Drop all values of these roots."""
        with self._lock:
            for root in roots:
                if root in self._roots:
                    self._forget(root)

    def _used(self, root: bytes) -> _Root[V]:
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

    def _drop_oldest(self, root: bytes) -> None:
        found = self._roots[root]
        _, (_, size) = found.values.popitem(last=False)
        self._grow(found, -size)
        if not found.values:
            self._forget(root)

    def _forget(self, root: bytes) -> None:
        found = self._roots.pop(root)
        owner = self._owners[found.owner]
        owner.roots.pop(root, None)
        owner.num_bytes -= found.num_bytes
        self._num_bytes -= found.num_bytes
        if not owner.roots:
            del self._owners[found.owner]
