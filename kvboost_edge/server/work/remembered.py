"""Conversations that clients asked to be remembered: in memory only, each tenant's for itself,
bounded in every way.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["ResponseStore", "StoredResponse"]

_BYTES = 64 << 20  # of all tenants together
_ENTRIES = 4096
_SECONDS = 24 * 3600.0
_OVERHEAD = 512  # bytes of an entry beside its texts


class StoredResponse(NamedTuple):
    """One turn of a conversation, as JSON: its answer, and the list of what was sent; `previous` is
    the turn before.
    """

    answer: bytes
    sent: bytes
    previous: str | None
    kept_at: float = 0.0

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.answer) + len(self.sent) + _OVERHEAD


class ResponseStore:
    """Turns by tenant and id. Each tenant has an equal part of the bytes and entries, so nobody's
    turns leave for another's; of its own those go first that were not used for longest. Any thread
    may call.

    num_tenants   API keys, or 1
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
        self.max_bytes = max_bytes // max(1, num_tenants)
        self.max_entries = max(1, max_entries // max(1, num_tenants))
        self.seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._turns: dict[str | None, OrderedDict[str, StoredResponse]] = {}
        self._bytes: dict[str | None, int] = {}

    def keep(self, tenant: str | None, name: str, turn: StoredResponse) -> bool:
        """Remember a turn under a new id. False: it is larger than the tenant's part and was not
        kept.
        """
        if turn.size > self.max_bytes:
            return False
        with self._lock:
            self._forget_old()
            turns = self._turns.setdefault(tenant, OrderedDict())
            turns[name] = turn._replace(kept_at=self._clock())
            self._bytes[tenant] = self._bytes.get(tenant, 0) + turn.size
            while self._bytes[tenant] > self.max_bytes or len(turns) > self.max_entries:
                self._drop(tenant, next(iter(turns)))
        return True

    def conversation(self, tenant: str | None, name: str) -> list[StoredResponse]:
        """The turns up to this one, the first one first. KeyError with the id of one that is not
        remembered.
        """
        with self._lock:
            self._forget_old()
            turns = self._turns.get(tenant, OrderedDict())
            found: list[StoredResponse] = []
            at: str | None = name
            while at is not None:
                found.append(turns[at])
                turns.move_to_end(at)
                at = found[-1].previous
        return found[::-1]

    def find(self, tenant: str | None, name: str) -> StoredResponse | None:
        """The turn of this id; None where this tenant has none."""
        with self._lock:
            self._forget_old()
            return self._turns.get(tenant, OrderedDict()).get(name)

    def forget(self, tenant: str | None, name: str) -> bool:
        """Whether there was one to forget."""
        with self._lock:
            self._forget_old()
            known = name in self._turns.get(tenant, ())
            if known:
                self._drop(tenant, name)
        return known

    @property
    def num_bytes(self) -> int:
        """Bytes of all tenants' turns."""
        return sum(self._bytes.values())

    def _drop(self, tenant: str | None, name: str) -> None:
        self._bytes[tenant] -= self._turns[tenant].pop(name).size

    def _forget_old(self) -> None:
        """Of all tenants. What was used again stands behind others, so each has to be looked at;
        there are few.
        """
        oldest = self._clock() - self.seconds
        for tenant, turns in self._turns.items():
            for name in [name for name, turn in turns.items() if turn.kept_at < oldest]:
                self._drop(tenant, name)
