"""Ray's request router in an ingress: it sends requests to the replicas that were chosen.

Ray calls the router in the ingress process, on a separate thread, and updates its replicas. Ray
creates the class from a copy of this module's code, so the module cannot hold state, see
members.py.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from kvboost_edge.serve_ray.messages import ReplicaCall
from kvboost_edge.serve_ray.watch.members import tell_members, usable_members

__all__ = ["TargetRouter"]


class TargetRouter(RequestRouter):  # type: ignore[misc] # Ray's own types are not checked
    """A request router that tries the `targets` of a request in order, then other usable replicas.

    Of the others, the least busy replica is used. A `ReplicaCall` goes only to its target.
    """

    def initialize_state(self, ingress: str = "") -> None:
        self._ingress = ingress

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Set Ray's current replicas."""
        found = {replica.replica_id.unique_id: replica.replica_metadata for replica in replicas}
        # Done first, because super() sends waiting requests.
        tell_members(self._ingress, found)
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank the replicas: each available target in order, then all others together.

        A request without targets may go to any replica.
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
