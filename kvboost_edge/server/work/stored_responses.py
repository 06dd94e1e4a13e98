"""Responses that clients asked to store, bounded, only in memory, and separate for each tenant."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from kvboost_edge.host.tenant_lru import TenantLRU

__all__ = ["ResponseStore", "StoredResponse"]

_BYTES = 64 << 20  # bytes, for all tenants together
_ENTRIES = 4096
_SECONDS = 24 * 3600.0
_OVERHEAD = 512  # bytes of an entry in addition to its texts
_ID_BYTES = 200  # of an item's id


class StoredResponse(NamedTuple):
    """A turn of a conversation, as JSON.

    Attributes:
        answer: the response.
        sent: input items, as a list.
        previous: id of the previous turn.
        items: ids of the input and output items.
    """

    answer: bytes
    sent: bytes
    previous: str | None
    items: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.answer) + len(self.sent) + _ID_BYTES * len(self.items) + _OVERHEAD


class ResponseStore:
    """Stored turns by tenant and id.

    Each tenant has an equal share of the bytes and entries. Safe to use from any thread.

    Attributes:
        kept: the turns; a tenant's least recently used turn is evicted first.
    """

    def __init__(
        self,
        num_tenants: int,
        *,
        max_bytes: int = _BYTES,
        max_entries: int = _ENTRIES,
        seconds: float = _SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty store.

        Args:
            num_tenants: number of API keys, at least 1.
            max_bytes: maximum bytes of all tenants' turns.
            max_entries: maximum number of all tenants' turns.
            seconds: lifetime of a turn.
            clock: function that returns the time in seconds.
        """
        self.kept: TenantLRU[StoredResponse] = TenantLRU(
            max_bytes // max(1, num_tenants),
            max_bytes,
            max_root_values=max(1, max_entries // max(1, num_tenants)),
            root_bytes=0,
            seconds=seconds,
            clock=clock,
        )

    def keep(self, tenant: str | None, name: str, turn: StoredResponse) -> bool:
        """Store a turn under a new id. Returns False if it is larger than the tenant's share."""
        return self.kept.keep(tenant, tenant, name, turn, turn.size)

    def conversation(self, tenant: str | None, name: str) -> list[StoredResponse]:
        """Return a turn and all turns before it, oldest first.

        Raises:
            KeyError: a turn is not stored; the error's argument is its id.
        """
        found: list[StoredResponse] = []
        at: str | None = name
        while at is not None:
            turn = self.kept.find(tenant, at)
            if turn is None:
                raise KeyError(at)
            found.append(turn)
            at = turn.previous
        return found[::-1]

    def holding(self, tenant: str | None, items: Collection[str]) -> list[StoredResponse]:
        """Return turns that together hold items with these ids, most recently used first.

        Raises:
            KeyError: an item is not stored; the error's argument is its id.
        """
        missing = set(items)
        found: list[StoredResponse] = []
        for turn in reversed(self.kept.values(tenant) if missing else []):
            if not missing.isdisjoint(turn.items):
                found.append(turn)
                missing -= turn.items
        if missing:
            raise KeyError(next(one for one in items if one in missing))
        return found

    def find(self, tenant: str | None, name: str) -> StoredResponse | None:
        """Return the tenant's turn with this id, or None."""
        return self.kept.peek(tenant, name)

    def forget(self, tenant: str | None, name: str) -> bool:
        """Delete a turn, and return whether it existed."""
        return self.kept.drop(tenant, name)

    @property
    def num_bytes(self) -> int:
        """Size of all tenants' turns in bytes."""
        return self.kept.num_bytes
