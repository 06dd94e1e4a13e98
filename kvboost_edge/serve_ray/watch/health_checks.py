"""Independent health checks of replicas. A replica that hangs does not delay other checks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from kvboost_edge.server.logs import failure_place, log_facts

__all__ = ["HealthChecks"]


class HealthChecks:
    """Health checks on one event loop, at most one at a time for each replica.

    Args:
        look: Function that checks the replica with a given name, in bounded time. An exception is
            logged and ends only that check.
    """

    def __init__(self, look: Callable[[str], Awaitable[None]]) -> None:
        self._look = look
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def begin(self, names: Iterable[str]) -> None:
        """Start a check of each replica that is not already being checked."""
        for name in names:
            if name not in self._under_way:
                self._under_way[name] = asyncio.ensure_future(self._look_at(name))

    async def settle(self) -> None:
        """Wait until all running checks have ended."""
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
        except Exception as error:  # must not stop later checks
            facts = {"replica": name, "error": type(error).__name__, "place": failure_place(error)}
            log_facts(logging.WARNING, "health check failed", **facts)
        finally:
            self._under_way.pop(name, None)
