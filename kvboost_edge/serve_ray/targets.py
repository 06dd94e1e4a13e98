"""Ray's router of an ingress: it sends a request where the ingress wants it to go. Ray calls it in the process of the
ingress, in a thread of its own, and keeps it up to date with the replicas there are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from kvboost_edge.serve_ray.messages import Asked

__all__ = ["TargetRouter", "watch_members"]

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


def _tell(ingress: str, members: Members) -> frozenset[str]:
    with _lock:
        _members[ingress] = members
        watcher = _watchers.get(ingress)
    return frozenset(members) if watcher is None else watcher(members)


class TargetRouter(RequestRouter):
    """Tries a request's `targets` in their order, then any other replica that may be used, the least busy first. What
    is asked of one replica (`Asked`) goes nowhere else.

    ingress   which of a process's ingresses this router belongs to, see `watch_members`
    """

    def initialize_state(self, ingress: str = "") -> None:
        self._ingress = ingress
        self._usable: frozenset[str] = frozenset()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray's replicas as of now."""
        found = {replica.replica_id.unique_id: replica.replica_metadata for replica in replicas}
        # First: requests that wait are sent from within the next call.
        self._usable = _tell(self._ingress, found)
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The targets that are there, each a rank of its own, then all others as one rank. What has no targets of its
        own may go anywhere."""
        targets: tuple[str, ...] = ()
        is_strict = False
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            targets = getattr(next(iter(pending_request.args), None), "targets", ())
            is_strict = isinstance(next(iter(pending_request.args), None), Asked)
        usable = {
            replica.replica_id.unique_id: replica
            for replica in candidate_replicas
            if replica.replica_id.unique_id in self._usable
        }
        ranks = [[usable.pop(name)] for name in targets if name in usable]
        return ranks if is_strict or not usable else [*ranks, list(usable.values())]
