"""Looks at replicas, each by itself: one that hangs keeps nobody else from being looked at."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from kvboost_edge.server.logs import failure_place, log_facts

__all__ = ["HealthChecks"]


class HealthChecks:
    """At most one look at each replica at a time; all on one event loop.

    look   looks at the replica of a name, in bounded time; what it raises is logged and ends that
           look alone
    """

    def __init__(self, look: Callable[[str], Awaitable[None]]) -> None:
        self._look = look
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def begin(self, names: Iterable[str]) -> None:
        """Begin a look at each of them that none is under way at."""
        for name in names:
            if name not in self._under_way:
                self._under_way[name] = asyncio.ensure_future(self._look_at(name))

    async def settle(self) -> None:
        """Wait until those under way now have ended."""
        await asyncio.gather(*self._under_way.values())

    async def end(self) -> None:
        """End all of them."""
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
