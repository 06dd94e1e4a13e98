"""Responses that clients asked to be stored: in memory only, bounded, each tenant's for itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from kvboost_edge.host.tenant_lru import TenantLRU

__all__ = ["ResponseStore", "StoredResponse"]

_BYTES = 64 << 20  # of all tenants together
_ENTRIES = 4096
_SECONDS = 24 * 3600.0
_OVERHEAD = 512  # bytes of an entry besides its texts


class StoredResponse(NamedTuple):
    """One turn of a conversation, as JSON: its answer, and the list of what was sent; `previous` is
    the turn before.
    """

    answer: bytes
    sent: bytes
    previous: str | None

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.answer) + len(self.sent) + _OVERHEAD


class ResponseStore:
    """Turns by tenant and id. Each tenant has an equal part of the bytes and entries. Safe to use
    from any thread.

    Attributes:
        num_tenants: API keys, or 1.
        kept: the turns; of a tenant's own those used least recently go first.
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
        self.kept: TenantLRU[StoredResponse] = TenantLRU(
            max_bytes // max(1, num_tenants),
            max_bytes,
            max_root_values=max(1, max_entries // max(1, num_tenants)),
            root_bytes=0,
            seconds=seconds,
            clock=clock,
        )

    def keep(self, tenant: str | None, name: str, turn: StoredResponse) -> bool:
        """Keep a turn under a new id; return False if it is larger than the tenant's part."""
        return self.kept.keep(tenant, tenant, name, turn, turn.size)

    def conversation(self, tenant: str | None, name: str) -> list[StoredResponse]:
        """Return the turns up to this one, the first one first.

        Raise KeyError with the id of one that is not kept.
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

    def find(self, tenant: str | None, name: str) -> StoredResponse | None:
        """Return the turn of this id; None where this tenant has none."""
        return self.kept.peek(tenant, name)

    def forget(self, tenant: str | None, name: str) -> bool:
        """Drop a turn; return whether there was one."""
        return self.kept.drop(tenant, name)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tenants' turns."""
        return self.kept.num_bytes
