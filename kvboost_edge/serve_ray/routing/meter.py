"""A replica's own figures, from the moments at which its requests begin, answer and end."""

from __future__ import annotations

from collections.abc import Hashable

from kvboost_edge.serve_ray.routing.records import ReplicaReport

__all__ = ["Meter"]


class Meter:
    """Counts and measures what a `ReplicaReport` says. Not for several threads at once; `now` as in `PrefixRouter`.

    seconds_per_token   what is taken as known before anything was measured
    step_tokens, max_running   see ReplicaReport
    """

    def __init__(self, *, seconds_per_token: float, step_tokens: int, max_running: int) -> None:
        raise NotImplementedError

    def begin(self, request: Hashable, missing_tokens: int, now: float) -> None:
        """A request arrived that has so many prompt tokens to compute (`Choice.missing_tokens`)."""
        raise NotImplementedError

    def first_token(self, request: Hashable, now: float) -> None:
        """It gave its first token; later calls for the same request do nothing."""
        raise NotImplementedError

    def end(self, request: Hashable, now: float, num_tokens: int = 0) -> None:
        """It is done, cancelled or failed, after so many tokens of answer."""
        raise NotImplementedError

    def report(self, now: float, *, free_blocks: int, is_draining: bool = False) -> ReplicaReport:
        """The figures of this moment."""
        raise NotImplementedError
