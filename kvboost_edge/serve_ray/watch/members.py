"""The replicas that Ray reports to its routers, by ingress of this process."""

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
    """Call `watcher` with all replicas and their metadata, at once if known and after each change.

    Args:
        ingress: Name of the ingress.
        watcher: Function that returns the usable replicas. It is called on any thread, one call at
            a time, and must not block. None stops watching.
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
    """Set the current replicas of an ingress, and call its watcher."""
    with _lock:
        _members[ingress] = members
        watcher = _watchers.get(ingress)
        _usable[ingress] = frozenset(members) if watcher is None else watcher(members)


def usable_members(ingress: str) -> frozenset[str]:
    """Return the usable replicas of an ingress. Without a watcher, all are usable."""
    return _usable.get(ingress, frozenset())
