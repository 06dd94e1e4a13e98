"""Registry of a server's models by name, and of the requests that wait for a model.

A request holds a lease on its model while it runs, and idle models may be unloaded. If the model is
not loaded, the request waits until it is, unless the request times out, the client disconnects or
the server shuts down.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from kvboost_edge.server.api_errors import ApiError, ClientGone, ShuttingDown
from kvboost_edge.server.models.loader import Loader, ProcessMemory
from kvboost_edge.server.models.served import ServedModel
from kvboost_edge.server.state import ModelState, Shared, keep_state, tenant_of
from kvboost_edge.server.work.admission import queue_full
from kvboost_edge.server.work.tenant_shares import Shares

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["Models", "until_gone"]

_MOST_RETRY_SECONDS = 60


class Models:
    """All models of a server, used only by the event loop's thread.

    Attributes:
        loader: loader of the models.
        num_refused: number of requests rejected before their model was loaded.
    """

    def __init__(
        self,
        served: Sequence[ServedModel],
        shared: Shared,
        budget: int,
        process: ProcessMemory | None = None,
    ) -> None:
        """Create the registry.

        Args:
            served: the models, with distinct names; the first one is the default.
            shared: objects shared by all models.
            budget: maximum bytes of weights, pools and recurrent state of all loaded models.
            process: memory limit of the process; None without a limit.
        """
        self._served = list(served)
        self.loader = Loader(self._served, shared, budget, process)
        self.num_refused = 0
        self._shared = shared
        self._by_name = {name: one for one in self._served for name in one.names}
        self._waiting = Shares(
            max(1, shared.settings.max_queue_size), shared.settings.tenant_weights, least=1
        )
        self._told: set[asyncio.Future[None]] = set()

    @property
    def all(self) -> tuple[ServedModel, ...]:
        """The models, the first one first."""
        return tuple(self._served)

    @property
    def first(self) -> ServedModel:
        """Model of requests that do not name one."""
        return self._served[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names of all models."""
        return tuple(self._by_name)

    @property
    def loaded(self) -> list[ModelState]:
        return [one.state for one in self.all if one.state is not None]

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a model to be loaded."""
        return self._waiting.used

    def find(self, name: str | None) -> ServedModel | None:
        """Return the model with this name, the first model for None, or None if the name is
        unknown.
        """
        return self.first if name is None else self._by_name.get(name)

    def add(self, served: ServedModel) -> None:
        """Serve a further model, whose names are free."""
        self._served.append(served)
        self._by_name |= dict.fromkeys(served.names, served)

    async def remove(self, served: ServedModel) -> None:
        """Serve a model no more, which no request uses. Waits until its memory is free."""
        for name in served.names:
            del self._by_name[name]
        await self.loader.unload(served, "removed")
        self._served.remove(served)

    def may_set_keep_alive(self, served: ServedModel, tenant: str | None) -> bool:
        """Return whether requests of a tenant may set how long a model stays loaded.

        They may not if the model is permanent. With several API keys, only admins may.
        """
        return served.source is not None and self._shared.settings.is_admin(tenant)

    @contextlib.asynccontextmanager
    async def lease(
        self, request: Request, served: ServedModel, keep_alive: float | None = None
    ) -> AsyncGenerator[ModelState]:
        """Keep a model loaded while the block runs. Loads the model if necessary.

        The request's body must have been read before.

        Args:
            request: the HTTP request.
            served: the model.
            keep_alive: seconds that the model stays loaded after the request, unless a later
                request changes it; None for the server's default. Ignored unless
                `may_set_keep_alive` is true.

        Raises:
            ApiError: the model cannot be loaded, or is not loaded in time (503).
        """
        served.in_use += 1
        if keep_alive is None or not self.may_set_keep_alive(served, tenant_of(request)):
            keep_alive = served.default_keep_alive
        served.keep_alive = keep_alive
        served.stop_clock()
        try:
            self.loader.let_go_if_stopped(served)
            state = served.state
            if state is None:
                state = await self._when_loaded(request, served)
            keep_state(request, state)
            yield state
        finally:
            served.in_use -= 1
            if not served.in_use:
                self.loader.released(served)

    def refuse_waiting(self) -> None:
        """Fail the requests that wait for a model, because the server is shutting down."""
        for future in self._told:
            if not future.done():
                future.set_result(None)

    async def close(self) -> None:
        """Unload the models that were loaded on demand, and stop loading models."""
        self.refuse_waiting()
        await self.loader.close()

    # Requests that wait for a model.

    async def _when_loaded(self, request: Request, served: ServedModel) -> ModelState:
        facts: dict[str, Any] = request.scope["kvboost"]
        if served.refusal is not None and time.monotonic() < served.refusal.again:
            raise served.refusal.as_error()
        tenant: str | None = facts.get("tenant")
        if not self._waiting.fit(tenant, 1):
            self.num_refused += 1
            raise queue_full(
                "{used} requests{owner} are waiting for a model to load",
                self._waiting,
                tenant,
                remedy="raise --max-queue-size",
                retry_after=_retry_seconds(served.load_seconds),
            )
        self._waiting.take(tenant, 1)
        started = time.monotonic()
        gone = asyncio.ensure_future(until_gone(request))
        told = asyncio.get_running_loop().create_future()
        self._told.add(told)
        try:
            return await self._wait(
                served, gone, told, started + self._shared.settings.request_timeout
            )
        finally:
            self._told.discard(told)
            gone.cancel()
            self._waiting.give_back(tenant, 1)
            facts["load_wait_seconds"] = round(time.monotonic() - started, 3)

    async def _wait(
        self,
        served: ServedModel,
        gone: asyncio.Future[None],
        told: asyncio.Future[None],
        end: float,
    ) -> ModelState:
        while served.state is None:
            if self._shared.draining or self.loader.ended:
                raise ShuttingDown
            loading = self.loader.begin(served)
            left = max(0.0, end - time.monotonic())
            await asyncio.wait(
                {loading, gone, told}, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if gone.done():
                raise ClientGone
            if served.state is not None:
                break
            if loading.done():
                if served.refusal is not None:
                    raise served.refusal.as_error()
            elif not told.done() and time.monotonic() >= end:
                timeout = self._shared.settings.request_timeout
                raise ApiError(
                    503,
                    f"the model {served.name!r} was not loaded within {timeout:g} seconds "
                    f"(--request-timeout): {self._told_of(served)}; try again later",
                    code="model_loading",
                    headers={"Retry-After": str(_retry_seconds(served.load_seconds))},
                )
        return served.state

    def _told_of(self, served: ServedModel) -> str:
        """Return the reason why loading takes long, without revealing other keys' requests."""
        several = len(self._shared.settings.all_keys) > 1
        return (
            "other models use the memory" if several and not served.num_bytes else served.waits_for
        )


async def until_gone(request: Request) -> None:
    """Wait until the client disconnects."""
    # The body was read before, so the only message that can arrive is the disconnect.
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _retry_seconds(load_seconds: float) -> int:
    return max(1, min(_MOST_RETRY_SECONDS, math.ceil(load_seconds)))
