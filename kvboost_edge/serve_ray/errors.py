"""What can go wrong between ingress and replicas, as clients are told."""

from __future__ import annotations

from kvboost_edge.server.errors import ApiError

__all__ = ["NoReplica", "ReplicaLost"]


class ReplicaLost(ApiError):
    """503: the replica that computed an answer ended in the middle of it. Asked again, another one computes it."""

    def __init__(self) -> None:
        message = "the replica that computed this answer ended; send the request again"
        super().__init__(503, message, code="replica_lost", headers={"Retry-After": "1"})


class NoReplica(ApiError):
    """503: no replica takes requests."""

    def __init__(self) -> None:
        message = "no replica takes requests at the moment; Ray starts those that ended again"
        super().__init__(503, message, code="no_replica", headers={"Retry-After": "5"})
