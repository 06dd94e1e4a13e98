"""The replicas that Ray tells its routers of, for the ingresses of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Members", "tell_members", "watch_members"]

Members = Mapping[str, Mapping[str, Any]]

_lock = threading.Lock()
_members: dict[str, Members] = {}
_watchers: dict[str, Callable[[Members], frozenset[str]]] = {}


def watch_members(ingress: str, watcher: Callable[[Members], frozenset[str]] | None) -> None:
    """Have `watcher` told of all replicas and their metadata, now if they are known and whenever they change; it says
    which of them may be used. It is called in any thread. None: nobody watches any more."""
    with _lock:
        if watcher is None:
            _watchers.pop(ingress, None)
            _members.pop(ingress, None)
            return
        _watchers[ingress] = watcher
        known = _members.get(ingress)
    if known is not None:
        watcher(known)


def tell_members(ingress: str, members: Members) -> frozenset[str]:
    """All replicas of an ingress as of now; those that may be used. Without a watcher, none is refused."""
    with _lock:
        _members[ingress] = members
        watcher = _watchers.get(ingress)
    return frozenset(members) if watcher is None else watcher(members)
