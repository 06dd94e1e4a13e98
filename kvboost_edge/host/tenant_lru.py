"""What is remembered for several tenants in bounded memory, so that none of them can push out what
another one has.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["FairStore"]

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


class FairStore(Generic[V]):
    """Values by root and key; a root is a tenant's together with a salt, its owner the tenant. What
    one root keeps no other can find. Safe to use from any thread.

    Of a root's values those go first that were not used for longest. Where all together are too
    many, the owner of the most bytes gives, from the root that it did not use for longest: whoever
    keeps no more than an equal part loses nothing to others, however many salts they use. Of more
    than 4096 owners the one that came longest ago is forgotten.

    max_root_bytes, max_bytes    of one root's values, and of all
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
        """That all values take, about."""
        return self._num_bytes

    def keep(self, owner: bytes, root: bytes, key: Hashable, value: V, size: int) -> None:
        """Remember a value of `size` bytes; the latest of a key counts. One that is too large for a
        root is not kept. A root has the same owner each time.
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
        """What was kept of a key, which counts as used now; or None."""
        with self._lock:
            found = None if root not in self._roots else self._roots[root].values.get(key)
            if found is None:
                return None
            self._used(root).values.move_to_end(key)
            return found[0]

    def forget(self, *roots: bytes) -> None:
        """Forget all values of these roots."""
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
