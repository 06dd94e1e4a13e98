"""Ray's router of an ingress: it sends a request to the replica that the ingress selected.

Ray calls it in the process of the ingress, in a thread of its own, and updates its list of
replicas. Ray creates the class from a copy of this module's code, so nothing may be stored here;
see members.py.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from kvboost_edge.serve_ray.messages import ReplicaCall
from kvboost_edge.serve_ray.watch.members import tell_members, usable_members

__all__ = ["TargetRouter"]


class TargetRouter(RequestRouter):  # type: ignore[misc] # Ray's own types are not checked
    """A router that tries a request's `targets` in order, then any other usable replica, the least
    busy first. A call to one replica (`ReplicaCall`) goes nowhere else.

    Attributes:
        ingress: the ingress of a process that this router belongs to, see `members.watch_members`.
    """

    def initialize_state(self, ingress: str = "") -> None:
        self._ingress = ingress

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take Ray's current replicas."""
        found = {replica.replica_id.unique_id: replica.replica_metadata for replica in replicas}
        # First, because the next call sends waiting requests.
        tell_members(self._ingress, found)
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the available targets, each a rank of its own, then all others as one rank.

        A request without targets may go anywhere.
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
