"""Health checks of replicas, each on its own: a hanging replica delays no other's check."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from kvboost_edge.server.logs import failure_place, log_facts

__all__ = ["HealthChecks"]


class HealthChecks:
    """At most one check of each replica at a time; all on one event loop.

    Attributes:
        look: checks the replica of a name, in bounded time; its exceptions are logged and end only
            that check.
    """

    def __init__(self, look: Callable[[str], Awaitable[None]]) -> None:
        self._look = look
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def begin(self, names: Iterable[str]) -> None:
        """Begin a check of each replica that has none in progress."""
        for name in names:
            if name not in self._under_way:
                self._under_way[name] = asyncio.ensure_future(self._look_at(name))

    async def settle(self) -> None:
        """Wait until the checks in progress have ended."""
        await asyncio.gather(*self._under_way.values())

    async def end(self) -> None:
        """Cancel all checks."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._under_way.clear()

    async def _look_at(self, name: str) -> None:
        try:
            await self._look(name)
        except Exception as error:  # without further looks nothing would ever be known of it again
            facts = {"replica": name, "error": type(error).__name__, "place": failure_place(error)}
            log_facts(logging.WARNING, "replica not looked at", **facts)
        finally:
            self._under_way.pop(name, None)
