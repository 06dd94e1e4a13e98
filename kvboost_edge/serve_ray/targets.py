"""Ray's router of an ingress: it sends a request where the ingress wants it to go. Ray calls it in
the process of the ingress, in a thread of its own, and keeps it up to date with the replicas there
are.

Ray makes the class anew from a copy of this module's code, so nothing may be kept here; see
members.py.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from kvboost_edge.serve_ray.messages import ReplicaCall
from kvboost_edge.serve_ray.watch.members import tell_members, usable_members

__all__ = ["TargetRouter"]


class TargetRouter(RequestRouter):  # type: ignore[misc] # Ray's own types are not checked
    """Tries a request's `targets` in their order, then any other replica that may be used, the
    least busy first. What is asked of one replica (`ReplicaCall`) goes nowhere else.

    ingress   which of a process's ingresses this router belongs to, see `members.watch_members`
    """

    def initialize_state(self, ingress: str = "") -> None:
        self._ingress = ingress

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray's replicas as of now."""
        found = {replica.replica_id.unique_id: replica.replica_metadata for replica in replicas}
        # First: requests that wait are sent from within the next call.
        tell_members(self._ingress, found)
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The targets that are there, each a rank of its own, then all others as one rank. What has
        no targets of its own may go anywhere.
        """
        targets: tuple[str, ...] = ()
        is_strict = False
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            targets = getattr(next(iter(pending_request.args), None), "targets", ())
            is_strict = isinstance(next(iter(pending_request.args), None), ReplicaCall)
        allowed = usable_members(self._ingress)
        usable = {
            replica.replica_id.unique_id: replica
            for replica in candidate_replicas
            if replica.replica_id.unique_id in allowed
        }
        ranks = [[usable.pop(name)] for name in targets if name in usable]
        return ranks if is_strict or not usable else [*ranks, list(usable.values())]
