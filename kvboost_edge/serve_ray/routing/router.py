"""The router's one face: replicas come and go, tell what they hold and how busy they are, and requests are placed."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvboost_edge.serve_ray.routing.chain import PromptChain
from kvboost_edge.serve_ray.routing.records import Choice, Cursor, EventBatch, ReplicaReport

__all__ = ["PrefixRouter"]


class PrefixRouter:
    """Chooses replicas by the expected time to the first token. Not for several threads at once.

    `now` is seconds of one clock that never goes back (`time.monotonic`). What the router believes may be wrong: that
    costs time. Which replica may be used at all is never a belief: only those added, not removed, not draining.

    max_entries        most (replica, block) pairs remembered, about 100 bytes each; beyond it every second block is
                       forgotten, again and again as needed, and matches are known to fewer places
    believed_seconds   so long a replica is believed to hold what was sent there, unless it says otherwise
    """

    def __init__(self, *, max_entries: int = 4_000_000, believed_seconds: float = 120.0) -> None:
        raise NotImplementedError

    def set_members(self, replica_ids: Iterable[str]) -> None:
        """These replicas there are; others are forgotten with all that was known of them, new ones hold nothing."""
        raise NotImplementedError

    def add(self, replica_id: str) -> None:
        """A replica is there; no change if it was."""
        raise NotImplementedError

    def remove(self, replica_id: str) -> None:
        """A replica is gone; no change if it was not there."""
        raise NotImplementedError

    def cursor(self, replica_id: str) -> Cursor:
        """What of a replica's events is known: ask its `Journal.since` from here. After a gap, NOTHING_KNOWN."""
        raise NotImplementedError

    def take_events(self, replica_id: str, batches: Iterable[EventBatch], now: float) -> bool:
        """Believe what a replica tells; False where batches are missing, and `cursor` says from where to ask again.

        Repeated and late batches change nothing. Of a replica that is not there they are ignored (True).
        """
        raise NotImplementedError

    def take_report(self, replica_id: str, report: ReplicaReport, now: float) -> None:
        """A replica's figures; late ones and those of a replica that is not there are ignored."""
        raise NotImplementedError

    def choose(
        self, chain: PromptChain, now: float, among: Collection[str] | None = None, count: int = 1
    ) -> list[Choice]:
        """At most `count` replicas, the best first; of those `among` if given. [] where none takes requests. Changes
        nothing but what has expired."""
        raise NotImplementedError

    def note_routed(self, choice: Choice, chain: PromptChain, now: float) -> None:
        """The request went there: until the next report its tokens count as queued, and its blocks are believed to be
        there for `believed_seconds`."""
        raise NotImplementedError

    def note_not_started(self, choice: Choice) -> None:
        """A request that was noted never reached the replica: its tokens do not wait there."""
        raise NotImplementedError

    def num_entries(self) -> int:
        """(replica, block) pairs remembered."""
        raise NotImplementedError
