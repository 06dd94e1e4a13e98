"""The replicas that Ray tells its routers of, for the ingresses of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Members", "tell_members", "usable_members", "watch_members"]

Members = Mapping[str, Mapping[str, Any]]

_lock = threading.Lock()
_members: dict[str, Members] = {}
_usable: dict[str, frozenset[str]] = {}
_watchers: dict[str, Callable[[Members], frozenset[str]]] = {}


def watch_members(ingress: str, watcher: Callable[[Members], frozenset[str]] | None) -> None:
    """Have `watcher` told of all replicas and their metadata, now if they are known and whenever
    they change; it says which of them may be used. It is called in any thread, by one at a time,
    and must not wait. None: nobody watches any more.
    """
    with _lock:
        if watcher is None:
            _watchers.pop(ingress, None)
            _members.pop(ingress, None)
            _usable.pop(ingress, None)
            return
        _watchers[ingress] = watcher
        if ingress in _members:
            _usable[ingress] = watcher(_members[ingress])


def tell_members(ingress: str, members: Members) -> None:
    """All replicas of an ingress as of now."""
    with _lock:
        _members[ingress] = members
        watcher = _watchers.get(ingress)
        _usable[ingress] = frozenset(members) if watcher is None else watcher(members)


def usable_members(ingress: str) -> frozenset[str]:
    """Those that may be used. Without a watcher none is refused: one that comes later may yet do
    so.
    """
    return _usable.get(ingress, frozenset())
