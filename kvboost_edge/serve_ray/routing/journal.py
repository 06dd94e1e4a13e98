"""A replica's side of the events: numbered batches, kept for a while, so that several routers can ask each at its own
pace, and late ones be told all there is."""

from __future__ import annotations

from kvboost_edge.kvcache.events import CacheEvents
from kvboost_edge.serve_ray.routing.records import Cursor, EventBatch

__all__ = ["Journal"]


class Journal:
    """The batches of one replica's life. Not for several threads at once.

    max_changes   most keys of old batches kept; who asks from before them gets one whole batch
    epoch         a random number that no other life of a replica has, never 0
    """

    def __init__(self, max_changes: int = 100_000, epoch: int | None = None) -> None:
        raise NotImplementedError

    def add(self, events: CacheEvents) -> EventBatch | None:
        """What the engine's `take_cache_events` gave; the batch it became, None where nothing changed."""
        raise NotImplementedError

    def since(self, cursor: Cursor) -> list[EventBatch]:
        """The batches after those somebody knows, in order; one whole batch where those are not kept, or the cursor is
        of another epoch; [] where nothing is new."""
        raise NotImplementedError
